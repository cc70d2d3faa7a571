/* fuzz_tokenizer.c - any bytes as a tokenizer.json, and as a text to encode. The first byte says what
   the rest is: the file; what follows the vocabulary of the 256 bytes in the file, up to its end; or
   a text for one of three tokenizers. What is encoded decodes to the same bytes, except with NFC. */
#include "tests/fuzz/fuzz.h"
#include "examples/tokenizer.h"

/* Writes the beginning of a file: the vocabulary with the 256 bytes, without its closing brace. */
static size_t put_bytes(char *out) {
    uint32_t code[256];
    size_t used = (size_t)sprintf(out, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    tok_alphabet(code);
    for (int b = 0; b < 256; b++) {
        used += (size_t)sprintf(out + used, "%s\"", b ? "," : "");
        if (code[b] == '"' || code[b] == '\\') out[used++] = '\\';
        used += tok_utf8_put((unsigned char *)out + used, code[b]);
        used += (size_t)sprintf(out + used, "\":%d", b);
    }
    return used;
}

/* Encodes a text whole and in two parts, and decodes it whole and as a stream. */
static void round_trip(tok *t, const char *text, size_t n) {
    int64_t count = 0, half = 0;
    size_t bytes = 0, streamed = 0, end = tok_safe_end(t, text, n);
    const int32_t *got = tok_encode(t, text, n, (tok_encode_desc){ 0, 0, 0 }, &count);
    fuzz_must(got != NULL, "a text cannot be encoded");
    int32_t *ids = (int32_t *)malloc(((size_t)count + 1) * sizeof *ids);
    memcpy(ids, got, (size_t)count * sizeof *ids);
    const char *back = tok_decode(t, ids, count, (tok_decode_desc){ 0, NULL }, &bytes);
    int exact = !t->nfc && !t->prefix_space && t->n_added == 0;
    fuzz_must(!exact || (bytes == n && memcmp(back, text, n) == 0), "a text is not restored");
    tok_held held = { 0, { 0 } };
    for (int64_t i = 0; i < count; i++) {
        size_t part = 0;
        tok_decode(t, ids + i, 1, (tok_decode_desc){ 0, &held }, &part);
        streamed += part;
    }
    fuzz_must(streamed + (size_t)held.bytes == bytes, "a stream has another length");
    for (int part = 0; part < 2 && end > 0; part++) {
        const char *s = part ? text + end : text;
        int64_t k = 0;
        got = tok_encode(t, s, part ? n - end : end, (tok_encode_desc){ 0, part, !part }, &k);
        fuzz_must(got && half + k <= count && memcmp(got, ids + half, (size_t)k * sizeof *ids) == 0,
            "a text that is cut has other ids");
        half += k;
    }
    fuzz_must(end == 0 || half == count, "a text that is cut has fewer ids");
    free(ids);
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    static const char *const rest[] = {
        ",\"ab\":256,\"aba\":257,\"\304\240a\":258},\"merges\":[\"a b\",\"ab a\",\"\304\240 a\"]},"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}}",
        ",\"ab\":256,\"abab\":257},\"merges\":[\"a b\",\"ab "
        "ab\"]},\"normalizer\":{\"type\":\"NFC\"},"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}",
        ",\"ab\":256},\"merges\":[\"a b\"]},\"pre_tokenizer\":{\"type\":\"ByteLevel\"},"
        "\"added_tokens\":[{\"id\":257,\"content\":\"a<\",\"rstrip\":true,\"lstrip\":true},"
        "{\"id\":258,\"content\":\"<\\n\",\"special\":true}]}"
    };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    if (bytes == 0) return;
    int way = data[0] % 5;
    char *file = (char *)malloc(8192 + bytes);
    size_t used = way > 0 ? put_bytes(file) : 0;
    const char *more = way > 1 ? rest[way - 2] : (const char *)data + 1;
    size_t length = way > 1 ? strlen(more) : bytes - 1;
    memcpy(file + used, more, length);
    memory_put(&fs, "t.json", file, used + length);
    dt_ctx *ctx = fuzz_ctx(&fs);
    tok *t = tok_open(ctx, "t.json");
    fuzz_must((t == NULL) == (dt_error(ctx) != DT_OK), "no error text");
    fuzz_must(way < 2 || t != NULL, "a tokenizer cannot be opened");
    if (t) round_trip(t, (const char *)data + 1, bytes - 1);
    if (t) round_trip(t, " ab abab\nx <|a|>", 16);
    tok_close(t);
    fuzz_must(dt_memory_used(ctx).live[DT_MEM_HOST] <= 2000, "memory is leaked");
    dt_ctx_free(ctx);
    memory_clear(&fs);
    free(file);
}
