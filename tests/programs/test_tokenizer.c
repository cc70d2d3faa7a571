/* test_tokenizer.c - examples/tokenizer.h: encoding, decoding, training, broken files
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_tokenizer
         test_tokenizer --compare DIR          encodes the texts of DIR and compares the ids with
                                               those of the package tokenizers; see make_tokenizer.py
         test_tokenizer --train TEXT VOCAB OUT     trains on a file

   The small tokenizers of tests/golden/tokenizer and the ids of vectors.json come from the package
   (golden/make_tokenizer.py). test_tokenizer.sh makes larger ones and runs --compare. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <time.h>
#define DT_IMPLEMENTATION
#include "dt_tensor.h"
#include "examples/tokenizer.h"
#include "tests/support/check.h"
#include "tests/support/memory_io.h"

static const char *const golden = "tests/golden/tokenizer";

// ==== 1. Helpers ================================================================================

static void log_nothing(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_ctx *make_ctx(memory_fs *fs) {
    dt_host host = *dt_host_default();
    dt_io io = fs ? memory_io(fs) : *dt_io_default();
    host.log = log_nothing;
    return dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host, .io = &io });
}

/* Checks that no error has occurred and that all memory is free again. */
static void free_ctx(dt_ctx *ctx, const char *what) {
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s: %s", what, dt_error_text(ctx));
    CHECK_MSG(dt_memory_used(ctx).live[DT_MEM_HOST] <= 2000, "%s: %lld bytes are not freed", what,
        (long long)dt_memory_used(ctx).live[DT_MEM_HOST]);
    dt_ctx_free(ctx);
}

static const char *path_of(const char *folder, const char *name, const char *end) {
    static char path[600];
    snprintf(path, sizeof path, "%s/%s%s", folder, name, end);
    return path;
}

static char *read_text(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    fseek(f, 0, SEEK_END);
    *bytes = (size_t)ftell(f);
    rewind(f);
    char *text = (char *)malloc(*bytes + 1);
    size_t got = fread(text, 1, *bytes, f);
    fclose(f);
    text[got] = 0;
    return got == *bytes ? text : (free(text), NULL);
}

static tok *open_golden(dt_ctx *ctx, const char *name) {
    tok *t = tok_open(ctx, path_of(golden, name, ".json"));
    CHECK_MSG(t != NULL, "%s: %s", name, dt_error_text(ctx));
    return t;
}

/* Encodes a text and compares its decoded ids with `want`. */
static void round_trip(tok *t, const char *text, size_t n, const char *want, const char *what) {
    int64_t count = 0;
    size_t bytes = 0;
    const int32_t *ids = tok_encode(t, text, n, (tok_encode_desc){ 0 }, &count);
    const char *back = ids ? tok_decode(t, ids, count, (tok_decode_desc){ 0 }, &bytes) : NULL;
    CHECK_MSG(
        back && bytes == n && memcmp(back, want, n) == 0, "%s: %zu bytes, of %zu", what, bytes, n);
}

// ==== 2. Expected ids ===========================================================================

static void test_golden(void) {
    dt_ctx *ctx = make_ctx(NULL);
    size_t bytes = 0;
    char *text = dt_file_read(ctx, path_of(golden, "vectors", ".json"), 1 << 20, &bytes);
    dt_json *j = dt_json_parse(ctx, "vectors.json", text, bytes);
    static const char *const names[] = { "gpt2", "llama3", "qwen" };
    tok *t[3];
    for (int i = 0; i < 3; i++) t[i] = open_golden(ctx, names[i]);
    CHECK(dt_json_count(j, 0) == 90);
    for (int i = 0; i < dt_json_count(j, 0) && dt_error(ctx) == DT_OK; i++) {
        int node = dt_json_at(j, 0, i), list = dt_json_find(j, node, "ids"), same = 1;
        const char *name = dt_json_string(j, dt_json_find(j, node, "tokenizer"), NULL);
        size_t n = 0;
        const char *s = dt_json_string(j, dt_json_find(j, node, "text"), &n);
        int64_t count = 0, id = 0;
        tok *own = t[name[0] == 'g' ? 0 : name[0] == 'l' ? 1 : 2];
        const int32_t *ids = tok_encode(own, s, n, (tok_encode_desc){ .add_special = 1 }, &count);
        for (int k = 0; k < count && k < dt_json_count(list >= 0 ? j : NULL, list); k++)
            same &= dt_json_int(j, dt_json_at(j, list, k), &id) && ids[k] == id;
        CHECK_MSG(
            ids && same && count == dt_json_count(j, list), "%s: '%s' has other ids", name, s);
        if (own != t[2] && !memmem(s, n, "<mask>", 6)) round_trip(own, s, n, s, s);
    }
    CHECK(tok_vocab(t[0]) == 331 && tok_id(t[0], "<mask>") == 330);
    CHECK(tok_id(t[0], "<|endoftext|>") == 0 && tok_id(t[0], "<|eot_id|>") == -1);
    CHECK(tok_id(t[1], "<|begin_of_text|>") == 330 && tok_id(t[1], "") == -1);
    for (int i = 0; i < 3; i++) tok_close(t[i]);
    dt_json_free(j);
    dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    free_ctx(ctx, "golden");
}

/* The words of the three regexes, as the lengths that the package splits into. */
static void test_words(void) {
    static const struct {
        const char *text, *lengths[TOK_REGEXES];
    } cases[] = {
        { "I'm it'S we'LL 's'",
            { "1 2 3 1 1 3 1 2 2 1 1", "1 2 3 2 3 3 2 1 1", "1 2 3 2 3 3 2 1 1" } },
        { "a'\305\277 x'\305\277", { "1 1 2 2 1 2", "1 3 2 3", "1 3 2 3" } },
        { "  two   sp  ", { "1 4 2 3 2", "1 4 2 3 2", "1 4 2 3 2" } },
        { "\n\n  x\n \n y\r\n", { "3 2 3 2 2", "2 1 2 3 2 2", "2 1 2 3 2 2" } },
        { "x.\n\ny!!\n", { "1 1 1 1 1 2 1", "1 3 1 3", "1 3 1 3" } },
        { "1234567 12", { "7 3", "3 3 1 1 2", "1 1 1 1 1 1 1 1 1 1" } },
        { "\tab\302\240cd (ef)", { "1 2 2 2 2 2 1", "3 4 2 2 1", "3 4 2 2 1" } },
        { "\314\201a\314\201b", { "2 1 2 1", "3 3", "3 3" } },
        { "\302\262\331\243\342\205\2537", { "8", "7 1", "2 2 3 1" } },
        { "'r 'rex ' ' '", { "1 1 2 3 2 2 2", "2 2 3 2 2 2", "2 2 3 2 2 2" } },
        { "I'Mx we'llx a'\305\277x 'REx",
            { "1 1 2 3 3 1 2 1 3 2 3", "1 2 1 3 3 1 2 3 1 2 3", "1 2 1 3 3 1 2 3 1 2 3" } },
    };
    dt_ctx *ctx = make_ctx(NULL);
    tok *t = open_golden(ctx, "gpt2");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (t->regex = 0; t->regex < TOK_REGEXES; t->regex++) {
            char got[200] = "";
            size_t n = strlen(cases[i].text), used = 0;
            for (size_t at = 0, end; at < n; at = end) {
                end = tok_word(t, (const unsigned char *)cases[i].text, n, at);
                used += (size_t)sprintf(got + used, "%s%zu", at ? " " : "", end - at);
            }
            CHECK_MSG(strcmp(got, cases[i].lengths[t->regex]) == 0, "case %zu, regex %d: %s", i,
                t->regex, got);
        }
    tok_close(t);
    free_ctx(ctx, "words");
}

/* NFC of the package: order of marks, blocked marks, singletons, exclusions, Hangul. */
static void test_nfc(void) {
    static const char *const cases[][2] = {
        { "cafe\314\201", "caf\303\251" },
        { "a\314\243\314\201", "\341\272\241\314\201" },
        { "a\314\201\314\243", "\341\272\241\314\201" },
        { "a\314\220\314\201", "a\314\220\314\201" },
        { "\341\271\251\314\201", "\341\271\251\314\201" },
        { "s\314\207\314\243", "\341\271\251" },
        { "\342\204\246\342\204\253", "\316\251\303\205" },
        { "\341\204\200\341\205\241\341\206\250", "\352\260\201" },
        { "\352\260\200\341\206\250", "\352\260\201" },
        { "\341\204\200\341\205\241\341\205\241", "\352\260\200\341\205\241" },
        { "\340\245\230\315\204", "\340\244\225\340\244\274\314\210\314\201" },
        { "\357\254\254", "\327\251\326\274\327\201" },
        { "\360\235\205\240", "\360\235\205\230\360\235\205\245\360\235\205\256" },
        { "\340\275\263\340\275\261", "\340\275\261\340\275\261\340\275\262" },
        { "a\314\225\314\200\326\256\314\200b", "\303\240\326\256\314\200\314\225b" },
        { "\314\201a", "\314\201a" },
        { "\357\250\216\357\250\220\360\257\240\200", "\357\250\216\345\241\232\344\270\275" },
        { "\340\267\231\340\267\212x", "\340\267\232x" },
        { "e\xff\314\201 e\xcc", "e\xff\314\201 e\xcc" },
    };
    dt_ctx *ctx = make_ctx(NULL);
    tok *t = open_golden(ctx, "qwen");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const unsigned char *s = (const unsigned char *)cases[i][0];
        size_t n = strlen(cases[i][0]);
        CHECK_MSG(tok_nfc(t, &s, &n) && n == strlen(cases[i][1]) && memcmp(s, cases[i][1], n) == 0,
            "case %zu: %.*s", i, (int)n, (const char *)s);
    }
    tok_close(t);
    free_ctx(ctx, "NFC");
}

/* Writes a tokenizer.json whose vocabulary has the 256 bytes, ids 0 to 255, and then `rest`. */
static void put_tokenizer(memory_fs *fs, const char *rest) {
    char file[8192];
    uint32_t code[256];
    size_t used = (size_t)sprintf(file, "{\"model\":{\"type\":\"BPE\",\"vocab\":{");
    tok_alphabet(code);
    for (int b = 0; b < 256; b++) {
        const char *escape = code[b] == '"' || code[b] == '\\' ? "\\" : "";
        used += (size_t)sprintf(file + used, "%s\"%s", b ? "," : "", escape);
        used += tok_utf8_put((unsigned char *)file + used, code[b]);
        used += (size_t)sprintf(file + used, "\":%d", b);
    }
    used += (size_t)sprintf(file + used, "%s", rest);
    memory_put(fs, "t.json", file, used);
}

/* The order of merges: by rank, and the leftmost first. Once "bc" is made, "a b" is no merge of this
   word any more, and "z a" comes before "a bc". */
static void test_merge_order(void) {
    static const struct {
        const char *text;
        int32_t id[4];
        int n;
    } cases[] = { { "zabc", { 258, 256 }, 2 }, { "abc", { 259 }, 1 }, { "ab", { 257 }, 1 },
        { "qqq", { 260, 'q' }, 2 }, { "qqqqq", { 261, 'q' }, 2 }, { "qqqqqq", { 261, 260 }, 2 },
        { "abzab", { 257, 'z', 257 }, 3 } };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    put_tokenizer(&fs, ",\"bc\":256,\"ab\":257,\"za\":258,\"abc\":259,\"qq\":260,\"qqqq\":261},"
                       "\"merges\":[\"b c\","
                       "\"a b\",\"z a\",\"q q\",[\"a\",\"bc\"],[\"qq\",\"qq\"]]},"
                       "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}}");
    dt_ctx *ctx = make_ctx(&fs);
    tok *t = tok_open(ctx, "t.json");
    CHECK_MSG(t != NULL, "%s", dt_error_text(ctx));
    for (size_t i = 0; t && i < sizeof cases / sizeof *cases; i++) {
        int64_t n = 0;
        const char *s = cases[i].text;
        const int32_t *ids = tok_encode(t, s, strlen(s), (tok_encode_desc){ 0 }, &n);
        CHECK_MSG(ids && n == cases[i].n && memcmp(ids, cases[i].id, (size_t)n * sizeof *ids) == 0,
            "%s: %lld ids, the first is %d", s, (long long)n, ids ? ids[0] : -1);
    }
    tok_close(t);
    free_ctx(ctx, "merges");
    memory_clear(&fs);
}

/* With ignore_merges a word of the vocabulary is a token even if no merges make it. */
static void test_ignore_merges(void) {
    memory_fs fs;
    size_t bytes = 0;
    memset(&fs, 0, sizeof fs);
    for (int i = 0; i < 2; i++) {
        static const char from[] = "\"vocab\":{", more[] = "\"zq\":340,";
        char *text = read_text(path_of(golden, i ? "llama3" : "gpt2", ".json"), &bytes);
        size_t at = (size_t)(strstr(text, from) - text) + sizeof from - 1;
        char *file = (char *)malloc(bytes + sizeof more);
        memcpy(file, text, at);
        memcpy(file + at, more, sizeof more - 1);
        memcpy(file + at + sizeof more - 1, text + at, bytes - at);
        memory_put(&fs, "t.json", file, bytes + sizeof more - 1);
        dt_ctx *ctx = make_ctx(&fs);
        tok *t = tok_open(ctx, "t.json");
        int64_t n = 0;
        const int32_t *ids = t ? tok_encode(t, "zq", 2, (tok_encode_desc){ 0 }, &n) : NULL;
        CHECK_MSG(ids && (i ? n == 1 && ids[0] == 340 : n == 2), "%s", dt_error_text(ctx));
        tok_close(t);
        free_ctx(ctx, "ignore_merges");
        free(file);
        free(text);
    }
    memory_clear(&fs);
}

/* Bytes that are not UTF-8: each text decodes to itself. */
static void test_bytes(void) {
    dt_ctx *ctx = make_ctx(NULL);
    static const char *const names[] = { "gpt2", "llama3", "qwen" };
    for (int i = 0; i < 3; i++) {
        tok *t = open_golden(ctx, names[i]);
        char text[64];
        uint64_t random = 88172645463325252u;
        for (int k = 0; k < 3000; k++) {
            size_t n = (size_t)(k % 60);
            for (size_t at = 0; at < n; at++) {
                random ^= random << 13, random ^= random >> 7, random ^= random << 17;
                text[at] = (char)(k % 3 ? random >> 24 : 0x7B + random % 9);
            }
            /* random bytes hold no composed character in NFC's tables often; leave those out */
            const unsigned char *s = (const unsigned char *)text;
            size_t m = n;
            if (t->nfc && (!tok_nfc(t, &s, &m) || m != n || memcmp(s, text, n) != 0)) continue;
            round_trip(t, text, n, text, names[i]);
        }
        round_trip(t, "a\xff\xc3 \xe4\xb8", 7, "a\xff\xc3 \xe4\xb8", "incomplete");
        round_trip(
            t, "\xed\xa0\x80\xf8\x88\xc0\x80", 7, "\xed\xa0\x80\xf8\x88\xc0\x80", "surrogate");
        round_trip(t, "a\0b", 3, "a\0b", "a NUL");
        tok_close(t);
    }
    free_ctx(ctx, "bytes");
}

/* A stream of ids decodes to complete UTF-8 sequences, and in the end to the same bytes. */
static void test_stream(void) {
    static const char text[] =
        "z\xc3\xa9 \xe4\xb8\x96 \xf0\x9f\x98\x80! \xe4\xb8 \xff\xed\xa0\x80 \xf0\x9f";
    dt_ctx *ctx = make_ctx(NULL);
    tok *t = open_golden(ctx, "gpt2");
    tok_held held = { 0, { 0 } };
    char back[64];
    size_t used = 0, bytes = 0;
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        int32_t id = t->byte_id[(unsigned char)text[i]];
        const char *s = tok_decode(t, &id, 1, (tok_decode_desc){ .held = &held }, &bytes);
        if (!CHECK(s != NULL)) break;
        memcpy(back + used, s, bytes);
        used += bytes;
        if (i < 12) CHECK_MSG(bytes != 1 || s[0] > 0, "byte %zu is cut", i);
        CHECK_MSG(used + (size_t)held.bytes == i + 1, "byte %zu: %zu and %d", i, used, held.bytes);
    }
    CHECK(held.bytes == 2 && memcmp(held.byte, "\xf0\x9f", 2) == 0);
    CHECK(used == sizeof text - 3 && memcmp(back, text, used) == 0);
    static const struct {
        const char *text;
        size_t held;
    } ends[] = { { "\xc3", 1 }, { "\xc1", 0 }, { "\xe0", 1 }, { "\xe0\x80", 0 }, { "\xe0\xa0", 2 },
        { "\xed\xa0", 0 }, { "\xf0\x9f\x98", 3 }, { "\xf0\x8f", 0 }, { "\xf4\x90", 0 },
        { "\xf5", 0 }, { "\x80", 0 }, { "a\x80\x80\x80", 0 }, { "", 0 } };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        CHECK_MSG(tok_incomplete((const unsigned char *)ends[i].text, strlen(ends[i].text)) ==
                      ends[i].held,
            "end %zu", i);
    int32_t special[] = { 0, t->byte_id['x'] };
    CHECK(strcmp(tok_decode(t, special, 2, (tok_decode_desc){ .skip_special = 1 }, &bytes), "x") ==
          0);
    CHECK(strcmp(tok_decode(t, special, 2, (tok_decode_desc){ 0 }, &bytes), "<|endoftext|>x") == 0);
    tok_close(t);
    free_ctx(ctx, "stream");
    for (int i = 0; i < 2; i++) {
        int32_t bad = i ? 331 : -1;
        ctx = make_ctx(NULL);
        t = open_golden(ctx, "gpt2");
        CHECK(!tok_decode(t, &bad, 1, (tok_decode_desc){ 0 }, &bytes));
        CHECK(dt_error(ctx) == DT_ERR_ARG && strstr(dt_error_text(ctx), "is no token"));
        tok_close(t);
        dt_ctx_free(ctx);
    }
}

/* The parts of a text that is cut at safe ends have the ids of the whole text. */
static void test_safe_end(void) {
    static const char text[] = "one\ntwo\n\nthree.\nfour \nfive\n  "
                               "six)\n7seven\n\t\nx\ne\xcc\x81\nf<|endoftext|>\ng\r\nh\n8\n";
    static const char *const names[] = { "gpt2", "llama3", "qwen" };
    dt_ctx *ctx = make_ctx(NULL);
    for (int i = 0; i < 3; i++) {
        tok *t = open_golden(ctx, names[i]);
        int32_t whole[200];
        int64_t total = 0, count = 0, at = 0;
        const int32_t *ids = tok_encode(t, text, sizeof text - 1, (tok_encode_desc){ 0 }, &total);
        int cuts = 0;
        memcpy(whole, ids, (size_t)total * sizeof *ids);
        for (size_t n = sizeof text - 1, from = 0; n > 0; n--) {
            size_t end = tok_safe_end(t, text, n);
            if (end == 0 || end == from) continue;
            from = end;
            cuts++;
            at = 0;
            for (int part = 0; part < 2; part++) {
                const char *s = part ? text + end : text;
                size_t bytes = part ? sizeof text - 1 - end : end;
                ids = tok_encode(t, s, bytes, (tok_encode_desc){ .continues = part }, &count);
                int same = at + count <= total &&
                           memcmp(ids, whole + at, (size_t)count * sizeof *ids) == 0;
                CHECK_MSG(same, "%s: cut at %zu, part %d", names[i], end, part);
                at += count;
            }
            CHECK_MSG(at == total, "%s: cut at %zu", names[i], end);
        }
        CHECK_MSG(cuts == 6, "%s: %d cuts", names[i], cuts);
        tok_close(t);
    }
    free_ctx(ctx, "safe ends");
}

typedef struct collected {
    int32_t id[4000];
    int64_t count;
    int calls;
} collected;

static void collect(void *user, const int32_t *ids, int64_t n) {
    collected *c = (collected *)user;
    c->calls++;
    if (!CHECK(c->count + n <= 4000)) return;
    memcpy(c->id + c->count, ids, (size_t)n * sizeof *ids);
    c->count += n;
}

/* A file that is encoded in small pieces has the ids of the whole text. Added tokens that may span a
   cut forbid cuts. */
static void test_file(void) {
    static const char *const names[] = { "gpt2", "llama3", "qwen" };
    memory_fs fs;
    size_t bytes = 0, golden_bytes = 0;
    char *text = read_text(path_of("tests/programs", "test_hf", ".sh"), &bytes);
    memset(&fs, 0, sizeof fs);
    for (int i = 0; i < 3; i++) {
        char *json = read_text(path_of(golden, names[i], ".json"), &golden_bytes);
        memory_put(&fs, names[i], json, golden_bytes);
        free(json);
    }
    memory_put(&fs, "text", text, bytes);
    memory_put(&fs, "empty", "", 0);
    fs.most = 50;
    fs.interrupt = 7;
    for (int i = 0; i < 6; i++) {
        collected c = { .count = 0 };
        dt_ctx *ctx = make_ctx(&fs);
        tok *t = tok_open(ctx, names[i % 3]);
        int64_t count = 0;
        if (!CHECK_MSG(t != NULL, "%s", dt_error_text(ctx))) continue;
        CHECK(t->can_cut);
        t->can_cut = i < 3;
        t->prefix_space = i % 3 == 0; /* at the beginning of the text only */
        t->piece_bytes = 70;
        CHECK(tok_encode_file(t, "text", 1, collect, &c) == DT_OK);
        const int32_t *ids = tok_encode(t, text, bytes, (tok_encode_desc){ 1, 0, 0 }, &count);
        CHECK_MSG(count == c.count && memcmp(ids, c.id, (size_t)count * sizeof *ids) == 0,
            "%s: %lld ids, and %lld in pieces", names[i % 3], (long long)count, (long long)c.count);
        CHECK_MSG(i < 3 ? (size_t)c.calls > bytes / 500 : c.calls == 1, "%d pieces", c.calls);
        c.count = 0;
        CHECK(tok_encode_file(t, "empty", 1, collect, &c) == DT_OK && c.count == (i % 3 == 1));
        CHECK(tok_encode_file(t, "none", 1, collect, &c) == DT_ERR_IO);
        CHECK(strstr(dt_error_text(ctx), "none: No such file"));
        tok_close(t);
        dt_ctx_free(ctx);
    }
    CHECK(fs.open == 0);
    memory_clear(&fs);
    free(text);
}

// ==== 3. Broken files ===========================================================================

/* Opens a file; `says` is a part of the error text, or NULL if it can be opened. Takes `file`. */
static void opens(const char *what, char *file, size_t bytes, const char *says) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    memory_put(&fs, "t.json", file, bytes);
    dt_ctx *ctx = make_ctx(&fs);
    tok *t = tok_open(ctx, "t.json");
    const char *error = dt_error_text(ctx);
    CHECK_MSG((t == NULL) == (says != NULL), "%s: %s", what, error);
    if (says)
        CHECK_MSG(dt_error(ctx) == DT_ERR_IO && strstr(error, says) && strstr(error, "t.json"),
            "%s: %s", what, error);
    tok_close(t);
    CHECK(dt_memory_used(ctx).live[DT_MEM_HOST] <= 2000);
    dt_ctx_free(ctx);
    memory_clear(&fs);
    free(file);
}

/* Replaces the first `from` in a file of the golden folder by `to` and opens it. */
static void broken(const char *name, const char *from, const char *to, const char *says) {
    char what[600];
    size_t bytes = 0, used;
    char *text = read_text(path_of(golden, name, ".json"), &bytes), *more;
    char *at = text ? strstr(text, from) : NULL;
    if (!CHECK_MSG(at != NULL, "%s has no %s", name, from)) return;
    more = (char *)malloc(bytes + strlen(to) + 1);
    used = (size_t)(at - text);
    memcpy(more, text, used);
    memcpy(more + used, to, strlen(to));
    used += strlen(to);
    memcpy(more + used, at + strlen(from), bytes - (size_t)(at - text) - strlen(from));
    used += bytes - (size_t)(at - text) - strlen(from);
    snprintf(what, sizeof what, "%s -> %s", from, to);
    opens(what, more, used, says);
    free(text);
}

/* Files of other tokenizers that people try. */
static void other_styles(void) {
    static const char bytes_of_model[] = "\n\016\n\005<unk>\025\0\0\0\0\030\002";
    static const char json[] =
        "{\"pre_tokenizer\":%s,\"decoder\":{\"type\":\"Sequence\"},\"model\":{\"type\":\"BPE\","
        "\"byte_fallback\":true,\"vocab\":{\"<unk>\":0},\"merges\":[]}}";
    static const char *const words[] = { "null", "{\"type\":\"Metaspace\"}" };
    char *file = (char *)malloc(sizeof bytes_of_model);
    memcpy(file, bytes_of_model, sizeof bytes_of_model);
    opens("tokenizer.model", file, sizeof bytes_of_model - 1,
        "a model of sentencepiece; tokenizer.json is needed");
    for (int i = 0; i < 2; i++) {
        file = (char *)malloc(400);
        snprintf(file, 400, json, words[i]);
        opens("Llama 2", file, strlen(file), "in the style of sentencepiece (byte_fallback)");
    }
    file = (char *)malloc(4);
    memcpy(file, "\n{\n}", 4);
    opens("JSON after a line end", file, 4, "pre_tokenizer (no type) is not supported");
}

static void test_broken(void) {
    other_styles();
    static const char *const cases[][4] = {
        { "gpt2", "{", "", "t.json:1:" },
        { "gpt2", "\"version\"", "\"Version\"", NULL },
        { "gpt2", "\"type\":\"BPE\"", "\"type\":\"WordPiece\"",
            "model WordPiece is not supported" },
        { "gpt2", "\"type\":\"BPE\",", "", NULL },
        { "gpt2", "\"vocab\":{", "\"vocab\":[],\"x\":{", "model.vocab, an object" },
        { "gpt2", "\"merges\":[", "\"merges\":0,\"x\":[", "model.merges, an array" },
        { "gpt2", "\"!\":1,", "\"!\":2,", "another token has id 2 too" },
        { "gpt2", "\"!\":1,", "\"!\":999,", NULL }, /* a gap, which the package accepts, too */
        { "gpt2", "\"!\":1,", "\"!\":-1,", "a whole number from 0 to" },
        { "gpt2", "\"!\":1,", "\"!\":1.5,", "a whole number from 0 to" },
        { "gpt2", "\"!\":1,", "\"!\":4194304,", "a whole number from 0 to 4194303" },
        { "gpt2", "\"!\":1,", "\"!\":99999999999999,", "a whole number from 0 to" },
        { "gpt2", "\"!\":1,", "\"!\":\"1\",", "a whole number from 0 to" },
        { "gpt2", "\"!\":1,", "", "no token for byte 33" },
        { "gpt2", "\"!\":1,", "\"!\":1,\"\":331,", "is empty" },
        { "gpt2", "\"!\":1,", "\"!\":1,\"!\":331,", "!" },
        { "gpt2", "\"merges\":[[", "\"merges\":[[\"qqqq\",\"b\"],[", "'qqqq', which is no token" },
        { "gpt2", "\"merges\":[[", "\"merges\":[[\"q\",\"q\"],[", "makes 'qq', which is no token" },
        { "gpt2", "\"merges\":[[", "\"merges\":[[\"q\"],[", "a merge is a string" },
        { "gpt2", "\"merges\":[[", "\"merges\":[\"q\",[", "a merge is a string" },
        { "gpt2", "\"merges\":[[", "\"merges\":[\"q q q\",[", "a merge is a string" },
        { "gpt2", "\"merges\":[[", "\"merges\":[\"#version: 0.2\",[", NULL },
        { "gpt2", "\"merges\":[[", "\"merges\":[5,[", "a merge is a string" },
        { "gpt2", "\"dropout\":null", "\"dropout\":0.1", "dropout is not supported" },
        { "gpt2", "\"dropout\":null", "\"dropout\":0", NULL },
        { "gpt2", "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"",
            "end_of_word_suffix is not supported" },
        { "gpt2", "\"ignore_merges\":false", "\"ignore_merges\":1", "true or false is needed" },
        { "gpt2", "\"normalizer\":null", "\"normalizer\":{\"type\":\"NFKC\"}",
            "normalizer NFKC is not supported" },
        { "gpt2", "\"normalizer\":null",
            "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[]}", NULL },
        { "gpt2", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"",
            "\"pre_tokenizer\":{\"type\":\"Digits\"", "pre_tokenizer Digits is not supported" },
        { "gpt2", "\"pre_tokenizer\"", "\"x\"", "pre_tokenizer (no type) is not supported" },
        { "gpt2", "\"use_regex\":true", "\"use_regex\":false", "use_regex false is not supported" },
        { "gpt2", "\"post_processor\":{\"type\":\"ByteLevel\"",
            "\"post_processor\":{\"type\":\"BertProcessing\"",
            "post_processor BertProcessing is not supported" },
        { "gpt2", "\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"WordPiece\"",
            "decoder WordPiece is not supported" },
        { "gpt2", "\"added_tokens\":[", "\"added_tokens\":{\"a\":1},\"x\":[",
            "added_tokens is not an array" },
        { "gpt2", "\"id\":330", "\"id\":329", "another token has id 329 too" },
        { "gpt2", "\"id\":330", "\"id\":-5", "a whole number from 0 to" },
        { "gpt2", "\"id\":0", "\"id\":400", "has id 400 here and another one" },
        { "gpt2", "\"content\":\"<mask>\"", "\"content\":\"\"", "is empty" },
        { "gpt2", "\"content\":\"<mask>\"", "\"content\":\"a\\u0000b\"", "holds a NUL" },
        { "gpt2", "\"content\":\"<mask>\"", "\"content\":7", "needs a content" },
        { "gpt2", "\"single_word\":false", "\"single_word\":true",
            "single_word true is not supported" },
        { "llama3", "\\\\p{N}{1,3}", "\\\\p{N}{1,2}", "is not supported; those of GPT-2" },
        { "llama3", "\"Isolated\"", "\"Removed\"", "behavior Removed is not supported" },
        { "llama3", "\"invert\":false", "\"invert\":true", "invert true is not supported" },
        { "llama3", "\"ids\":[330]", "\"ids\":[335]", "id 335 is no token" },
        { "llama3", "\"ids\":[330]", "\"ids\":[-1]", "a whole number from 0 to" },
        { "llama3", "\"SpecialToken\":{\"id\":\"<|begin_of_text|>\"",
            "\"SpecialToken\":{\"id\":\"x\"", "special_tokens have no ids for x" },
        { "llama3", "{\"Sequence\":{\"id\":\"A\"", "{\"Sequence\":{\"id\":\"B\"", "sequence A" },
        { "llama3", "\"content\":\"<|eot_id|>\"", "\"content\":\"<|begin_of_text|>\"",
            "have the same text" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        broken(cases[i][0], cases[i][1], cases[i][2], cases[i][3]);
    dt_ctx *ctx = make_ctx(NULL);
    CHECK(!tok_open(ctx, "tests/golden/tokenizer/none.json") && dt_error(ctx) == DT_ERR_IO);
    dt_ctx_free(ctx);
}

/* Each allocation of opening and encoding fails once: an error, no leak. */
static long allocations, failing_allocation;

static void *alloc_or_fail(void *user, size_t bytes, dt_mem mem) {
    const dt_host *host = (const dt_host *)user;
    return ++allocations == failing_allocation ? NULL : host->alloc(host->user, bytes, mem);
}

static void test_allocations(void) {
    dt_host normal = *dt_host_default(), host = normal;
    int64_t count = 0;
    int failed = 1;
    host.user = &normal;
    host.alloc = alloc_or_fail;
    host.log = log_nothing;
    for (long i = 2; failed && i < 200; i++) {
        failing_allocation = 0;
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host });
        allocations = 0;
        failing_allocation = i;
        tok *t = tok_open(ctx, path_of(golden, "qwen", ".json"));
        const int32_t *ids =
            t ? tok_encode(t, "cafe\xcc\x81 au lait", 14, (tok_encode_desc){ 0 }, &count) : NULL;
        failed = dt_error(ctx) != DT_OK;
        CHECK_MSG(failed == (ids == NULL) && (!failed || dt_error(ctx) == DT_ERR_MEM),
            "allocation %ld: %s", i, dt_error_text(ctx));
        tok_close(t);
        CHECK(dt_memory_used(ctx).live[DT_MEM_HOST] <= 2000);
        failing_allocation = 0;
        dt_ctx_free(ctx);
    }
    CHECK(!failed);
}

// ==== 4. Speed and training =====================================================================

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Words of 1 MB, of spaces, of letters and of marks that NFC sorts: the time is not quadratic, which
   would be minutes. */
static void test_long_words(void) {
    static const struct {
        const char *name, *unit;
        int marks;
    } words[] = { { "gpt2", "  ", 0 }, { "llama3", "in", 0 }, { "qwen", "in", 0 },
        { "qwen", "", 1 } };
    enum { N = 1 << 20 };
    char *text = (char *)malloc(N);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        dt_ctx *ctx = make_ctx(NULL);
        tok *t = open_golden(ctx, words[i].name);
        int64_t count = 0;
        for (int k = 0; k < N; k += 2) {
            text[k] = words[i].marks ? (char)0xCC : words[i].unit[0];
            text[k + 1] = words[i].marks ? (char)(0x80 + k / 2 % 32) : words[i].unit[1];
        }
        double start = now_s();
        tok_encode(t, text, N, (tok_encode_desc){ 0 }, &count);
        double s = now_s() - start;
        int merged = words[i].marks ? count > 0 : count > 0 && count <= N / 2;
        CHECK_MSG(merged && s < 20, "%s: %lld ids in %.1f s", words[i].name, (long long)count, s);
        tok_close(t);
        free_ctx(ctx, "long words");
    }
    free(text);
}

static void test_train(void) {
    static const char text[] = "low low low low low lower lower newest newest newest newest newest "
                               "newest widest widest widest aaaa aaaaaa \xff\xff";
    static const char *const special[] = { "<|endoftext|>", "<pad>" };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    dt_ctx *ctx = make_ctx(&fs);
    tok_train_desc d = { .vocab = 270, .special = special, .n_special = 2 };
    CHECK(tok_train(ctx, text, sizeof text - 1, d, "t.json") == DT_OK);
    tok *t = tok_open(ctx, "t.json");
    if (!CHECK_MSG(t != NULL, "%s", dt_error_text(ctx))) return;
    CHECK(tok_vocab(t) == 270 && tok_id(t, "<|endoftext|>") == 0 && tok_id(t, "<pad>") == 1);
    /* the package's tokens of this text; of pairs with equal counts the smallest ids are first */
    static const char *const made[] = { "es", "est", "aa", "lo", "low", "ew", "new", " low", " new",
        " newest", "dest", "idest" };
    for (int i = 0; i < 12; i++) CHECK_MSG(tok_id(t, made[i]) == 258 + i, "%s", made[i]);
    CHECK(tok_id(t, "a") == 2 + 'a' - '!');
    round_trip(t, text, sizeof text - 1, text, "trained");
    tok_close(t);
    d.vocab = 100000;
    CHECK(tok_train(ctx, text, sizeof text - 1, d, "t.json") == DT_OK);
    t = tok_open(ctx, "t.json");
    CHECK(t && tok_vocab(t) < 300 && tok_id(t, " newest") > 0);
    tok_close(t);
    d.min_frequency = 6;
    CHECK(tok_train(ctx, text, sizeof text - 1, d, "t.json") == DT_OK);
    t = tok_open(ctx, "t.json");
    CHECK(t && tok_id(t, " newest") > 0 && tok_id(t, " widest") < 0);
    tok_close(t);
    free_ctx(ctx, "train");
    static const tok_train_desc bad[] = { { .vocab = 255 },
        { .vocab = 257, .special = special, .n_special = 2 }, { .vocab = -1 },
        { .vocab = TOK_MAX_IDS + 1 } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ctx = make_ctx(&fs);
        CHECK(tok_train(ctx, text, sizeof text - 1, bad[i], "t.json") == DT_ERR_ARG);
        dt_ctx_free(ctx);
    }
    memory_clear(&fs);
}

// ==== 5. Comparison with the package ============================================================

static int compare_one(const char *dir, const char *name) {
    size_t text_bytes = 0, lengths_bytes = 0, ids_bytes = 0;
    char *text = read_text(path_of(dir, "text", ""), &text_bytes);
    int32_t *length = (int32_t *)(void *)read_text(path_of(dir, "lengths", ""), &lengths_bytes);
    int32_t *want = (int32_t *)(void *)read_text(path_of(dir, name, ".ids"), &ids_bytes);
    dt_ctx *ctx = make_ctx(NULL);
    tok *t = tok_open(ctx, path_of(dir, name, ".json"));
    size_t at = 0, k = 0;
    int64_t total = 0, wrong = 0;
    if (!CHECK_MSG(t && text && length && want, "%s: %s", name, dt_error_text(ctx))) return 1;
    double start = now_s();
    for (size_t i = 0; i < lengths_bytes / sizeof *length && wrong < 3; i++) {
        int64_t count = 0;
        const int32_t *ids = tok_encode(
            t, text + at, (size_t)length[i], (tok_encode_desc){ .add_special = 1 }, &count);
        if (!ids || count != want[k] ||
            memcmp(ids, want + k + 1, (size_t)count * sizeof *ids) != 0) {
            wrong++;
            printf("text %zu of %d bytes: %.80s\n", i, length[i], text + at);
            for (int64_t d = 0; d < count && ids; d++)
                if (d >= want[k] || ids[d] != want[k + 1 + (size_t)d]) {
                    printf("  id %lld of %lld and %d: %d\n", (long long)d, (long long)count,
                        want[k], ids[d]);
                    break;
                }
        }
        total += count;
        at += (size_t)length[i];
        k += 1 + (size_t)want[k];
    }
    printf("%s: %lld ids of %zu bytes, %.1f MB/s\n", name, (long long)total, at,
        (double)at / 1e6 / (now_s() - start));
    CHECK_MSG(wrong == 0 && at == text_bytes && total > 1000, "%s: other ids", name);
    tok_close(t);
    free_ctx(ctx, name);
    free(text), free(length), free(want);
    return 0;
}

static void train_file(const char *path, int vocab, const char *out) {
    static const char *const special[] = { "<|endoftext|>" };
    dt_ctx *ctx = make_ctx(NULL);
    size_t bytes = 0;
    char *text = read_text(path, &bytes);
    CHECK(text && tok_train(ctx, text, bytes,
                      (tok_train_desc){ .vocab = vocab, .special = special, .n_special = 1 },
                      out) == DT_OK);
    free(text);
    free_ctx(ctx, "train");
}

int main(int argc, char **argv) {
    if (argc == 5 && strcmp(argv[1], "--train") == 0) {
        train_file(argv[2], atoi(argv[3]), argv[4]);
        return check_done("test_tokenizer");
    }
    if (argc == 3 && strcmp(argv[1], "--compare") == 0) {
        compare_one(argv[2], "gpt2");
        compare_one(argv[2], "llama3");
        compare_one(argv[2], "qwen");
        return check_done("test_tokenizer");
    }
    test_golden();
    test_words();
    test_nfc();
    test_merge_order();
    test_ignore_merges();
    test_bytes();
    test_stream();
    test_safe_end();
    test_file();
    test_broken();
    test_allocations();
    test_long_words();
    test_train();
    return check_done("test_tokenizer");
}
