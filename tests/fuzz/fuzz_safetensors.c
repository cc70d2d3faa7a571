/* fuzz_safetensors.c - any bytes as a weight file. The first byte says what the rest is: the file,
   a header to which a valid length and data are added, or an index of three valid shards. */
#include "tests/fuzz/fuzz.h"

static void put_good(memory_fs *fs, const char *name, const char *header, size_t data) {
    unsigned char file[256] = { 0 };
    file[0] = (unsigned char)strlen(header);
    memcpy(file + 8, header, strlen(header));
    memory_put(fs, name, file, 8 + strlen(header) + data);
}

/* Reads every element of every tensor, and the last element alone. */
static void read_all(dt_ctx *ctx, dt_weights *w) {
    static double host[4096];
    for (int i = 0; i < dt_weights_count(w) && dt_error(ctx) == DT_OK; i++) {
        const dt_weight *t = dt_weights_get(w, i);
        fuzz_must(dt_weights_find(w, t->name) == i, "a tensor is not found");
        int integers = t->dtype == DT_I32 || t->dtype == DT_U8 || t->dtype == DT_I64;
        dt_dtype as = integers || t->count > 100 ? t->dtype : DT_F64;
        if (!t->readable) continue;
        for (int64_t at = 0; at < t->count; at += 4096)
            dt_weights_read(w, i, at, t->count - at < 4096 ? t->count - at : 4096, as, host);
        if (t->count > 0) dt_weights_read(w, i, t->count - 1, 1, t->dtype, host);
        int any_bits = strcmp(t->type, "BOOL") != 0 && strcmp(t->type, "U64") != 0;
        fuzz_must(dt_error(ctx) == DT_OK || !any_bits, "an element cannot be read");
    }
    dt_weights_metadata(w, "format");
    if (dt_weights_find(w, "a") < 0) return;
    dt_tensor *p = dt_param(ctx, "p", DT_SHAPE(2, 3), DT_ZEROS);
    dt_weight_part part = { .name = "a", .transposed = dt_weights_count(w) % 2 };
    dt_weights_load(w, p, 0, &part, 1);
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    if (bytes == 0) return;
    int way = data[0] % 3;
    data++, bytes--;
    if (way == 0) memory_put(&fs, "f", data, bytes);
    if (way == 1) { /* the second byte is the size of the data, in units of 4 */
        size_t room = bytes ? 4 * (size_t)data[0] : 0;
        unsigned char *file = (unsigned char *)calloc(1, 8 + bytes + room);
        uint64_t n = bytes ? bytes - 1 : 0;
        memcpy(file, &n, 8);
        if (n) memcpy(file + 8, data + 1, n);
        memory_put(&fs, "f", file, 8 + n + room);
        free(file);
    }
    if (way == 2) {
        put_good(
            &fs, "d/s1", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", 24);
        put_good(
            &fs, "d/s2", "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4);
        put_good(&fs, "d/s3", "{\"a\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}", 8);
        memory_put(&fs, "d/model.safetensors.index.json", data, bytes);
    }
    dt_ctx *ctx = fuzz_ctx(&fs);
    dt_weights *w = dt_weights_open(ctx, way == 2 ? "d" : "f");
    fuzz_must((w == NULL) == (dt_error(ctx) != DT_OK), "no error text");
    if (w) read_all(ctx, w);
    dt_weights_close(w);
    dt_ctx_free(ctx);
    fuzz_must(fs.open == 0, "a descriptor is leaked");
    memory_clear(&fs);
}
