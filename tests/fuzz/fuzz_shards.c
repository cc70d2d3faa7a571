/* fuzz_shards.c - any bytes as two token files. Bits 0 and 1 of the first byte choose the files
   that get 1,012 bytes of zeros after their third word, which makes a full header; bits 2 to 5 are
   the sequence length minus 1. The second byte is the length of the first file. */
#include "tests/fuzz/fuzz.h"

static void put_part(
    memory_fs *fs, const char *name, const unsigned char *data, size_t bytes, int wide) {
    unsigned char *file = (unsigned char *)calloc(1, bytes + 1024);
    size_t head = bytes < 12 ? bytes : 12;
    memcpy(file, data, wide ? head : bytes);
    if (wide) memcpy(file + 1024, data + head, bytes - head);
    memory_put(fs, name, file, wide ? 1024 + bytes - head : bytes);
    free(file);
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    static const char *const names[2] = { "a", "b" };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    if (bytes < 2) return;
    int seq = 1 + (data[0] >> 2 & 15);
    size_t first = data[1] < bytes - 2 ? data[1] : bytes - 2;
    put_part(&fs, "a", data + 2, first, data[0] & 1);
    put_part(&fs, "b", data + 2 + first, bytes - 2 - first, data[0] >> 1 & 1);
    dt_ctx *ctx = fuzz_ctx(&fs);
    dt_text *t = dt_text_open(ctx, names, bytes - 2 > first ? 2 : 1, seq);
    fuzz_must((t == NULL) == (dt_error(ctx) != DT_OK), "no error text");
    int32_t ids[16], labels[16], last = -1;
    int64_t n = dt_text_sequences(t);
    /* only the last 64 sequences */
    for (int64_t i = n > 64 ? n - 64 : 0, begin = i; i < n; i++) {
        if (dt_text_read(t, i, ids, labels) != DT_OK) break;
        fuzz_must(i == begin || last == ids[0], "sequences do not follow each other");
        for (int k = 0; k < seq; k++) {
            fuzz_must(ids[k] >= 0 && ids[k] < dt_text_token_limit(t), "a token above the limit");
            fuzz_must(k == 0 || ids[k] == labels[k - 1], "labels are not the next tokens");
        }
        last = labels[seq - 1];
    }
    dt_text_close(t);
    dt_ctx_free(ctx);
    fuzz_must(fs.open == 0, "a descriptor is leaked");
    memory_clear(&fs);
}
