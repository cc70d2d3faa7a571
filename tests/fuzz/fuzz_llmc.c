/* fuzz_llmc.c - the header of an llm.c model. The input is 32 bytes of header, then 8 bytes with
   the file's size; without these 8 bytes the file has the size that the header implies. */
#include "tests/fuzz/fuzz.h"

static void fuzz_one(const unsigned char *data, size_t bytes) {
    memory_fs fs;
    unsigned char head[1024] = { 0 };
    int32_t word[8];
    int64_t size = 0;
    memset(&fs, 0, sizeof fs);
    memcpy(head, data, bytes < 32 ? bytes : 32);
    memcpy(word, head, 32);
    if (bytes >= 40) memcpy(&size, data + 32, 8);
    int64_t L = word[4], C = word[6];
    int small = L < 100 && L > 0 && C < 1000 && C > 0 && word[2] > 0 && word[2] < 10000 &&
                word[7] > 0 && word[7] < 10000;
    if (bytes < 40 && small)
        size = 1024 + (word[1] == 5 ? 2 : 4) *
                          (word[7] * C + word[2] * C + L * (12 * C * C + 13 * C) + 2 * C);
    size = size < 0 ? 0 : size;
    /* other magic numbers: at most 4 KB, as fuzz_safetensors tests large headers */
    if (word[0] != 20240326 && size > 4096) size = 4096;
    memory_put(&fs, "f", head, 1024);
    fs.file[0].size = (size_t)size; /* zeros after the header, which take no memory */
    dt_ctx *ctx = fuzz_ctx(&fs);
    dt_weights *w = dt_weights_open(ctx, "f");
    fuzz_must((w == NULL) == (dt_error(ctx) != DT_OK), "no error text");
    if (w) {
        double v[2];
        int64_t end = 1024;
        for (int i = 0; i < dt_weights_count(w); i++) {
            int64_t n = dt_weights_get(w, i)->count;
            /* without conversion, whose window would take most of the time */
            dt_dtype dtype = dt_weights_get(w, i)->dtype;
            end += n * (int64_t)dt_dtype_size(dtype);
            fuzz_must(
                dt_weights_read(w, i, 0, 1, dtype, v) == DT_OK, "the first element cannot be read");
            fuzz_must(dt_weights_read(w, i, n - 1, 1, dtype, v) == DT_OK,
                "the last element cannot be read");
        }
        fuzz_must(end == size && dt_weights_count(w) == 16, "the tensors do not fill the file");
        fuzz_must(!small || dt_weights_llmc(w).padded_vocab >= dt_weights_llmc(w).vocab,
            "the padded vocabulary is smaller than the vocabulary");
    }
    dt_weights_close(w);
    dt_ctx_free(ctx);
    fuzz_must(fs.open == 0, "a descriptor is leaked");
    memory_clear(&fs);
}
