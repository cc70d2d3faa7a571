/* test_files.c - JSON, weight files and token shards: reading, writing and validation
   Public domain or MIT, at your choice; see LICENSE.

   Run:  test_files [folder of the golden files, default tests/golden]

   Files are in memory (memory_io.h), where every call can be made to fail. Memory comes from a
   host table that counts allocations and can refuse one. Expected results come from outside dt:
   files made by the reference library, strtod, _Float16, an index computed by hand. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_parallel.h"
#include "tests/support/check.h"
#include "tests/support/memory_io.h"
#include <locale.h>

static const char *golden_folder = "tests/golden";

// ==== 1. Contexts ===============================================================================

/* Counts allocations; request number `refuse` is refused, 0: none. */
typedef struct meter {
    long live, calls, refuse;
} meter;

static void *meter_alloc(void *user, size_t bytes, dt_mem mem) {
    meter *m = (meter *)user;
    if (++m->calls == m->refuse) return NULL;
    void *p = dt_host_default()->alloc(NULL, bytes, mem);
    if (p) memset(p, 0x5a, bytes);
    m->live += p != NULL;
    return p;
}

static void meter_free(void *user, void *p, size_t bytes, dt_mem mem) {
    memset(p, 0xa5, bytes); /* with a wrong size this overruns, which the sanitizer reports */
    ((meter *)user)->live--;
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void log_nothing(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_ctx *make_ctx(memory_fs *fs, meter *m) {
    dt_host host = *dt_host_default();
    dt_io io = memory_io(fs);
    host.user = m;
    host.alloc = meter_alloc;
    host.free = meter_free;
    host.log = log_nothing;
    return dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host, .io = fs ? &io : NULL });
}

static void free_ctx(dt_ctx *ctx, const memory_fs *fs, const meter *m, const char *what) {
    dt_ctx_free(ctx);
    CHECK_MSG(m->live == 0, "%s: %ld allocations were not freed", what, m->live);
    CHECK_MSG(!fs || fs->open == 0, "%s: %d descriptors were not closed", what, fs ? fs->open : 0);
}

static int says(dt_ctx *ctx, const char *word) { return strstr(dt_error_text(ctx), word) != NULL; }

static uint64_t mix(uint64_t i) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// ==== 2. Element types ==========================================================================

/* The value of a 16-bit float by its definition, in double. */
static double from_16_bits(uint16_t h, int exponent_bits) {
    int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int e = h >> fraction_bits & ((1 << exponent_bits) - 1), f = h & ((1 << fraction_bits) - 1);
    double v = e == (1 << exponent_bits) - 1 ? (f ? (double)NAN : (double)INFINITY)
               : e                           ? ldexp(1 + ldexp(f, -fraction_bits), e - bias)
                                             : ldexp(f, 1 - bias - fraction_bits);
    return h >> 15 ? -v : v;
}

static int same(double a, double b) {
    return (a != a && b != b) || (a == b && signbit(a) == signbit(b));
}

/* The nearest 16-bit float, ties to even, by bisection over all values. It shares no arithmetic
   with the conversion under test. */
static uint16_t nearest_16_bits(double x, int exponent_bits) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    uint16_t inf = (uint16_t)(((1 << exponent_bits) - 1) << (15 - exponent_bits));
    int lo = 0, hi = inf; /* a larger magnitude has larger bits */
    x = fabs(x);
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if (from_16_bits((uint16_t)mid, exponent_bits) <= x)
            lo = mid;
        else
            hi = mid;
    }
    double below = from_16_bits((uint16_t)lo, exponent_bits),
           above = from_16_bits((uint16_t)hi, exponent_bits);
    /* the value that would follow the largest finite one */
    if (hi == inf) above = 2 * below - from_16_bits((uint16_t)(lo - 1), exponent_bits);
    if (x == (double)INFINITY) return sign | inf;
    if (x - below < above - x || (x - below == above - x && lo % 2 == 0))
        return (uint16_t)(sign | lo);
    return (uint16_t)(sign | hi);
}

static void test_16_bit_types(void) {
    int wide = 0, back = 0, mid = 0, three = 0;
    for (int i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        float b = dt__bf16_to_f32(h), f = dt__f16_to_f32(h);
        wide += same((double)b, from_16_bits(h, 8)) && same((double)f, from_16_bits(h, 5));
        back += (b != b || dt__f32_to_bf16(b) == h) && (f != f || dt__f32_to_f16(f) == h);
        /* the tie between this value and the next, and the floats beside the tie */
        for (int bits = 5; bits <= 8; bits += 3) {
            double v = from_16_bits(h, bits), next = from_16_bits((uint16_t)(h + 1), bits);
            if (!isfinite(v) || v != v) continue;
            if (!isfinite(next)) next = v + (v - from_16_bits((uint16_t)(h - 1), bits));
            float tie = (float)((v + next) / 2), at[3];
            at[0] = nextafterf(tie, -INFINITY);
            at[1] = tie;
            at[2] = nextafterf(tie, INFINITY);
            for (int k = 0; k < 3; k++) {
                uint16_t got = bits == 5 ? dt__f32_to_f16(at[k]) : dt__f32_to_bf16(at[k]);
                mid += got == nearest_16_bits((double)at[k], bits);
                three++;
            }
        }
    }
    CHECK_MSG(wide == 65536, "%d of 65536 convert to f32 exactly", wide);
    CHECK_MSG(back == 65536, "%d of 65536 survive 16 bits -> f32 -> 16 bits", back);
    CHECK_MSG(mid == three, "%d of %d round to nearest even", mid, three);
    CHECK(dt__f32_to_bf16(INFINITY) == 0x7f80 && dt__f32_to_f16(-INFINITY) == 0xfc00);
    CHECK(dt__f32_to_f16(65519.996f) == 0x7bff && dt__f32_to_f16(65520.0f) == 0x7c00 &&
          dt__f32_to_f16(1e38f) == 0x7c00);
    CHECK(dt__f32_to_f16(0x1p-25f) == 0 && dt__f32_to_f16(0x1.000002p-25f) == 1 &&
          dt__f32_to_f16(-0.0f) == 0x8000);
    int nans = 0;
    /* NaN payloads, also with their high bits all zero */
    for (uint32_t i = 1; i < 0x800000; i += 97) {
        uint16_t b = dt__f32_to_bf16(dt__bits_float(0xff800000 | i)),
                 f = dt__f32_to_f16(dt__bits_float(0x7f800000 | i));
        nans += (b & 0xff80) == 0xff80 && (b & 0x7f) && (f & 0xfc00) == 0x7c00 && (f & 0x3ff);
    }
    CHECK_MSG(nans == 0x7fffff / 97 + 1, "%d NaNs are NaNs after conversion", nans);
#if defined(__FLT16_MAX__) && !defined(__clang__)
    int equal = 0, n = 2000000;
    for (int i = 0; i < n; i++) { /* compared with the compiler's _Float16 */
        float x = dt__bits_float((uint32_t)mix((uint64_t)i)), y;
        _Float16 c = (_Float16)x;
        uint16_t bits;
        memcpy(&bits, &c, 2);
        y = (float)c;
        equal +=
            x != x || (bits == dt__f32_to_f16(x) && same((double)y, (double)dt__f16_to_f32(bits)));
    }
    CHECK_MSG(equal == n, "%d of %d equal to _Float16", equal, n);
#endif
}

/* Doubles round once to 16 bits, and every pair of types converts arrays of many lengths. */
static void test_convert(void) {
    static const dt_dtype types[4] = { DT_F32, DT_BF16, DT_F16, DT_F64 };
    int right = 0, n = 200000;
    for (int i = 0; i < n; i++) {
        uint64_t r = mix((uint64_t)i);
        double tie = from_16_bits((uint16_t)(r % 0x7800), 5) + ldexp(1, (int)(r >> 20 & 31) - 32),
               x;
        uint16_t h, b;
        x = r >> 63 ? tie : ldexp((double)(r >> 11), (int)(r & 63) - 90);
        dt__convert(DT_F16, &h, DT_F64, &x, 1);
        dt__convert(DT_BF16, &b, DT_F64, &x, 1);
        right += h == nearest_16_bits(x, 5) && b == nearest_16_bits(x, 8);
    }
    CHECK_MSG(right == n, "%d of %d doubles round once to 16 bits", right, n);
    double special[6] = { (double)NAN, (double)INFINITY, -1e300, 1e-300, 1 + 0x1p-8 + 0x1p-40,
        -0.0 };
    uint16_t out[6];
    dt__convert(DT_BF16, out, DT_F64, special, 6);
    CHECK((out[0] & 0x7fff) > 0x7f80 && out[1] == 0x7f80 && out[2] == 0xff80 && out[3] == 0 &&
          out[4] == 0x3f81 && out[5] == 0x8000);
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int64_t count = 0; count < 1100; count += 1 + count / 3) {
                static double one[1100], two[1100], three[1100];
                for (int64_t i = 0; i < count; i++) two[i] = (double)(i % 200 - 100);
                dt__convert(types[a], one, DT_F64, two, count);
                memset(three, 0x77, sizeof three);
                dt__convert(types[b], three, types[a], one, count);
                int ok = ((unsigned char *)three)[(size_t)count * dt_dtype_size(types[b])] == 0x77;
                dt__convert(DT_F64, one, types[b], three, count);
                for (int64_t i = 0; i < count; i++) ok &= one[i] == two[i];
                CHECK_MSG(ok, "%s to %s, %d elements", dt_dtype_name(types[a]),
                    dt_dtype_name(types[b]), (int)count);
            }
}

// ==== 3. JSON ===================================================================================

/* Parses the text. Returns "" if it is accepted, else the error without "rank 0: x:". */
static const char *json_error(const char *text, size_t bytes) {
    static char error[512];
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    char *copy = (char *)malloc(
        bytes ? bytes
              : 1); /* no byte to spare, so that the sanitizer reports a read past the end */
    memcpy(copy, text, bytes);
    dt_json *j = dt_json_parse(ctx, "x", copy, bytes);
    CHECK((j == NULL) == (dt_error(ctx) != DT_OK));
    snprintf(error, sizeof error, "%s",
        dt_error(ctx) == DT_OK ? "" : dt_error_text(ctx) + strlen("rank 0: x:"));
    dt_json_free(j);
    free(copy);
    free_ctx(ctx, NULL, &m, "json");
    return error;
}

typedef struct json_case {
    const char *text, *error;
} json_case;

static const json_case json_refused[] = { { "", "1:1: a value is needed" },
    { " \n ", "2:2: a value is needed" }, { "nul", "1:1: a value" }, { "tru]", "1:1: a value" },
    { "NaN", "1:1: a value" }, { "[Infinity]", "1:2: a value" }, { "[-Infinity]", "1:3: a digit" },
    { "-", "1:2: a digit" }, { "+1", "1:1: a value" }, { "[01]", "1:3: a comma or ']'" },
    { "1.", "1:3: a digit" }, { ".5", "1:1: a value" }, { "1.e5", "1:3: a digit" },
    { "1e", "1:3: a digit" }, { "1e+", "1:4: a digit" }, { "0x10", "1:2: something follows" },
    { "1 2", "1:3: something follows" }, { "-0", "1:1: -0" }, { "[1,-0.0]", "1:4: -0" },
    { "-0e5", "1:1: -0" }, { "1e400", "1:1: a number that no double" }, { "1e-400", "no double" },
    { "-1e99999999999999999999", "no double" }, { "2.4e-324", "no double" },
    { "1.8e308", "no double" }, { "9007199254740993", "1:1: an integer beyond 2^53" },
    { "-9007199254740993", "beyond 2^53" }, { "99999999999999999999999999", "beyond 2^53" },
    { "[1,]", "1:4: a value" }, { "[,1]", "1:2: a value" }, { "[1 2]", "1:4: a comma or ']'" },
    { "[1", "1:3: a comma" }, { "[", "1:2: a value" }, { "]", "1:1: a value" },
    { "{", "1:2: a key" }, { "{\"a\"", "1:5: a colon" }, { "{\"a\":", "1:6: a value" },
    { "{\"a\":1", "1:7: a comma or '}'" }, { "{\"a\":1,}", "1:8: a key" },
    { "{a:1}", "1:2: a key" }, { "{1:1}", "1:2: a key" }, { "{\"a\" 1}", "1:6: a colon" },
    { "[1}", "1:3: a comma" }, { "{\"a\":1 \"b\":2}", "1:8: a comma or '}'" },
    { "\"abc", "1:1: a string without an end" }, { "\"a\\", "1:3: no such escape" },
    { "\"\\x\"", "1:2: no such escape" }, { "\"\\u12g4\"", "1:6: \\u needs four" },
    { "\"\\u12", "\\u needs" }, { "\"\\ud800\"", "1:2: half of a surrogate" },
    { "\"\\ud800\\n\"", "half of" }, { "\"\\ud800\\u0041\"", "half of" },
    { "\"\\udc00\"", "half of" }, { "\"\\ud800\\ud800\"", "half of" },
    { "\"\\ud800\\u12\"", "\\u needs" }, { "\"\\udc7f\"", "half of" }, { "\"\\udd00\"", "half of" },
    { "\"\\udc80\\udc00\"", "half of" }, { "\"a\tb\"", "1:3: a control character" },
    { "{\"\xc3\xa9\":1,\"\\udcc3\\udca9\":2}", "is there twice" }, { "\"a\nb\"", "1:3: a control" },
    { "[\n\n  \"\xc3\xa4\xe2\x82\xac\", tru]", "3:9: a value" }, { "'a'", "1:1: a value" },
    { "[1]\x01", "1:4: something" }, { "{\"a\":1,\"b\":2,\"a\":3}", "1:18: 'a' is there twice" },
    { "{\"a\":1,\"\\u0061\":2}", "'a' is there twice" },
    { "[{\"x\":{\"\":1,\"\":2}}]", "'' is there twice" }, { "// c\n1", "1:1: a value" },
    { "\xef\xbb\xbf"
      "1",
        "1:1: a value" },
    { "\xc0\x80", "1:1: this is not UTF-8" }, { "[\"\xe0\x80\x80\"]", "1:3: this is not UTF-8" },
    { "\"\xed\xa0\x80\"", "not UTF-8" }, { "\"\xf4\x90\x80\x80\"", "not UTF-8" },
    { "\"\xf0\x8f\xbf\xbf\"", "not UTF-8" }, { "\"\x80\"", "not UTF-8" },
    { "\"\xc3\"", "not UTF-8" }, { "\"\xe2\x82\"", "not UTF-8" }, { "\"\xff\"", "not UTF-8" },
    { "\"\xc3(\"", "not UTF-8" }, { "\"\xf0\x90\x80(\"", "not UTF-8" },
    { "\xf0\x90\x80", "not UTF-8" } };

/* Each text must be refused with its error. */
static void check_json_refused(const json_case *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const char *error = json_error(cases[i].text, strlen(cases[i].text));
        CHECK_MSG(strstr(error, cases[i].error), "%s: '%s', not '%s'", cases[i].text, error,
            cases[i].error);
    }
}

static void test_json_refused(void) {
    check_json_refused(json_refused, sizeof json_refused / sizeof *json_refused);
    CHECK(strstr(json_error("[1,\0]", 5), "1:4: a value") != NULL);
}

/* The limits: levels of nesting, values, bytes of a string, digits of a number, bytes of a text. */
static void test_json_limits(void) {
    char deep[200];
    for (int n = 63; n <= 66; n++) {
        memset(deep, '[', (size_t)n);
        memset(deep + n, ']', (size_t)n);
        const char *error = json_error(deep, (size_t)(2 * n));
        CHECK_MSG(n <= 64 ? !*error : strstr(error, "1:65: more than 64 levels") != NULL,
            "%d levels: '%s'", n, error);
    }
    size_t big = (size_t)9 << 20;
    char *text = (char *)malloc(big);
    memset(text, ',', big);
    for (size_t i = 1; i < big; i += 2) text[i] = '0';
    text[0] = '[';
    text[big - 1] = ']';
    CHECK(strstr(json_error(text, big), "more than 4194304 values"));
    size_t string = ((size_t)16 << 20) + 3;
    text = (char *)realloc(text, string);
    memset(text, 'a', string);
    text[0] = text[string - 1] = '"';
    CHECK(strstr(json_error(text, string), "1:1: a string of more than 16777216 bytes"));
    text[string - 2] = '"';
    CHECK(*json_error(text, string - 1) == 0);
    memset(text, '1', 900);
    text[1] = '.';
    CHECK(*json_error(text, 800) == 0 && strstr(json_error(text, 801), "more than 800 digits"));
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    CHECK(dt_json_parse(ctx, "x", text, 100000001) == NULL &&
          says(ctx, "100000001 bytes of JSON, at most 100000000"));
    CHECK(dt_json_parse(ctx, "x", "1", 1) == NULL); /* sticky */
    free_ctx(ctx, NULL, &m, "too large");
    free(text);
}

static void test_json_read(void) {
    static const char text[] =
        " {\"b\" : [1, -2.5e3 ,0, 9007199254740992,1e2],\"a\":{},\"\":"
        "\"q\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\u20AC\\ud83d\\ude00\\u0000z\",\n "
        "\"t\":true,\"f\" :false,\"n\":null, \"aa\":[[ ],0.5] }\r\n\t ";
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    dt_json *j = dt_json_parse(ctx, "t.json", text, sizeof text - 1);
    if (!CHECK_MSG(j != NULL, "%s", dt_error_text(ctx))) return;
    double v = 0;
    int64_t n = 0;
    int b = dt_json_find(j, 0, "b"), flag = 7;
    size_t bytes = 0;
    const char *s = dt_json_string(j, dt_json_find(j, 0, ""), &bytes);
    CHECK(dt_json_kind_of(j, 0) == DT_JSON_OBJECT && dt_json_count(j, 0) == 7 &&
          dt_json_count(j, b) == 5);
    CHECK(s && bytes == 9 + 2 + 3 + 4 + 2 &&
          memcmp(s, "q\"\\/\b\f\n\r\t\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\0z", bytes + 1) == 0);
    CHECK(dt_json_number(j, dt_json_at(j, b, 1), &v) && v == -2500 &&
          dt_json_int(j, dt_json_at(j, b, 1), &n) && n == -2500);
    CHECK(dt_json_int(j, dt_json_at(j, b, 3), &n) && n == (int64_t)1 << 53);
    CHECK(dt_json_int(j, dt_json_at(j, b, 4), &n) && n == 100 &&
          dt_json_int(j, dt_json_at(j, b, 2), &n) && n == 0);
    CHECK(!dt_json_int(j, dt_json_at(j, dt_json_find(j, 0, "aa"), 1), &n));
    CHECK(dt_json_bool(j, dt_json_find(j, 0, "t"), &flag) && flag == 1 &&
          dt_json_bool(j, dt_json_find(j, 0, "f"), &flag) && !flag);
    CHECK(dt_json_kind_of(j, dt_json_find(j, 0, "n")) == DT_JSON_NULL &&
          dt_json_find(j, 0, "zz") == -1);
    CHECK(dt_json_at(j, b, 5) == -1 && dt_json_at(j, b, -1) == -1 && dt_json_at(j, 99, 0) == -1 &&
          dt_json_find(j, b, "x") == -1);
    CHECK(!dt_json_number(j, 0, &v) && !dt_json_string(j, b, NULL) && !dt_json_bool(j, b, &flag) &&
          !dt_json_key(j, -1, NULL));
    CHECK(dt_json_kind_of(NULL, 0) == DT_JSON_NULL && dt_json_count(j, -5) == 0 &&
          !dt_json_int(NULL, 0, &n));
    const char *keys[7] = { "", "a", "aa", "b", "f", "n", "t" }; /* in order */
    for (int i = 0; i < 7; i++)
        CHECK(strcmp(dt_json_key(j, dt_json_at(j, 0, i), NULL), keys[i]) == 0);
    CHECK(dt_json_fail(j, dt_json_find(j, 0, "t"), "t: %d is wrong", 3) == DT_ERR_IO &&
          says(ctx, "t.json:2:6: t: 3 is wrong"));
    dt_json_free(j);
    free_ctx(ctx, NULL, &m, "json");
}

static double json_number(const char *text) {
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    dt_json *j = dt_json_parse(ctx, "x", text, strlen(text));
    double v = (double)NAN;
    dt_json_number(j, 0, &v);
    dt_json_free(j);
    dt_ctx_free(ctx);
    return v;
}

/* Texts of the kinds that public JSON test suites list. Each must be refused with its error. */
static const json_case json_suite_refused[] = {
    /* not UTF-8: code points in 5 and 6 bytes, UTF-16 */
    { "[\"\xfc\x83\xbf\xbf\xbf\xbf\"]", "1:3: this is not UTF-8" },
    { "[\"\xf8\x88\x80\x80\x80\"]", "not UTF-8" }, { "[\xff]", "1:2: this is not UTF-8" },
    { "\xff\xfe[", "1:1: this is not UTF-8" }, { "[\"a\xc0\xaf\"]", "1:4: this is not UTF-8" },
    { "[\"\xe2\x82\xac\xc3\xa4\xfe\"]", "1:5: this is not UTF-8" },
    /* byte order marks */
    { "\xef\xbb\xbf{}", "1:1: a value" }, { "\xef\xbb\xbf", "1:1: a value" },
    { "{\xef\xbb\xbf}", "1:2: a key" },
    /* characters that JSON does not count as white space */
    { "[1,\f2]", "1:4: a value" }, { "[\v1]", "1:2: a value" },
    { "[\xc2\xa0"
      "1]",
        "1:2: a value" },
    { "[\xe2\x81\xa0]", "1:2: a value" }, { "\x1f", "1:1: a value" }, { "\b", "1:1: a value" },
    /* commas and colons */
    { "[1,,2]", "1:4: a value" }, { "[1,\n,]", "2:1: a value" }, { "[,]", "1:2: a value" },
    { ",", "1:1: a value" }, { "[1:2]", "1:3: a comma" }, { "[:]", "1:2: a value" },
    { "{,}", "1:2: a key" }, { "[\"\",]", "1:5: a value" }, { "{\"a\":1,,\"b\":2}", "1:8: a key" },
    { "{\"a\"::1}", "1:6: a value" }, { "{\"a\",1}", "1:5: a colon" },
    { "{\"a\":}", "1:6: a value" }, { "{:1}", "1:2: a key" }, { "{\"a\"}", "1:5: a colon" },
    { "{\"a\":1 2}", "1:8: a comma" }, { "{\"a\"=1}", "1:5: a colon" },
    { "[5[6]]", "1:3: a comma" },
    /* keys */
    { "{null:1}", "1:2: a key" }, { "{'a':1}", "1:2: a key" }, { "{[]:1}", "1:2: a key" },
    { "{{}}", "1:2: a key" }, { "{\"a\":{\"b\":1,\"b\":1}}", "'b' is there twice" },
    { "{\"a\":null,\"a\":null}", "'a' is there twice" },
    /* values without an end, or with the wrong closing character */
    { "{\"a\":1]", "1:7: a comma or '}'" }, { "[{", "1:3: a key" }, { "[[1]", "1:5: a comma" },
    { "[1,", "1:4: a value" }, { "[\"\"", "1:4: a comma" }, { "[{\"a\":[{", "1:9: a key" },
    { "[\"a", "1:2: a string w" }, { "[\n1\n,1", "3:3: a comma" }, { "\"", "1:1: a string w" },
    { "\"\\\"", "1:1: a string w" }, { "{\"a\":\"b\\", "1:8: no such escape" },
    { "{\"a", "1:2: a string w" }, { "[tru", "1:2: a value" },
    /* text after the end of the value */
    { "[1]]", "1:4: something" }, { "{}}", "1:3: something" }, { "{},{}", "1:3: something" },
    { "1]", "1:2: something" }, { "[1][2]", "1:4: something" }, { "{}#", "1:3: something" },
    { "\"\"x", "1:3: something" }, { "[]\f", "1:3: something" },
    { "[]\xe2\x80\xa8", "1:3: something" }, { "nulll", "1:5: something" },
    { "truex", "1:5: something" },
    /* comments, and common mistakes */
    { "[1/**/]", "1:3: a comma" }, { "/**/1", "1:1: a value" }, { "[1] // c", "1:5: something" },
    { "{}/*", "1:3: some" }, { "#\n1", "1:1: a value" }, { "*", "1:1: a value" },
    { "<null>", "1:1: a value" }, { "...", "1:1: a value" }, { "{...}", "1:2: a key" },
    { "a", "1:1: a value" }, { "\\u0061", "1:1: a value" }, { "[\\n]", "1:2: a value" },
    { "\xc3\xa5", "1:1: a value" }, { "['a']", "1:2: a value" }, { "(1)", "1:1: a value" },
    /* misspelled and unknown words */
    { "True", "1:1: a value" }, { "NULL", "1:1: a value" }, { "[fals]", "1:2: a value" },
    { "nan", "1:1: a value" }, { "Inf", "1:1: a value" }, { "-NaN", "1:2: a digit" },
    { "-inf", "1:2: a digit" }, { "Infinity", "1:1: a value" },
    /* numbers */
    { "-01", "1:1: -0" }, { "00", "1:2: something" }, { "-00", "1:1: -0" },
    { "--1", "1:2: a digit" }, { "- 1", "1:2: a digit" }, { "-.5", "1:2: a digit" },
    { "-a", "1:2: a digit" }, { "++1", "1:1: a value" }, { "1+2", "1:2: something" },
    { "1-", "1:2: something" }, { "0.1.2", "1:4: something" }, { ".", "1:1: a value" },
    { "0.e1", "1:3: a digit" }, { "2.e+3", "1:3: a digit" }, { "0e", "1:3: a digit" },
    { "0E+", "1:4: a digit" }, { "1eE2", "1:3: a digit" }, { "1e+-2", "1:4: a digit" },
    { "1e1.5", "1:4: something" }, { "-1.", "1:4: a digit" }, { "1 000", "1:3: something" },
    { "1_000", "1:2: something" }, { "1f", "1:2: something" }, { "0b1", "1:2: something" },
    { "\xef\xbc\x91", "1:1: a value" }, { "1e\xef\xbc\x91", "1:3: a digit" },
    { "1.\xd9\xa1", "1:3: a digit" }, { "-0E0", "1:1: -0" }, { "-0.000", "1:1: -0" },
    { "-1e400", "no double" }, { "[1e309]", "1:2: a number that no d" },
    { "[9007199254740994]", "1:2: an integer beyond 2^53" },
    { "18446744073709551616", "beyond 2^53" },
    /* escapes, surrogates, control characters */
    { "\"\\a\"", "1:2: no such escape" }, { "\"\\'\"", "no such escape" },
    { "\"\\0\"", "no such escape" }, { "\"\\U0041\"", "no such escape" },
    { "\"\\\t\"", "no such escape" }, { "\"\\\xf0\x9f\x8c\x80\"", "no such escape" },
    { "\"\\u\"", "\\u needs" }, { "\"\\u00A\"", "\\u needs" }, { "\"\\u 041\"", "\\u needs" },
    { "\"\\u{41}\"", "\\u needs" }, { "\"\\u+041\"", "\\u needs" }, { "\"\\ud834\\", "half of" },
    { "\"\\ud834\\x1234\"", "half of" }, { "\"\\udd1e\\ud834\"", "half of" },
    { "\"\\ud834u1234\"", "half of" }, { "{\"\\ud800\":1}", "1:3: half of" },
    { "\"\x1f\"", "1:2: a control" }, { "\"\r\"", "1:2: a control" },
    { "{\"a\nb\":1}", "1:4: a control" }
};

static void test_json_classes(void) {
    check_json_refused(json_suite_refused, sizeof json_suite_refused / sizeof *json_suite_refused);
    CHECK(strstr(json_error("\0", 1), "1:1: a value") &&
          strstr(json_error("[\"a\0b\"]", 7), "1:4: a control"));
    CHECK(strstr(json_error("\"\\\0\"", 4), "no such escape") &&
          strstr(json_error("1\0", 2), "1:2: something"));
    CHECK(strstr(json_error("\0[\0]", 4), "1:1: a value") &&
          strstr(json_error("{\"a\0\":1}", 8), "a control"));
}

/* Texts that must be accepted, with their values. */
static void test_json_accepted(void) {
    static const struct {
        const char *text, *means;
        size_t bytes;
    } strings[] = { { "\"\"", "", 0 }, { "\"\\u0012\\u001f\"", "\x12\x1f", 2 },
        { "\"\x7f\"", "\x7f", 1 }, { "\"\\u007F\"", "\x7f", 1 },
        { "\"a/*b*/c//#\"", "a/*b*/c//#", 10 }, { "\"\\\\n\\\\u0041\"", "\\n\\u0041", 8 },
        { "\"\\\"\\\\\"", "\"\\", 2 }, { "\"\\u0000\"", "\0", 1 },
        { "\"\\u0041\\u00e9\\u0060\\u012A\"", "A\xc3\xa9`\xc4\xaa", 6 },
        { "\"\\uD834\\uDd1e\"", "\xf0\x9d\x84\x9e", 4 },
        { "\"\\udBff\\uDFFF\"", "\xf4\x8f\xbf\xbf", 4 },
        { "\"\\ud800\\udc00\"", "\xf0\x90\x80\x80", 4 },
        { "\"\\uFFFE\\uFDD0\"", "\xef\xbf\xbe\xef\xb7\x90", 6 },
        { "\"\xf4\x8f\xbf\xbf\xef\xbf\xbf\"", "\xf4\x8f\xbf\xbf\xef\xbf\xbf", 7 },
        { "\"\\ufeff\"", "\xef\xbb\xbf", 3 },
        { "\"\xe2\x80\xa8\xe2\x80\xa9\xc2\x85\"", "\xe2\x80\xa8\xe2\x80\xa9\xc2\x85", 8 },
        { "\" \"", " ", 1 },
        { "\"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\"",
            "\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80", 13 },
        { "\"\xef\xbb\xbf\"", "\xef\xbb\xbf", 3 } };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        meter m = { 0, 0, 0 };
        dt_ctx *ctx = make_ctx(NULL, &m);
        dt_json *j = dt_json_parse(ctx, "x", strings[i].text, strlen(strings[i].text));
        size_t bytes = 99;
        const char *s = dt_json_string(j, 0, &bytes);
        CHECK_MSG(s && bytes == strings[i].bytes && memcmp(s, strings[i].means, bytes + 1) == 0,
            "%s: %s", strings[i].text, dt_error_text(ctx));
        dt_json_free(j);
        free_ctx(ctx, NULL, &m, "json");
    }
    static const struct {
        const char *text;
        double means;
    } numbers[] = { { "0", 0 }, { " 42\n", 42 }, { "-1", -1 }, { "77e40", 77e40 },
        { "-0.0000001", -1e-7 }, { "0e+1", 0 }, { "0e1", 0 }, { "30e1", 300 }, { "1E22", 1e22 },
        { "1E-2", 0.01 }, { "1E+2", 100 }, { "98.7654e32", 98.7654e32 }, { "-1.5", -1.5 },
        { "31.4159265", 31.4159265 },
        { "0.00000000000000000000000000000000000000000000000000000000001", 1e-59 },
        { "-9007199254740992", -9007199254740992.0 }, { "0.10", 0.1 }, { "1.0e308", 1e308 },
        { "\t-3e-0", -3 } };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        CHECK_MSG(same(json_number(numbers[i].text), numbers[i].means), "%s", numbers[i].text);
    static const char *const good[] = { "null", "true", "false", "[]", "{}", "[[]   ]", " [] ",
        "[\"\"]", "[1\n]", "[ 1]", "[1]  ", "[1,null,null,null,2]", "{\"\":0}", "{\"a\":[]}",
        "{\"a\\u0000b\":0}", "\r\n\t [1]\n", "{\"a\\u0000\":0,\"a\":1}", "{\n\"a\" :\t\"b\"\r}",
        "[null, 1, \"1\", {}]", "{\"A\":1,\"a\":2}",
        "{\"a\":{\"a\":1},\"b\":[{\"a\":2},{\"a\":3}]}", "{\"\xc3\xa9\":1,\"e\xcc\x81\":2}",
        "[\"a\",\"a\"]", "[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]" };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        const char *error = json_error(good[i], strlen(good[i]));
        CHECK_MSG(!*error, "%s: '%s'", good[i], error);
    }
}

/* Numbers parse as strtod parses them in the C locale: random doubles with 2 to 26 digits,
   midpoints between two doubles, and numbers just above a midpoint. */
static void test_json_numbers(void) {
    int right = 0, n = 0;
    char text[1200];
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = mix((uint64_t)i) & 0x7fffffffffffffff;
        double x;
        if (i % 4 == 0) bits &= 0x001fffffffffffff; /* subnormal and the smallest normal numbers */
        memcpy(&x, &bits, 8);
        if (!isfinite(x)) continue;
        snprintf(text, sizeof text, "%.*e", 1 + i % 25, x);
        double want = strtod(text, NULL);
        if (!isfinite(want) || want == 0) continue;
        right += same(json_number(text), want);
        n++;
    }
    /* the midpoint between two doubles with all its digits; one more digit makes it round up */
    for (int i = 0; i < 400; i++) {
        uint64_t bits = (mix((uint64_t)i) & 0x000fffffffffffff) |
                        (uint64_t)(i % 2 ? 500 + mix((uint64_t)i * 3) % 600 : (uint64_t)i % 5)
                            << 52;
        double x;
        memcpy(&x, &bits, 8);
        int length = snprintf(text, sizeof text, "%.*f", 1074, x);
        /* long double holds the midpoint exactly */
        if (i % 2) {
            length = snprintf(text, sizeof text, "%.*Lf", 1000,
                (long double)x + ((long double)nextafter(x, 1e308) - x) / 2);
        }
        while (text[length - 1] == '0') text[--length] = 0;
        if (text[length - 1] == '.' || length > 700) continue;
        right += same(json_number(text), strtod(text, NULL));
        strcpy(text + length, "1");
        right += same(json_number(text), strtod(text, NULL));
        n += 2;
    }
    CHECK_MSG(right == n && n > 15000, "%d of %d numbers equal strtod's", right, n);
    CHECK(json_number("5e-324") == 4.9406564584124654e-324 &&
          json_number("2.5e-324") == 4.9406564584124654e-324);
    CHECK(
        json_number("0.1e1") == 1 && json_number("0e99999") == 0 && json_number("0.0000e-1") == 0);
    CHECK(json_number("1.7976931348623158e308") == 1.7976931348623157e308 &&
          json_number("1E2") == 100);
    CHECK(json_number("9007199254740993.0") == 9007199254740992.0 &&
          json_number("9007199254740995.0") == 9007199254740996.0);
}

static void test_json_write(void) {
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    dt_json_out o = { ctx, NULL, 0, 0 };
    const char *locale = setlocale(LC_NUMERIC, "de_DE.UTF-8");
    if (!locale) locale = setlocale(LC_NUMERIC, "fr_FR.UTF-8");
    if (!locale) check_skip("JSON in a locale with a decimal comma: none is installed");
    dt_json_open(&o, NULL, '{');
    dt_json_put_string(&o, "a\"\\\b\f\n\r\t\x01", "\xc3\xa9/\x1f");
    dt_json_open(&o, "l", '[');
    dt_json_put_int(&o, NULL, -5);
    dt_json_put_number(&o, NULL, 0.1);
    dt_json_put_number(&o, NULL, -1e-7);
    dt_json_put_number(&o, NULL, 1e22);
    dt_json_put_number(&o, NULL, -0.0);
    dt_json_put_number(&o, NULL, 12345678901234567.0);
    dt_json_put_number(&o, NULL, 3);
    dt_json_open(&o, NULL, '{');
    dt_json_close(&o, '}');
    dt_json_close(&o, ']');
    dt_json_put_bool(&o, "t", 1);
    dt_json_put_bool(&o, "f", 0);
    dt_json_close(&o, '}');
    CHECK_MSG(strcmp(o.text, "{\"a\\\"\\\\\\b\\f\\n\\r\\t\\u0001\":\"\xc3\xa9/"
                             "\\u001f\",\"l\":[-5,0.1,-1e-07,1e+22,0,"
                             "12345678901234568.0,3,{}],\"t\":true,\"f\":false}") == 0,
        "%s", o.text);
    CHECK(strlen(o.text) == o.used && *json_error(o.text, o.used) == 0);
    int right = 0, n = 0;
    for (int i = 0; i < 3000; i++) {
        uint64_t bits = mix((uint64_t)i);
        double x;
        memcpy(&x, &bits, 8);
        if (i % 3 == 0) x = (double)(int64_t)(bits >> (i % 40)) / 64;
        if (!isfinite(x)) continue;
        dt_json_out_free(&o);
        dt_json_put_number(&o, NULL, x);
        right += same(json_number(o.text), x == 0 ? 0 : x);
        n++;
    }
    CHECK_MSG(right == n && n > 2500, "%d of %d numbers are the same after writing and parsing%s",
        right, n, locale ? " in a locale with a comma" : "");
    setlocale(LC_NUMERIC, "C");
    dt_json_put_number(&o, NULL, (double)NAN);
    CHECK(dt_error(ctx) == DT_ERR_ARG && says(ctx, "nan is no number"));
    dt_json_out_free(&o);
    free_ctx(ctx, NULL, &m, "json out");
}

/* Any bytes, such as a path, survive writing and parsing. The text is always UTF-8: valid UTF-8 is
   written unchanged, every other byte as an escape. */
static void test_json_bytes(void) {
    static const struct {
        const char *bytes, *text;
    } cases[] = { { "\xff", "\"\\udcff\"" }, { "\x80x", "\"\\udc80x\"" },
        { "\xc3\xa9\xc3", "\"\xc3\xa9\\udcc3\"" }, { "\xe2\x82(", "\"\\udce2\\udc82(\"" },
        { "\xed\xb2\x80", "\"\\udced\\udcb2\\udc80\"" }, { "\xc0\xaf", "\"\\udcc0\\udcaf\"" },
        { "\xf0\x90\x80\x80\xf5", "\"\xf0\x90\x80\x80\\udcf5\"" } };
    meter m = { 0, 0, 0 };
    uint64_t random = 1;
    int right = 0, n = 0;
    dt_ctx *ctx = make_ctx(NULL, &m);
    for (int i = 0; i < 20000; i++, n++) {
        size_t known = sizeof cases / sizeof *cases, length = 0, bytes = 0;
        char s[16] = "";
        dt_json_out o = { ctx, NULL, 0, 0 };
        /* UTF-8 lead bytes come often */
        for (; (size_t)i >= known && length < (size_t)i % 15; length++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            unsigned byte = random >> 40 & 1 ? 0x80 | (random >> 33 & 0x7f) : random >> 33 & 0xff;
            s[length] = (char)(byte ? byte : 1);
        }
        if ((size_t)i < known) snprintf(s, sizeof s, "%s", cases[i].bytes);
        dt_json_put_string(&o, NULL, s);
        dt_json *d = dt_json_parse(ctx, "a", o.text, o.used);
        const char *back = dt_json_string(d, 0, &bytes);
        int text_is_right = (size_t)i >= known || strcmp(o.text, cases[i].text) == 0;
        right += back && bytes == strlen(s) && memcmp(back, s, bytes) == 0 && text_is_right;
        dt_json_free(d);
        dt_json_out_free(&o);
    }
    CHECK_MSG(right == n && dt_error(ctx) == DT_OK,
        "%d of %d strings are the same after writing and parsing: %s", right, n,
        dt_error_text(ctx));
    dt_json *d = dt_json_parse(ctx, "a", "[\"\\uDC80\\udcFF\\ud800\\udc80\"]", 28);
    CHECK(strcmp(dt_json_string(d, dt_json_at(d, 0, 0), NULL), "\x80\xff\xf0\x90\x82\x80") == 0);
    dt_json_free(d);
    free_ctx(ctx, NULL, &m, "json bytes");
}

/* Objects with 100,000 keys in rising, falling and scattered order: every key is found, keys are
   sorted, a duplicate is refused. A quadratic search would take far too long. */
static void test_json_keys(void) {
    size_t room = 4 << 20, n = 0;
    char *text = (char *)malloc(room), key[32];
    for (int order = 0; order < 3; order++) {
        n = 0;
        for (int i = 0; i < 100000; i++) {
            int k = order == 0 ? i : order == 1 ? 99999 - i : (int)((uint64_t)i * 48271 % 100000);
            n += (size_t)snprintf(text + n, room - n, "%c\"k%05d\":%d", i ? ',' : '{', k, k);
        }
        text[n++] = '}';
        meter m = { 0, 0, 0 };
        dt_ctx *ctx = make_ctx(NULL, &m);
        dt_json *j = dt_json_parse(ctx, "x", text, n);
        int right = 0;
        int64_t v;
        for (int i = 0; i < 100000; i++) {
            snprintf(key, sizeof key, "k%05d", i);
            right += dt_json_int(j, dt_json_find(j, 0, key), &v) && v == i &&
                     dt_json_at(j, 0, i) == dt_json_find(j, 0, key);
        }
        CHECK_MSG(j && right == 100000, "%d of 100000 keys are found", right);
        dt_json_free(j);
        free_ctx(ctx, NULL, &m, "keys");
    }
    snprintf(text + n - 1, room - n, ",\"k4242\":0,\"k04242\":0}");
    CHECK(strstr(json_error(text, strlen(text)), "'k04242' is there twice"));
    free(text);
}

// ==== 4. Files to read ==========================================================================

/* A safetensors file: the header, then `data` bytes 0 1 2 ... */
static void put_safetensors(memory_fs *fs, const char *name, const char *header, size_t data) {
    size_t n = strlen(header);
    unsigned char *bytes = (unsigned char *)calloc(1, 8 + n + data + 1);
    uint64_t length = n;
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data; i++) bytes[8 + n + i] = (unsigned char)i;
    memory_put(fs, name, bytes, 8 + n + data);
    free(bytes);
}

/* Opens the path. Returns "" if that succeeds, else the error. */
static const char *open_error(memory_fs *fs, const char *path) {
    static char error[600];
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(fs, &m);
    dt_weights *w = dt_weights_open(ctx, path);
    CHECK((w == NULL) == (dt_error(ctx) != DT_OK));
    CHECK(w || dt_error(ctx) == DT_ERR_IO);
    snprintf(error, sizeof error, "%s", dt_error_text(ctx));
    if (m.calls % 2) dt_weights_close(w); /* otherwise freeing the context closes it */
    free_ctx(ctx, fs, &m, path);
    return error;
}

static void test_st_example(void) {
    memory_fs fs;
    meter m = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    put_safetensors(
        &fs, "golden", "{\"test\":{\"dtype\":\"I32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", 0);
    int at = memory_at(&fs, "golden"); /* the format's own example: 60 bytes of header, 16 zeros */
    CHECK(fs.file[at].size == 68 && fs.file[at].data[0] == 0x3c);
    memory_size_to(&fs.file[at], 84);
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_weights *w = dt_weights_open(ctx, "golden");
    const dt_weight *t = dt_weights_get(w, 0);
    int32_t v[4] = { 1, 1, 1, 1 };
    float f[4];
    CHECK(t && dt_weights_count(w) == 1 && strcmp(t->name, "test") == 0 &&
          strcmp(t->type, "I32") == 0 && t->readable && t->dtype == DT_I32 && t->shape.nd == 2 &&
          t->shape.d[1] == 2 && t->count == 4);
    CHECK(dt_weights_read(w, 0, 0, 4, DT_I32, v) == DT_OK && !v[0] && !v[3] &&
          dt_weights_find(w, "test") == 0);
    CHECK(dt_weights_find(w, "tes") == -1 && !dt_weights_get(w, 1) && !dt_weights_get(w, -1) &&
          !dt_weights_metadata(w, "x"));
    CHECK(dt_weights_llmc(w).version == 0 && dt_weights_count(NULL) == 0 &&
          dt_weights_llmc(NULL).vocab == 0);
    CHECK(dt_weights_read(w, 0, 0, 4, DT_F32, f) == DT_ERR_UNSUPPORTED &&
          says(ctx, "no conversion between I32 and f32"));
    CHECK(dt_weights_close(w) == DT_ERR_UNSUPPORTED);
    free_ctx(ctx, &fs, &m, "golden");
    memory_clear(&fs);
}

/* Bytes and 64-bit integers are read and written without a conversion. */
static void test_integers(void) {
    static const int64_t wide[2] = { (1ll << 53) + 1, INT64_MIN };
    static const uint8_t bytes[3] = { 0, 128, 255 };
    memory_fs fs;
    meter m = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_weights *w = dt_weights_create(ctx, "f", (dt_weights_desc){ 0 });
    int b = dt_weights_declare(w, "bytes", DT_U8, DT_SHAPE(3)),
        l = dt_weights_declare(w, "long", DT_I64, DT_SHAPE(2));
    dt_weights_write(w, b, 0, 3, DT_U8, bytes);
    dt_weights_write(w, l, 0, 2, DT_I64, wide);
    CHECK_MSG(dt_weights_close(w) == DT_OK, "%s", dt_error_text(ctx));
    w = dt_weights_open(ctx, "f");
    b = dt_weights_find(w, "bytes"), l = dt_weights_find(w, "long");
    const dt_weight *of_bytes = dt_weights_get(w, b), *of_long = dt_weights_get(w, l);
    uint8_t got[3];
    int64_t got_wide[2];
    float f[3];
    CHECK(of_bytes && of_bytes->readable && strcmp(of_bytes->type, "U8") == 0 &&
          of_bytes->dtype == DT_U8 && of_long && strcmp(of_long->type, "I64") == 0 &&
          of_long->dtype == DT_I64);
    CHECK(dt_weights_read(w, b, 0, 3, DT_U8, got) == DT_OK && memcmp(got, bytes, 3) == 0);
    CHECK(dt_weights_read(w, l, 0, 2, DT_I64, got_wide) == DT_OK &&
          memcmp(got_wide, wide, sizeof wide) == 0);
    CHECK(dt_weights_read(w, l, 0, 2, DT_F32, f) == DT_ERR_UNSUPPORTED &&
          says(ctx, "no conversion between I64 and f32"));
    dt_weights_close(w);
    free_ctx(ctx, &fs, &m, "integers");
    memory_clear(&fs);
}

#define ONE(dtype, shape, begin, end) \
    "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}}"
#define TWO(b0, e0, b1, e1) \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" b0 "," e0 "]}," \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" b1 "," e1 "]}}"
/* Headers, each with the bytes of data after it. An empty error means that the file opens. */
static const struct {
    const char *header;
    int data;
    const char *error;
} st_cases[] = { { "{}", 0, "" }, { "{\"__metadata__\":{}}  ", 0, "" },
    { ONE("F32", "[]", "0", "4"), 4, "" }, { ONE("F32", "[3,0,5]", "0", "0"), 0, "" },
    { TWO("2", "4", "0", "2"), 4, "" }, { ONE("F4", "[4]", "0", "2"), 2, "" },
    { ONE("F6_E2M3", "[4]", "0", "3"), 3, "" }, { ONE("C64", "[1]", "0", "8"), 8, "" },
    { ONE("F32", "[1,1,1,1,1,1]", "0", "4"), 4, "" }, { "[]", 0, "does not begin with '{'" },
    { " {}", 0, "does not begin" }, { "{", 0, "does not begin" },
    { "{} x", 0, "f:1:4: something follows" }, { "{}", 1, "11 bytes" },
    { "{}", 1, "its tensors end at byte 10" },
    { "{\"a\":1}", 0, "tensor 'a': dtype, shape and two data_offsets are needed" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "dtype, shape and two" },
    { "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype, shape and two" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "dtype, shape and two" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", 4,
        "dtype, shape and two" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":0}}", 4,
        "and no more" },
    { ONE("F33", "[1]", "0", "4"), 4, "tensor 'a': unknown type 'F33'" },
    { ONE("f32", "[1]", "0", "4"), 4, "unknown type 'f32'" },
    { ONE("", "[1]", "0", "4"), 4, "unknown type ''" },
    { ONE("F32", "[1,1,1,1,1,1,1]", "0", "4"), 4, "" },
    { ONE("F32", "[1,1,1,1,1,1,2]", "0", "4"), 4, "its data_offsets are not those of (2) of F32" },
    { ONE("F32", "[1,1,1,1,1,1,-2]", "0", "4"), 4, "dimension 6 is no count" },
    { ONE("F32", "[-1]", "0", "4"), 4, "dimension 0 is no count" },
    { ONE("F32", "[1,0.5]", "0", "4"), 4, "dimension 1 is no count" },
    { ONE("F32", "[\"1\"]", "0", "4"), 4, "dimension 0" },
    { ONE("F32", "[null]", "0", "4"), 4, "dimension 0" },
    { ONE("F32", "[4294967296,4294967296]", "0", "4"), 4,
        "dimension 1: more elements than can be counted" },
    { ONE("F32", "[1073741824,4294967296]", "0", "0"), 0, "has no size in bytes" },
    { ONE("F32", "[4294967296,4294967296,0]", "0", "0"), 0, "dimension 1" },
    { ONE("F4", "[3]", "0", "2"), 2, "has no size in bytes" },
    { ONE("F6_E3M2", "[2]", "0", "2"), 2, "has no size" },
    { ONE("F32", "[1]", "0", "3"), 3, "tensor 'a': its data_offsets are not those of (1) of F32" },
    { ONE("F32", "[1]", "4", "0"), 4, "data_offsets are not" },
    { ONE("F32", "[1]", "-4", "0"), 4, "data_offsets are not" },
    { ONE("F32", "[1]", "0.5", "4.5"), 4, "data_offsets are not" },
    { ONE("F32", "[1]", "0", "\"4\""), 4, "are not" },
    { ONE("F32", "[1]", "1", "5"), 5, "tensor 'a' begins at byte" },
    { ONE("F32", "[1]", "0", "4"), 3, "end at byte" },
    { ONE("F32", "[1]", "9007199254740988", "9007199254740992"), 4, "begins at byte" },
    { TWO("0", "2", "3", "5"), 5, "tensor 'b' begins at byte" },
    { TWO("0", "2", "1", "3"), 3, "tensor 'b' begins at byte" },
    { TWO("0", "2", "0", "2"), 2, "begins at byte" },
    { TWO("0", "2", "2", "4"), 5, "its tensors end at byte" },
    { "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,1]},\"b\":{\"dtype\":\"U8\","
      "\"shape\":[2],"
      "\"data_offsets\":[0,2]}}",
        2, "tensor 'a' begins at byte 114, but the one before it ends at 115" },
    { "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":{\"dtype\":\"U8\","
      "\"shape\":[0],"
      "\"data_offsets\":[0,0]}}",
        0, "'a' is there twice" },
    { "{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
        "a tensor's name holds a NUL" },
    { "{\"__metadata__\":1}", 0, "__metadata__ is no object" },
    { "{\"__metadata__\":{\"a\":1}}", 0, "holds strings only" },
    { "{\"x\x1b[2J\":1}", 0, "control character" },
    { "{\"x\\u001b[2J\":1}", 0, "tensor 'x\\x1b[2J'" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1e400],\"data_offsets\":[0,4]}}", 4, "no double" } };

/* Opens the path and returns the error. It must contain `want`, or be empty if `want` is empty. */
static const char *check_open(memory_fs *fs, const char *path, const char *want, const char *what) {
    const char *error = open_error(fs, path);
    CHECK_MSG(
        *want ? strstr(error, want) != NULL : !*error, "%s: '%s', not '%s'", what, error, want);
    return error;
}

static void test_st_headers(void) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    for (size_t i = 0; i < sizeof st_cases / sizeof *st_cases; i++) {
        put_safetensors(&fs, "f", st_cases[i].header, (size_t)st_cases[i].data);
        const char *error = check_open(&fs, "f", st_cases[i].error, st_cases[i].header);
        CHECK_MSG(!*error || strstr(error, "rank 0: f:") == error, "%s: no file in '%s'",
            st_cases[i].header, error);
    }
    memory_clear(&fs);
}

/* A missing path, a file too short for a header, and invalid sizes of the header. */
static void test_st_refused(void) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    CHECK(strstr(open_error(&fs, "missing"), "missing: No such file"));
    CHECK(strstr(open_error(&fs, "dir/"),
        "dir/: a folder without model.safetensors and model.safetensors.index.json"));
    memory_put(&fs, "f", "abcdefg", 7);
    CHECK(strstr(open_error(&fs, "f"), "f: 7 bytes are no weights"));
    static const uint64_t heads[] = { 0, 1, 3, 100000001, (uint64_t)1 << 63, UINT64_MAX,
        UINT64_MAX - 7, 100000000 };
    for (int i = 0; i < 8; i++) {
        unsigned char bytes[10] = { 0, 0, 0, 0, 0, 0, 0, 0, '{', '}' };
        memcpy(bytes, &heads[i], 8);
        memory_put(&fs, "f", bytes, 10);
        CHECK_MSG(strstr(open_error(&fs, "f"),
                      i < 2 ? "does not begin" : "neither safetensors (a header of "),
            "N %d", i);
    }
    memory_clear(&fs);
}

/* Reads a tensor of many windows, converted, with short and interrupted reads. A tensor of a type
   without a dt_dtype is listed but cannot be read. */
static void test_st_read(void) {
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"v\"},"
        "\"w\":{\"dtype\":\"F32\",\"shape\":[100000],\"data_offsets\":[0,400000]},"
        "\"m\":{\"dtype\":\"BOOL\",\"shape\":[1,3],\"data_offsets\":[400000,400003]}}";
    memory_fs fs;
    meter m = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    put_safetensors(&fs, "f", header, 400003);
    unsigned char *data = fs.file[0].data + 8 + strlen(header);
    for (int i = 0; i < 100000; i++) {
        float v = (float)i - 0.5f;
        memcpy(data + 4 * i, &v, 4);
    }
    for (int way = 0; way < 2; way++) {
        dt_ctx *ctx = make_ctx(&fs, &m);
        fs.most = way ? 777 : 0;
        fs.interrupt = way ? 3 : 0;
        dt_weights *w = dt_weights_open(ctx, "f");
        if (!CHECK_MSG(w != NULL, "%s", dt_error_text(ctx))) return;
        int at = dt_weights_find(w, "w"), mask = dt_weights_find(w, "m");
        double *d = (double *)malloc(100001 * sizeof *d);
        float f[9] = { 0 };
        CHECK(strcmp(dt_weights_metadata(w, "k"), "v") == 0 && !dt_weights_metadata(w, "q"));
        CHECK(dt_weights_get(w, mask)->readable &&
              strcmp(dt_weights_get(w, mask)->type, "BOOL") == 0);
        d[100000] = 7;
        CHECK(dt_weights_read(w, at, 0, 100000, DT_F64, d) == DT_OK);
        int ok = d[100000] == 7;
        for (int i = 0; i < 100000; i++) ok &= d[i] == i - 0.5;
        CHECK_MSG(ok, "a tensor longer than one read window has wrong values");
        CHECK(dt_weights_read(w, at, 99991, 9, DT_F32, f) == DT_OK && f[0] == 99990.5f &&
              f[8] == 99998.5f);
        CHECK(dt_weights_read(w, at, 100000, 0, DT_F32, NULL) == DT_OK && dt_error(ctx) == DT_OK);
        CHECK(dt_weights_write(w, at, 0, 1, DT_F32, f) == DT_ERR_ARG &&
              says(ctx, "open for reading"));
        dt_weights_close(w);
        free(d);
        free_ctx(ctx, &fs, &m, "read");
    }
    static const struct {
        int64_t first, count;
        const char *error;
    } wrong[] = { { -1, 1, "elements -1..0 of 100000" }, { 0, -1, "elements 0..-1" },
        { 99999, 4, "elements 99999..100003 of 100000 (4 from 99999 on)" },
        { 100000, 1, "of 100000" }, { 1, INT64_MAX, "of 100000" }, { 0, 4, "" } };
    for (int i = 0; i < 6; i++) {
        float f[4];
        dt_ctx *ctx = make_ctx(&fs, &m);
        dt_weights *w = dt_weights_open(ctx, "f");
        int at = dt_weights_find(w, "w");
        if (i == 5) fs.shrunk = 8 + strlen(header) + 10;
        CHECK(dt_weights_read(w, at, wrong[i].first, wrong[i].count, DT_F32, f) ==
              (i < 5 ? DT_ERR_ARG : DT_ERR_IO));
        char byte[64];
        snprintf(byte, sizeof byte, "f: w, byte %d: the file has become shorter",
            (int)(8 + strlen(header) + 10));
        CHECK_MSG(says(ctx, i < 5 ? wrong[i].error : byte), "%s", dt_error_text(ctx));
        CHECK(dt_weights_read(w, at, 0, 1, DT_F32, f) != DT_OK &&
              dt_weights_read(NULL, 0, 0, 0, DT_F32, f) == DT_ERR_ARG);
        fs.shrunk = 0;
        free_ctx(ctx, &fs, &m, "read");
    }
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_weights *w = dt_weights_open(ctx, "f");
    CHECK(dt_weights_read(w, dt_weights_find(w, "m"), 0, 3, DT_F32, data) == DT_ERR_UNSUPPORTED &&
          says(ctx, "BOOL and f32"));
    free_ctx(ctx, &fs, &m, "mask");
    ctx = make_ctx(&fs, &m);
    w = dt_weights_open(ctx, "f");
    CHECK(dt_weights_read(w, 2, 0, 1, DT_F32, data) == DT_ERR_ARG && says(ctx, "tensor 2 of 2"));
    free_ctx(ctx, &fs, &m, "no tensor");
    memory_clear(&fs);
}

static void test_index(void) {
    static const char *const a = ONE("U8", "[2]", "0", "2"),
                             *const b =
                                 "{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
                             *const both =
                                 "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                                 "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}";
    static const struct {
        const char *index, *error;
    } cases[] = { { "{\"metadata\":{\"total_size\":6},\"weight_map\":{\"a\":\"s1\",\"b\":\"s2\"}}",
                      "" },
        { "{\"weight_map\":{\"a\":\"s1\"}}", "" }, { "{\"weight_map\":{}}", "" },
        { "{}", "index.json:1:1: there is no weight_map" }, { "[]", "there is no weight_map" },
        { "{\"weight_map\":[]}", "there is no weight_map" },
        { "{\"weight_map\":{\"a\":\"s1\"}", "1:25: a comma" },
        { "{\"weight_map\":{\"a\":\"s2\",\"b\":\"s2\"}}", "tensor 'a' is not in 's2'" },
        { "{\"weight_map\":{\"c\":\"s1\"}}", "tensor 'c' is not in 's1'" },
        { "{\"weight_map\":{\"a\":\"s1\",\"b\":\"s1\"}}", "tensor 'b' is not in 's1'" },
        { "{\"weight_map\":{\"a\":\"s3\"}}", "d/s3: No such file" },
        { "{\"weight_map\":{\"a\":\"s1\",\"b\":\"s3b\"}}", "tensor 'a' is there twice" },
        { "{\"weight_map\":{\"a\":\"../s1\"}}", "is not the name of a file beside the index" },
        { "{\"weight_map\":{\"a\":\"/s1\"}}", "is not the name" },
        { "{\"weight_map\":{\"a\":\"x/s1\"}}", "is not the name" },
        { "{\"weight_map\":{\"a\":\"..\"}}", "is not the name" },
        { "{\"weight_map\":{\"a\":\"x\\\\s1\"}}", "is not the name" },
        { "{\"weight_map\":{\"a\":\"s1\\u0000\"}}", "is not the name" },
        { "{\"weight_map\":{\"a\":\"\"}}", "is not the name" },
        { "{\"weight_map\":{\"a\":1}}", "is not the name" },
        { "{\"weight_map\":{\"a\":\"model\"}}", "neither safetensors" } };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    put_safetensors(&fs, "d/s1", a, 2);
    put_safetensors(&fs, "d/s3b", both, 3);
    put_safetensors(&fs, "d/s2", b, 4);
    unsigned char llmc[1024] = { 0x66, 0xd7, 0x34, 0x01, 3 };
    memory_put(&fs, "d/model", llmc, sizeof llmc);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memory_put(&fs, "d/model.safetensors.index.json", cases[i].index, strlen(cases[i].index));
        for (int way = 0; way < 2; way++)
            check_open(
                &fs, way ? "d" : "d/model.safetensors.index.json", cases[i].error, cases[i].index);
    }
    put_safetensors(&fs, "d/model.safetensors", b, 4); /* is preferred to an index */
    CHECK(*open_error(&fs, "d") == 0);
    memory_clear(&fs);
}

/* Files of the Python library safetensors: dt reads their values and writes the same bytes. */
static void test_reference_library(void) {
    char path[300];
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    snprintf(path, sizeof path, "%s/files_pt.safetensors", golden_folder);
    dt_weights *w = dt_weights_open(ctx, path);
    if (!CHECK_MSG(w != NULL, "%s", dt_error_text(ctx))) return;
    CHECK(dt_weights_count(w) == 9 && strcmp(dt_weights_metadata(w, "format"), "pt") == 0);
    static const char *const names[] = { "zz", "h.0.w", "h.0.b", "half", "wide" };
    for (int k = 0; k < 5; k++) {
        int at = dt_weights_find(w, names[k]), ok = 1;
        const dt_weight *t = dt_weights_get(w, at);
        double d[20];
        if (!CHECK_MSG(
                t && dt_weights_read(w, at, 0, t->count, DT_F64, d) == DT_OK, "%s", names[k]))
            continue;
        for (int i = 0; i < t->count; i++) {
            double want = i * 0.37 - 3, rounded = want;
            if (t->dtype == DT_F32) rounded = (double)(float)want;
            if (t->dtype == DT_F16) rounded = from_16_bits(nearest_16_bits(want, 5), 5);
            if (t->dtype == DT_BF16) rounded = from_16_bits(nearest_16_bits(want, 8), 8);
            ok &= d[i] == rounded;
        }
        CHECK_MSG(ok, "tensor %s of the reference library has wrong values", names[k]);
    }
    CHECK(dt_weights_find(w, "a \"quoted\"\n\tn\xc3\xa4me") >= 0 &&
          dt_weights_get(w, dt_weights_find(w, "none"))->count == 0);
    dt_weights_close(w);
    size_t want_bytes = 0, got_bytes = 0; /* dt writes the same bytes */
    char *want = dt_file_read(ctx, path, 10000, &want_bytes), *got;
    memory_fs fs;
    meter m2 = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    dt_ctx *mem = make_ctx(&fs, &m2);
    static const struct {
        const char *name;
        dt_dtype dtype;
        int64_t count;
        dt_shape shape;
    } list[] = { { "zz", DT_BF16, 6, { 2, { 2, 3 } } }, { "h.0.w", DT_F32, 20, { 2, { 4, 5 } } },
        { "h.0.b", DT_F32, 5, { 1, { 5 } } }, { "ids", DT_I32, 7, { 1, { 7 } } },
        { "half", DT_F16, 6, { 3, { 3, 1, 2 } } }, { "wide", DT_F64, 2, { 1, { 2 } } },
        { "one", DT_F32, 1, { 0, { 0 } } }, { "none", DT_F32, 0, { 2, { 0, 3 } } },
        { "a \"quoted\"\n\tn\xc3\xa4me", DT_F32, 1, { 1, { 1 } } } };
    w = dt_weights_create(mem, "o", (dt_weights_desc){ 0 });
    double ramp[20], one = 2.5;
    int32_t ids[7] = { 0, 1, 2, 3, 4, 5, 6 };
    for (int i = 0; i < 20; i++) ramp[i] = i * 0.37 - 3;
    for (int i = 0; i < 9; i++)
        CHECK(dt_weights_declare(w, list[i].name, list[i].dtype, list[i].shape) == i);
    CHECK(dt_weights_find(w, "half") == 4 && dt_weights_find(w, "x") == -1);
    for (int i = 8; i >= 0; i--) {
        if (list[i].dtype == DT_I32)
            dt_weights_write(w, i, 0, 7, DT_I32, ids);
        else
            dt_weights_write(w, i, 0, list[i].count, DT_F64, i == 6 ? &one : ramp);
    }
    CHECK(dt_weights_close(w) == DT_OK);
    got = dt_file_read(mem, "o", 10000, &got_bytes);
    CHECK_MSG(got && want && got_bytes == want_bytes && memcmp(got, want, want_bytes) == 0,
        "the file differs from the reference library's");
    CHECK(memory_at(&fs, "o.tmp") < 0 && fs.synced > 0);
    if (got) dt_free(mem, DT_MEM_HOST, got, got_bytes + 1);
    if (want) dt_free(ctx, DT_MEM_HOST, want, want_bytes + 1);
    snprintf(path, sizeof path, "%s/files_types.safetensors", golden_folder);
    w = dt_weights_open(ctx, path);
    CHECK(dt_weights_count(w) == 14 &&
          strcmp(dt_weights_metadata(w, "made by"), "the reference library") == 0);
    free_ctx(mem, &fs, &m2, "golden");
    free_ctx(ctx, NULL, &m, "golden");
    memory_clear(&fs);
}

/* Reads all elements as `as`; "" or the error. */
static const char *read_types(const char *name, dt_dtype as, void *out) {
    static char error[600], path[600];
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(NULL, &m);
    snprintf(path, sizeof path, "%s/files_types.safetensors", golden_folder);
    dt_weights *w = dt_weights_open(ctx, path);
    int at = dt_weights_find(w, name);
    const dt_weight *t = dt_weights_get(w, at);
    if (CHECK_MSG(t != NULL, "%s: %s", name, dt_error_text(ctx)))
        dt_weights_read(w, at, 0, t->count, as, out);
    snprintf(error, sizeof error, "%s", dt_error_text(ctx));
    dt_weights_close(w);
    free_ctx(ctx, NULL, &m, name);
    return error;
}

/* Types that only a file has: each becomes the smallest dt_dtype of its values, or another that
   holds them. */
static void test_other_types(void) {
    static const struct {
        const char *name;
        dt_dtype as;
        int64_t value[3]; /* or the error */
        const char *error;
    } cases[] = { { "mask", DT_U8, { 1, 0, 1 }, "" }, { "mask", DT_I64, { 1, 0, 1 }, "" },
        { "mask", DT_F32, { 0 }, "no conversion between BOOL and f32" },
        { "bytes", DT_I32, { 0, 1, 2 }, "" }, { "i8", DT_I32, { -128, 7, 127 }, "" },
        { "i8", DT_U8, { 0 }, "element 0 of 'i8' is -128, which is no u8" },
        { "i16", DT_I64, { -32768, 7, 32767 }, "" },
        { "i16", DT_U8, { 0 }, "element 0 of 'i16' is -32768, which is no u8" },
        { "u16", DT_I32, { 0, 65535, 0 }, "" }, { "u32", DT_I64, { 7, 4294967295, 0 }, "" },
        { "u32", DT_I32, { 0 }, "element 1 of 'u32' is 4294967295, which is no i32" },
        { "u64", DT_I64, { 0 },
            "element 2 of 'u64' is more than 9223372036854775807, which is no i64" },
        { "long", DT_I32, { 0 }, "element 2 of 'long' is 2147483648, which is no i32" },
        { "long", DT_I64, { INT32_MIN, INT32_MAX, 2147483648 }, "" },
        { "w", DT_I32, { 0 }, "no conversion between F32 and i32" },
        { "complex", DT_F32, { 0 }, "no conversion between C64 and f32" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t got[4] = { 0 }, value;
        const char *error = read_types(cases[i].name, cases[i].as, got);
        CHECK_MSG(*cases[i].error ? strstr(error, cases[i].error) != NULL : !*error, "%s as %s: %s",
            cases[i].name, dt_dtype_name(cases[i].as), error);
        for (int k = 0; k < 3 && !*cases[i].error; k++) {
            value = cases[i].as == DT_I64   ? got[k]
                    : cases[i].as == DT_I32 ? ((int32_t *)got)[k]
                                            : ((uint8_t *)got)[k];
            CHECK_MSG(value == cases[i].value[k], "%s: element %d is %lld", cases[i].name, k,
                (long long)value);
        }
    }
    static const char *const floats[] = { "e4m3", "e5m2" };
    for (int f = 0; f < 2; f++) {
        float got[256], want[256];
        double wide[256];
        uint16_t half[256];
        char name[16];
        snprintf(name, sizeof name, "%s.f32", floats[f]);
        CHECK(!*read_types(name, DT_F32, want) && !*read_types(floats[f], DT_F32, got) &&
              !*read_types(floats[f], DT_F64, wide) && !*read_types(floats[f], DT_BF16, half));
        for (int i = 0; i < 256; i++)
            CHECK_MSG(same(got[i], want[i]) && same(wide[i], want[i]) &&
                          same(dt__bf16_to_f32(half[i]), want[i]),
                "%s: bits %d are %g, not %g", floats[f], i, (double)got[i], (double)want[i]);
    }
    memory_fs fs;
    meter m = { 0, 0, 0 };
    char truth[3];
    memset(&fs, 0, sizeof fs);
    put_safetensors(
        &fs, "f", "{\"b\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3);
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_weights *w = dt_weights_open(ctx, "f");
    CHECK(dt_weights_read(w, 0, 0, 3, DT_U8, truth) == DT_ERR_IO &&
          says(ctx, "f: element 2 of 'b' is 2, which is no BOOL"));
    free_ctx(ctx, &fs, &m, "a BOOL");
    memory_clear(&fs);
}

// ==== 5. llm.c models ===========================================================================

static void put_llmc(memory_fs *fs, const char *name, const int32_t head[8], int64_t bytes) {
    unsigned char front[1024] = { 0 };
    memcpy(front, head, 32);
    if (memory_at(fs, name) >= 0) memory_drop(fs, memory_at(fs, name));
    memory_put(fs, name, front, 1024);
    fs->file[memory_at(fs, name)].size = (size_t)bytes; /* bytes after the header read as zeros */
}

static void test_llmc(void) {
    static const struct {
        int32_t head[8];
        int64_t bytes;
        const char *error;
    } cases[] = { /* GPT-2 124M: 124,475,904 values */
        { { 20240326, 3, 1024, 50257, 12, 12, 768, 50304 }, 497904640, "" },
        { { 20240326, 5, 1024, 50257, 12, 12, 768, 50304 }, 248952832, "" },
        { { 20240326, 3, 1024, 50257, 12, 12, 768, 50304 }, 497904639,
            "497904639 bytes, but a model of its sizes has 497904640" },
        { { 20240326, 5, 1024, 50257, 12, 12, 768, 50304 }, 497904640, "has 248952832" },
        { { 20240326, 4, 4, 4, 1, 1, 2, 4 }, 2000, "version 4 (3 and 5 are known)" },
        { { 20240326, 3, 0, 4, 1, 1, 2, 4 }, 2000, "seq 0" },
        { { 20240326, 3, 4, 0, 1, 1, 2, 4 }, 2000, "vocab 0" },
        { { 20240326, 3, 4, 4, 0, 1, 2, 4 }, 2000, "layers 0" },
        { { 20240326, 3, 4, 4, 1, 0, 2, 4 }, 2000, "heads 0" },
        { { 20240326, 3, 4, 4, 1, 1, 0, 4 }, 2000, "width 0" },
        { { 20240326, 3, 4, 4, 1, 2, 3, 4 }, 2000, "heads 2, width 3" },
        { { 20240326, 3, 4, 5, 1, 1, 2, 4 }, 2000, "vocab 5 of 4" },
        { { 20240326, 3, -4, 4, 1, 1, 2, 4 }, 2000, "seq -4" },
        { { 20240326, 3, 4, 4, 2147483647, 1, 1048576, 4 }, 2000,
            "the size of tensor 'qkvw' is no number" },
        { { 20240326, 3, 2147483647, 2147483647, 1, 1, 2147483647, 2147483647 }, 2000,
            "the size of tensor 'wte' is no number" },
        { { 20240326, 3, 4, 4, 1, 1, 2, 4 }, 1023, "neither safetensors" },
        { { 20240803, 3, 4, 4, 1, 1, 2, 4 }, 2000, "neither" }
    };
    memory_fs fs;
    meter m = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_llmc(&fs, "f", cases[i].head, cases[i].bytes);
        char what[32];
        snprintf(what, sizeof what, "case %d", (int)i);
        check_open(&fs, "f", cases[i].error, what);
    }
    put_llmc(&fs, "f", cases[0].head, cases[0].bytes);
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_weights *w = dt_weights_open(ctx, "f");
    const dt_weight *t = dt_weights_get(w, dt_weights_find(w, "qkvw"));
    int64_t values = 0;
    float last[2] = { 1, 1 };
    for (int i = 0; i < dt_weights_count(w); i++) values += dt_weights_get(w, i)->count;
    CHECK(dt_weights_count(w) == 16 && values == 124475904 && t && t->shape.nd == 3 &&
          t->shape.d[0] == 12 && t->shape.d[1] == 2304 && t->shape.d[2] == 768 &&
          dt_weights_llmc(w).vocab == 50257 && dt_weights_llmc(w).seq == 1024);
    CHECK(dt_weights_read(w, 15, 766, 2, DT_F32, last) == DT_OK && last[1] == 0);
    free_ctx(ctx, &fs, &m, "124M");
    memory_clear(&fs);
}

static void test_llmc_write(void) {
    for (int version = 3; version <= 5; version += 2) {
        memory_fs fs;
        meter m = { 0, 0, 0 };
        memset(&fs, 0, sizeof fs);
        dt_ctx *ctx = make_ctx(&fs, &m);
        dt_llmc model = { version, 6, 5, 2, 2, 4, 8 };
        dt_weights *w = dt_weights_create(ctx, "m.bin", (dt_weights_desc){ .llmc = model });
        float v[2048], back[2048];
        CHECK(dt_weights_count(w) == 16 && dt_weights_find(w, "lnfb") == 15);
        for (int i = 0; i < 2048; i++) v[i] = (float)(i % 251);
        for (int i = 15; i >= 0; i--)
            dt_weights_write(w, i, 0, i ? dt_weights_get(w, i)->count : 5 * 4, DT_F32, v + i);
        CHECK_MSG(dt_weights_close(w) == DT_OK, "%s", dt_error_text(ctx));
        int at = memory_at(&fs, "m.bin");
        CHECK(at >= 0 && fs.file[at].size == 1024 + (size_t)(version == 3 ? 4 : 2) *
                                                        (32 + 24 + 4 * 8 + 2 * (48 + 12 + 16 + 4) +
                                                            2 * (64 + 16 + 64 + 4) + 8));
        int32_t head[9];
        memcpy(head, fs.file[at].data, sizeof head);
        CHECK(head[0] == 20240326 && head[1] == version && head[2] == 6 && head[3] == 5 &&
              head[4] == 2 && head[5] == 2 && head[6] == 4 && head[7] == 8 && head[8] == 0);
        w = dt_weights_open(ctx, "m.bin");
        for (int i = 0; i < 16; i++) {
            int64_t n = dt_weights_get(w, i)->count, good = 0;
            CHECK(dt_weights_read(w, i, 0, n, DT_F32, back) == DT_OK);
            for (int64_t k = 0; k < n; k++) good += back[k] == (i == 0 && k >= 20 ? 0 : v[i + k]);
            CHECK_MSG(good == n, "tensor %d of version %d: %d of %d values are right", i, version,
                (int)good, (int)n);
        }
        CHECK(dt_weights_llmc(w).padded_vocab == 8 && dt_weights_llmc(w).version == version);
        dt_weights_close(w);
        model.heads = 3;
        CHECK(dt_weights_create(ctx, "x", (dt_weights_desc){ .llmc = model }) == NULL &&
              dt_error(ctx) == DT_ERR_ARG);
        free_ctx(ctx, &fs, &m, "llm.c");
        memory_clear(&fs);
    }
}

// ==== 6. Sharded parameters =====================================================================

enum { FD0 = 3, FD1 = 4, FD2 = 5, FULL = FD0 * FD1 * FD2 };

/* How a file stores a parameter of shape (3,4,5) whose element (a,b,c) is 20a + 5b + c. */
typedef struct layout {
    const char *shapes[2], *types[2]; /* shapes and types of the file's tensors t0 and t1 */
    int64_t columns;
    int n;
    dt_weight_part part[3];
} layout;

static const layout layouts[] = { { { "[3,4,5]", NULL }, { "F32", NULL }, 0, 1,
                                      { { .name = "t0", .file_rows = 12, .file_columns = 5 } } },
    { { "[12,5]", NULL }, { "F64", NULL }, 0, 1, { { .name = "t0" } } },
    { { "[5,12]", NULL }, { "BF16", NULL }, 0, 1, { { .name = "t0", .transposed = 1 } } },
    { { "[60]", NULL }, { "F16", NULL }, 60, 1, { { .name = "t0" } } },
    { { "[2,70]", NULL }, { "F32", NULL }, 60, 1,
        { { .name = "t0", .file_rows = 2, .file_columns = 70, .row = 1, .column = 7 } } },
    { { "[15,9]", NULL }, { "F32", NULL }, 0, 1,
        { { .name = "t0", .file_rows = 15, .file_columns = 9, .row = 2, .column = 3 } } },
    { { "[9,20]", NULL }, { "F64", NULL }, 0, 1,
        { { .name = "t0",
            .file_rows = 9,
            .file_columns = 20,
            .row = 3,
            .column = 6,
            .transposed = 1 } } },
    { { "[5,5]", "[7,5]" }, { "F32", "BF16" }, 0, 2,
        { { .name = "t0", .rows = 5 }, { .name = "t1" } } },
    { { "[5,7]", "[2,6,5]" }, { "F32", "F64" }, 0, 3,
        { { .name = "t0", .rows = 7, .transposed = 1 },
            { .name = "t1", .rows = 2, .file_rows = 12, .row = 9 },
            { .name = "t1", .rows = 3, .file_rows = 12, .row = 2 } } },
    { { "[60]", NULL }, { "F32", NULL }, 20, 3,
        { { .name = "t0", .rows = 1, .file_rows = 1, .file_columns = 60, .column = 40 },
            { .name = "t0", .rows = 1, .file_rows = 1, .file_columns = 60 },
            { .name = "t0", .rows = 1, .file_rows = 1, .file_columns = 60, .column = 20 } } },
    { { "[14,8]", NULL }, { "F32", NULL }, 0, 1,
        { { .name = "t0", .file_rows = 14, .file_columns = 8, .row = 1 } } },
    { { "[15,9]", "[4,15]" }, { "F32", "F32" }, 0, 1,
        { { .name = "t0", .file_rows = 15, .file_columns = 9 } } } };
enum {
    LAYOUTS = sizeof layouts / sizeof *layouts - 1
}; /* the last entry is for test_load_refused */

static dt_dtype type_of(const char *type) {
    return strcmp(type, "F64") == 0   ? DT_F64
           : strcmp(type, "F32") == 0 ? DT_F32
           : strcmp(type, "F16") == 0 ? DT_F16
                                      : DT_BF16;
}

/* The parameter's value at one element of a file's tensor; -1 if no part covers the element. */
static int file_value(const layout *l, int tensor, int64_t element, int64_t file_columns) {
    int64_t first = 0, columns = l->columns ? l->columns : FD2;
    for (int i = 0; i < l->n; i++) {
        const dt_weight_part *p = &l->part[i];
        int64_t rows = p->rows ? p->rows : FULL / columns - first;
        int64_t y = element / file_columns - p->row, x = element % file_columns - p->column;
        int64_t row = p->transposed ? x : y, column = p->transposed ? y : x;
        if (p->name[1] - '0' == tensor && row >= 0 && row < rows && column >= 0 && column < columns)
            return (int)((first + row) * columns + column);
        first += rows;
    }
    return -1;
}

static void put_layout(memory_fs *fs, const layout *l) {
    char header[512];
    char data[4000];
    size_t at = 0;
    int n = snprintf(header, sizeof header, "{");
    for (int t = 0; t < 2 && l->shapes[t]; t++) {
        int64_t count = 1, last = 1;
        for (const char *s = l->shapes[t]; *s; s++)
            if (*s >= '0' && *s <= '9' && !(s[-1] >= '0' && s[-1] <= '9'))
                count *= last = strtol(s, NULL, 10);
        dt_dtype dtype = type_of(l->types[t]);
        size_t begin = at;
        for (int64_t i = 0; i < count; i++) {
            double v = file_value(l, t, i, last);
            dt__convert(dtype, data + at, DT_F64, &v, 1);
            at += dt_dtype_size(dtype);
        }
        n += snprintf(header + n, sizeof header - (size_t)n,
            "%s\"t%d\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%d,%d]}", t ? "," : "", t,
            l->types[t], l->shapes[t], (int)begin, (int)at);
    }
    snprintf(header + n, sizeof header - (size_t)n, "}");
    put_safetensors(fs, "f", header, at);
    memory_file *f = &fs->file[memory_at(fs, "f")];
    memcpy(f->data + f->size - at, data, at);
}

/* Sizes of up to three groups, and the dimension that each shards. Size 0 ends the list. */
static const struct {
    int size[3], dim[3];
} shardings[] = { { { 0, 0, 0 }, { 0, 0, 0 } }, { { 3, 0, 0 }, { 0, 0, 0 } },
    { { 2, 0, 0 }, { 0, 0, 0 } }, { { 5, 0, 0 }, { 0, 0, 0 } }, { { 2, 0, 0 }, { 1, 0, 0 } },
    { { 3, 0, 0 }, { 1, 0, 0 } }, { { 2, 0, 0 }, { 2, 0, 0 } }, { { 5, 0, 0 }, { 2, 0, 0 } },
    { { 7, 0, 0 }, { 2, 0, 0 } }, { { 2, 2, 0 }, { 0, 2, 0 } }, { { 2, 3, 2 }, { 0, 1, 2 } },
    { { 2, 2, 0 }, { 1, 1, 0 } }, { { 3, 2, 0 }, { 2, 2, 0 } } };

/* Loads the parameter on every rank of a sharding and compares each local element. */
static void check_sharded_load(const layout *l, int which, int sharding, dt_dtype dtype) {
    const int *size = shardings[sharding].size, *dim = shardings[sharding].dim;
    int ranks = (size[0] ? size[0] : 1) * (size[1] ? size[1] : 1) * (size[2] ? size[2] : 1),
        seen = 0;
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    put_layout(&fs, l);
    for (int rank = 0; rank < ranks; rank++) {
        meter m = { 0, 0, 0 };
        dt_group group[3] = { { 0 } };
        dt_param_desc desc;
        int left = rank, ok = 1;
        memset(&desc, 0, sizeof desc);
        desc.dtype = dtype;
        for (int c = 0; c < 3 && size[c]; c++) {
            group[c].size = size[c];
            group[c].rank = left % size[c];
            left /= size[c];
            desc.shards[c].comm = (dt_comm *)&group[c];
            desc.shards[c].dim = dim[c];
        }
        dt_ctx *ctx = make_ctx(&fs, &m);
        dt_tensor *p = dt_param_at(ctx, "p", DT_SHAPE(FD0, FD1, FD2), DT_ONES, desc);
        dt_weights *w = dt_weights_open(ctx, "f");
        CHECK_MSG(dt_weights_load(w, p, l->columns, l->part, l->n) == DT_OK, "layout %d: %s", which,
            dt_error_text(ctx));
        const dt_local_slice *slice = &p->param->slice;
        for (int64_t i = 0; i < dt_count(p->shape) && dt_error(ctx) == DT_OK; i++) {
            int64_t at[3] = { i / (slice->n[1] * slice->n[2]), i / slice->n[2] % slice->n[1],
                i % slice->n[2] },
                    g = 0, in = 1;
            for (int d = 0; d < 3; d++) {
                in &= at[d] < slice->inside[d];
                g = g * p->param->full.d[d] + slice->lo[d] + at[d];
            }
            double v = dtype == DT_F64 ? ((double *)p->data)[i] : (double)((float *)p->data)[i];
            ok &= v == (in ? (double)g : 0);
            seen += in != 0;
        }
        CHECK_MSG(ok, "layout %d, sharding %d, rank %d of %d: wrong values", which, sharding, rank,
            ranks);
        free_ctx(ctx, &fs, &m, "sharded");
    }
    CHECK_MSG(seen == FULL, "sharding %d: the ranks hold %d elements", sharding, seen);
    memory_clear(&fs);
}

/* Saves the unsharded parameter in the same layout and reads the same values again. If the parts do
   not fill the file's tensors, closing it fails. */
static void check_save(const layout *l, int which) {
    memory_fs fs;
    meter m = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    put_layout(&fs, l);
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_param_desc desc;
    memset(&desc, 0, sizeof desc);
    dt_tensor *p = dt_param_at(ctx, "p", DT_SHAPE(FD0, FD1, FD2), DT_ONES, desc);
    dt_weights *in = dt_weights_open(ctx, "f"),
               *out = dt_weights_create(ctx, "o", (dt_weights_desc){ 0 });
    dt_weights_load(in, p, l->columns, l->part, l->n);
    int64_t total = 0;
    for (int i = 0; i < dt_weights_count(in); i++) {
        dt_weights_declare(out, dt_weights_get(in, i)->name, dt_weights_get(in, i)->dtype,
            dt_weights_get(in, i)->shape);
        total += dt_weights_get(in, i)->count;
    }
    CHECK_MSG(dt_weights_save(out, p, l->columns, l->part, l->n) == DT_OK, "layout %d: %s", which,
        dt_error_text(ctx));
    if (total == FULL) {
        CHECK_MSG(dt_weights_close(out) == DT_OK, "layout %d: %s", which, dt_error_text(ctx));
        out = dt_weights_open(ctx, "o");
        for (int i = 0; i < dt_weights_count(in); i++) {
            double a[100], b[100];
            dt_weights_read(in, i, 0, dt_weights_get(in, i)->count, DT_F64, a);
            dt_weights_read(out, dt_weights_find(out, dt_weights_get(in, i)->name), 0,
                dt_weights_get(in, i)->count, DT_F64, b);
            CHECK_MSG(memcmp(a, b, (size_t)dt_weights_get(in, i)->count * 8) == 0,
                "layout %d: the saved values differ", which);
        }
    } else {
        CHECK(dt_weights_close(out) == DT_ERR_ARG && says(ctx, "tensor 't") && says(ctx, "of its"));
        CHECK(memory_at(&fs, "o") < 0 && memory_at(&fs, "o.tmp") < 0);
    }
    free_ctx(ctx, &fs, &m, "save");
    memory_clear(&fs);
}

/* Transposed parameters with more columns, and with more rows, than a tile. */
static void test_tiles(void) {
    static const int64_t sizes[2][2] = { { 150, 9000 }, { 5000, 300 } };
    for (int s = 0; s < 2; s++) {
        int64_t R = sizes[s][0], C = sizes[s][1];
        memory_fs fs;
        meter m = { 0, 0, 0 };
        char header[200];
        memset(&fs, 0, sizeof fs);
        snprintf(header, sizeof header,
            "{\"t\":{\"dtype\":\"F32\",\"shape\":[%d,%d],\"data_offsets\":[0,%d]}}", (int)C, (int)R,
            (int)(4 * R * C));
        put_safetensors(&fs, "f", header, (size_t)(4 * R * C));
        for (int64_t i = 0; i < R * C; i++) {
            float v = (float)i;
            memcpy(fs.file[0].data + 8 + strlen(header) + 4 * i, &v, 4);
        }
        for (int dim = 0; dim < 2; dim++) {
            dt_group group = { .rank = 1, .size = 2 };
            dt_param_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.shards[0].comm = (dt_comm *)&group;
            desc.shards[0].dim = dim;
            desc.dtype = DT_F64;
            dt_ctx *ctx = make_ctx(&fs, &m);
            dt_tensor *p = dt_param_at(ctx, "p", DT_SHAPE(R, C), DT_ZEROS, desc);
            dt_weights *w = dt_weights_open(ctx, "f");
            dt_weight_part part = { .name = "t", .transposed = 1 };
            CHECK(dt_weights_load(w, p, 0, &part, 1) == DT_OK);
            int64_t wrong = 0, rows = p->shape.d[0], columns = p->shape.d[1];
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < columns; c++)
                    wrong += ((double *)p->data)[r * columns + c] !=
                             (double)((c + (dim ? C / 2 : 0)) * R + r + (dim ? 0 : R / 2));
            CHECK_MSG(wrong == 0, "%d values of (%d,%d) sharded along %d are wrong", (int)wrong,
                (int)R, (int)C, dim);
            free_ctx(ctx, &fs, &m, "tiles");
        }
        memory_clear(&fs);
    }
}

static void test_load_refused(void) {
    static const struct {
        dt_weight_part part[2];
        int64_t columns;
        int n;
        dt_status status;
        const char *error;
    } cases[] = { { { { .name = "q" } }, 0, 1, DT_ERR_IO,
                      "dt_weights_load(p): f has no tensor 'q'" },
        { { { .name = "t0" } }, 0, 1, DT_ERR_SHAPE,
            "(3,4,5) needs 't0' of (12,5), but f has (15,9)" },
        { { { .name = "t0", .transposed = 1 } }, 0, 1, DT_ERR_SHAPE,
            "needs transposed 't0' of (5,12), but f has (15,9)" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9, .row = 4 } }, 0, 1, DT_ERR_ARG,
            "at (4,0) of (15,9)" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9, .column = 5 } }, 0, 1, DT_ERR_ARG,
            "at (0,5) of (15,9)" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9, .row = -1 } }, 0, 1, DT_ERR_ARG,
            "at (-1,0)" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9, .rows = 13 } }, 0, 1, DT_ERR_ARG,
            "13 of 12 rows of 5" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9, .rows = 7 } }, 0, 1, DT_ERR_ARG,
            "the parts are 7 of 12 rows" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9 } }, 7, 1, DT_ERR_ARG,
            "(3,4,5) has no 7 columns" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 15, .transposed = 1 } }, 4, 1,
            DT_ERR_SHAPE, "needs transposed 't0' of (15,15)" },
        { { { .name = "t0", .file_rows = 15, .file_columns = 9 }, { .name = "t0" } }, 0, 2,
            DT_ERR_ARG, "0 of 0 rows" },
        { { { .name = "t1", .transposed = 1 } }, 4, 1, DT_ERR_ARG,
            "transposed, its columns are its last dimension" },
        { { { .name = NULL } }, 0, 1, DT_ERR_IO, "no tensor ''" },
        { { { .name = "t0" } }, 0, 0, DT_ERR_ARG, "the parts are 0 of 12" } };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    put_layout(&fs, &layouts[LAYOUTS]);
    for (size_t i = 0; i < sizeof cases / sizeof *cases + 4; i++) {
        meter m = { 0, 0, 0 };
        dt_ctx *ctx = make_ctx(&fs, &m);
        dt_group group = { .rank = 0, .size = 2 };
        dt_param_desc desc;
        memset(&desc, 0, sizeof desc);
        size_t special = sizeof cases / sizeof *cases;
        if (i == special) desc.shards[0].comm = (dt_comm *)&group;
        dt_tensor *p = dt_param_at(ctx, "p", DT_SHAPE(FD0, FD1, FD2), DT_ONES, desc);
        dt_weights *w = i == special || i == special + 1
                            ? dt_weights_create(ctx, "o", (dt_weights_desc){ 0 })
                            : dt_weights_open(ctx, "f");
        if (i < special) {
            CHECK_MSG(dt_weights_load(w, p, cases[i].columns, cases[i].part, cases[i].n) ==
                          cases[i].status,
                "case %d", (int)i);
            CHECK_MSG(says(ctx, cases[i].error), "case %d: '%s', not '%s'", (int)i,
                dt_error_text(ctx), cases[i].error);
        } else if (i == special) {
            dt_weights_declare(w, "t0", DT_F32, DT_SHAPE(12, 5));
            CHECK(dt_weights_save(w, p, 0, cases[0].part, 1) == DT_ERR_UNSUPPORTED &&
                  says(ctx, "it is sharded, (2,4,5) of (3,4,5)"));
        } else if (i == special + 1) {
            CHECK(dt_weights_load(w, p, 0, cases[0].part, 1) == DT_ERR_ARG &&
                  says(ctx, "a file open for reading"));
        } else if (i == special + 2) {
            CHECK(dt_weights_save(w, p, 0, cases[0].part, 1) == DT_ERR_ARG &&
                  says(ctx, "a file open for writing"));
        } else {
            CHECK(dt_weights_load(NULL, p, 0, NULL, 0) == DT_ERR_ARG &&
                  dt_weights_load(w, NULL, 0, NULL, 0) == DT_ERR_ARG);
            CHECK(dt_weights_load(w, dt_input(ctx, DT_F32, DT_SHAPE(1), NULL), 0, cases[0].part,
                      1) == DT_ERR_ARG);
        }
        free_ctx(ctx, &fs, &m, "refused");
    }
    memory_clear(&fs);
}

// ==== 7. Writing ================================================================================

/* Writes three tensors, to several files if shard_bytes is not 0. The values depend on `version`,
   0 or 1. */
static dt_status write_some(dt_ctx *ctx, const char *path, int64_t shard_bytes, int version) {
    dt_weights *w = dt_weights_create(ctx, path, (dt_weights_desc){ .shard_bytes = shard_bytes });
    float v[50];
    for (int i = 0; i < 50; i++) v[i] = (float)(i + 100 * version);
    int a = dt_weights_declare(w, "a", DT_F32, DT_SHAPE(5, 10)),
        b = dt_weights_declare(w, "b", DT_F16, DT_SHAPE(20));
    int c = dt_weights_declare(w, "c", DT_F64, DT_SHAPE(6));
    dt_weights_write(w, b, 10, 10, DT_F32, v + 10);
    dt_weights_write(w, a, 0, 50, DT_F32, v);
    dt_weights_write(w, b, 0, 10, DT_F32, v);
    dt_weights_write(w, c, 0, 6, DT_F32, v);
    dt_weights_close(w);
    return dt_error(ctx);
}

/* The version, 0 or 1, of write_some's file at the path; -1: it cannot be read, -2: values of both
   versions or of neither. */
static int version_of(memory_fs *fs, const char *path) {
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(fs, &m);
    dt_weights *w = dt_weights_open(ctx, path);
    float v[50];
    int version = -1;
    for (int t = 0; t < 3 && w; t++) {
        static const char *const names[] = { "a", "b", "c" };
        int at = dt_weights_find(w, names[t]);
        int n = at < 0 ? 0 : (int)dt_weights_get(w, at)->count;
        if (dt_weights_read(w, at, 0, n, DT_F32, v) != DT_OK) break;
        for (int i = 0; i < n; i++) {
            int now = v[i] == (float)i ? 0 : v[i] == (float)(i + 100) ? 1 : -2;
            version = version == -1 || version == now ? now : -2;
        }
    }
    free_ctx(ctx, fs, &m, "version");
    return version;
}

static void test_write(void) {
    memory_fs fs;
    meter m = { 0, 0, 0 };
    memset(&fs, 0, sizeof fs);
    dt_ctx *ctx = make_ctx(&fs, &m);
    fs.most = 7;
    fs.interrupt = 5;
    CHECK(write_some(ctx, "d/model.safetensors", 0, 0) == DT_OK && fs.synced > 0 &&
          version_of(&fs, "d") == 0);
    CHECK(write_some(ctx, "d/model.safetensors", 288, 1) == DT_OK &&
          memory_at(&fs, "d/model.safetensors.index.json") < 0);
    CHECK(write_some(ctx, "d/model.safetensors", 240, 0) == DT_OK && fs.synced > 0 &&
          version_of(&fs, "d") == 0);
    CHECK(memory_at(&fs, "d/model-00001-of-00002.safetensors") >= 0 &&
          memory_at(&fs, "d/model-00002-of-00002.safetensors") >= 0 &&
          memory_at(&fs, "d/model.safetensors") < 0);
    int index = memory_at(&fs, "d/model.safetensors.index.json");
    if (CHECK(index >= 0)) {
        static const char want[] = "{\"metadata\":{\"total_size\":288},\"weight_map\":{"
                                   "\"a\":\"model-00001-of-00002.safetensors\","
                                   "\"b\":\"model-00001-of-00002.safetensors\",\"c\":\"model-00002-"
                                   "of-00002.safetensors\"}}";
        CHECK(fs.file[index].size == sizeof want - 1 &&
              memcmp(fs.file[index].data, want, sizeof want - 1) == 0);
    }
    CHECK(write_some(ctx, "m.safetensors", 10, 1) == DT_OK &&
          version_of(&fs, "m.safetensors.index.json") == 1);
    CHECK(memory_at(&fs, "m-00003-of-00003.safetensors") >= 0);
    fs.most = 0;
    fs.interrupt = 0;
    dt_weights *w =
        dt_weights_create(ctx, "e", (dt_weights_desc){ 0 }); /* a file without tensors */
    CHECK(dt_weights_close(w) == DT_OK && dt_weights_close(NULL) == DT_OK &&
          *open_error(&fs, "e") == 0);
    CHECK(dt_file_write(ctx, "config.json", "{}\n", 3) == DT_OK &&
          dt_file_write(ctx, "config.json", "", 0) == DT_OK);
    size_t bytes = 9;
    char *text = dt_file_read(ctx, "config.json", 0, &bytes);
    CHECK(text && bytes == 0 && *text == 0);
    dt_free(ctx, DT_MEM_HOST, text, 1);
    dt_weights_create(ctx, "left open", (dt_weights_desc){ 0 });
    free_ctx(ctx, &fs, &m, "write");
    CHECK(memory_at(&fs, "left open") < 0 && memory_at(&fs, "left open.tmp") < 0);
    for (int i = 0; i < MEMORY_FILES; i++)
        CHECK(!fs.file[i].used || !strstr(fs.file[i].name, ".tmp"));
    memory_clear(&fs);
}

static void test_write_refused(void) {
    static const char *const errors[] = { "a' is there twice", "written twice",
        "tensor 'a' has 1 of its 2 elements",
        "'__metadata__' of type f32 and shape (1): the name is taken",
        "elements have been written already", "there is no such type",
        "elements 1..3 of 2 (2 from 1 on)", "is no number", "no conversion between F32 and i32",
        "tensor 3 of 1", "need a name ending in .safetensors", "open for writing",
        "'\\x01(\\xff' of type f32 and shape (2): the name is not UTF-8", "shards of -1 bytes",
        "shape (3,-2): a dimension is negative", "a tensor needs a name",
        "dt_weights_save('a'): the parameter is NULL",
        "dt_weights_create(f): it is being written already" };
    for (int k = 0; k < 18; k++) {
        memory_fs fs;
        meter m = { 0, 0, 0 };
        memset(&fs, 0, sizeof fs);
        memory_put(&fs, "f", "old", 3);
        dt_ctx *ctx = make_ctx(&fs, &m);
        dt_weights *w = dt_weights_create(ctx, k == 13 ? "x.safetensors" : "f",
            (dt_weights_desc){ .shard_bytes = k == 10   ? 5
                                              : k == 13 ? -1
                                                        : 0 });
        float v[2] = { 1, 2 };
        int a = k == 10 || k == 13 ? -1 : dt_weights_declare(w, "a", DT_F32, DT_SHAPE(2));
        if (k == 0) dt_weights_declare(w, "a", DT_F32, DT_SHAPE(1));
        if (k == 1) dt_weights_write(w, a, 0, 2, DT_F32, v);
        if (k == 1 || k == 2 || k == 4) dt_weights_write(w, a, 1, 1, DT_F32, v);
        if (k == 3) dt_weights_declare(w, "__metadata__", DT_F32, DT_SHAPE(1));
        if (k == 4) dt_weights_declare(w, "b", DT_F32, DT_SHAPE(1));
        if (k == 5) dt_weights_declare(w, "b", (dt_dtype)77, DT_SHAPE(1));
        if (k == 6) dt_weights_write(w, a, 1, 2, DT_F32, v);
        for (int i = 0; i < 20 && k == 7; i++)
            dt_weights_declare(w, i % 2 ? "p" : "q", DT_F32, DT_SHAPE(INT64_MAX / 16));
        if (k == 7) { /* distinct names, so that their total size is what fails */
            free_ctx(ctx, &fs, &m, "twice");
            ctx = make_ctx(&fs, &m);
            w = dt_weights_create(ctx, "f", (dt_weights_desc){ 0 });
            for (char name[2] = "a"; *name < 'h'; ++*name)
                dt_weights_declare(w, name, DT_F64, DT_SHAPE(INT64_MAX / 16));
        }
        if (k == 8) dt_weights_write(w, a, 0, 2, DT_I32, v);
        if (k == 9) dt_weights_write(w, 3, 0, 2, DT_F32, v);
        if (k == 11) dt_weights_read(w, a, 0, 2, DT_F32, v);
        if (k == 12) dt_weights_declare(w, "\x01(\xff", DT_F32, DT_SHAPE(2));
        if (k == 14) dt_weights_declare(w, "b", DT_F32, DT_SHAPE(3, -2));
        if (k == 15) dt_weights_declare(w, NULL, DT_F32, DT_SHAPE(3));
        dt_weight_part part = { .name = "a" };
        if (k == 16) CHECK(dt_weights_save(w, NULL, 0, &part, 1) == DT_ERR_ARG);
        if (k == 17) CHECK(dt_weights_create(ctx, "f", (dt_weights_desc){ 0 }) == NULL);
        CHECK(k == 10 || k == 13 || dt_weights_close(w) != DT_OK);
        CHECK_MSG(says(ctx, errors[k]), "case %d: %s", k, dt_error_text(ctx));
        CHECK(dt_weights_declare(w = NULL, "b", DT_F32, DT_SHAPE(1)) == -1 &&
              dt_weights_write(w, 0, 0, 0, DT_F32, v) == DT_ERR_ARG);
        free_ctx(ctx, &fs, &m, "refused");
        CHECK_MSG(memory_at(&fs, "f") >= 0 && fs.file[memory_at(&fs, "f")].size == 3 &&
                      memory_at(&fs, "f.tmp") < 0,
            "case %d", k);
        memory_clear(&fs);
    }
}

/* A NULL path or name; a tensor of 7 dimensions beside a readable one; two ranks that write the
   same file at the same time. */
/* ---- dt_weights_load_all ---- */

/* The file has the prefix "model." before most names. */
static int with_prefix(void *user, const char *name, char *out, size_t size) {
    (void)user;
    if (strcmp(name, "own") == 0) return 0;
    snprintf(out, size, "model.%s", name);
    return 1;
}

static dt_tensor *half_of(dt_ctx *ctx, dt_group *group, const char *name, dt_shape full, int dim) {
    dt_param_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.shards[0].comm = (dt_comm *)group;
    desc.shards[0].dim = dim;
    return dt_param_at(ctx, name, full, DT_ONES, desc);
}

static void test_load_all(void) {
    memory_fs fs;
    meter m = { 0, 0, 0 };
    float values[12];
    memset(&fs, 0, sizeof fs);
    for (int i = 0; i < 12; i++) values[i] = (float)i;
    dt_ctx *ctx = make_ctx(&fs, &m);
    dt_weights *w = dt_weights_create(ctx, "f", (dt_weights_desc){ 0 });
    dt_weights_write(
        w, dt_weights_declare(w, "model.a", DT_F32, DT_SHAPE(12)), 0, 12, DT_F32, values);
    CHECK(dt_weights_close(w) == DT_OK);
    w = dt_weights_create(ctx, "g", (dt_weights_desc){ 0 });
    int a = dt_weights_declare(w, "model.a", DT_F32, DT_SHAPE(2, 6)),
        b = dt_weights_declare(w, "model.b", DT_BF16, DT_SHAPE(3, 1)),
        c = dt_weights_declare(w, "model.c", DT_I32, DT_SHAPE(2)),
        d = dt_weights_declare(w, "extra", DT_F32, DT_SHAPE(1));
    int32_t numbers[2] = { 1, 2 };
    dt_weights_write(w, a, 0, 12, DT_F32, values);
    dt_weights_write(w, b, 0, 3, DT_F32, values + 3);
    dt_weights_write(w, c, 0, 2, DT_I32, numbers);
    dt_weights_write(w, d, 0, 1, DT_F32, values);
    CHECK_MSG(dt_weights_close(w) == DT_OK, "%s", dt_error_text(ctx));
    free_ctx(ctx, &fs, &m, "load all: writing");
    for (int dim = 0; dim < 2; dim++) /* the file's (12) is (3,4), and rank 1 of 2 has a half */
        for (int partial = 0; partial < 2; partial++) {
            dt_group group;
            dt_load_report r;
            dt_load_desc desc = { with_prefix, NULL, partial };
            memset(&group, 0, sizeof group);
            group.size = 2, group.rank = 1;
            ctx = make_ctx(&fs, &m);
            dt_tensor *p = half_of(ctx, &group, "a", DT_SHAPE(3, 4), dim);
            dt_tensor *own = dt_param(ctx, "own", DT_SHAPE(2), DT_ONES);
            if (partial) { /* "g" has more, and other shapes */
                dt_param(ctx, "b", DT_SHAPE(4), DT_ONES);
                dt_param(ctx, "c", DT_SHAPE(2), DT_ONES);
                dt_param(ctx, "d", DT_SHAPE(2), DT_ONES);
            }
            w = dt_weights_open(ctx, partial ? "g" : "f");
            CHECK_MSG(dt_weights_load_all(w, desc, &r) == DT_OK, "%s", dt_error_text(ctx));
            CHECK(r.loaded == 1 && r.missing == partial && r.mismatched == 2 * partial &&
                  r.unexpected == partial);
            CHECK_MSG(
                strcmp(r.text,
                    !partial ? ""
                             : "1 missing: model.d; 2 mismatched: b (4) is BF16 (3,1) in the "
                               "file, c (2) is I32 (2) in the file; 1 unexpected: extra") == 0,
                "%s", r.text);
            const float *x = (const float *)p->data;
            CHECK(dim == 0 ? x[0] == 8 && x[3] == 11 && x[4] == 0
                           : x[0] == 2 && x[1] == 3 && x[2] == 6 && x[5] == 11);
            CHECK(((const float *)own->data)[1] == 1);
            desc.partial = 0;
            if (partial)
                CHECK(dt_weights_load_all(w, desc, NULL) == DT_ERR_SHAPE &&
                      says(ctx, "dt_weights_load_all(g): 1 missing: model.d; 2 mismatched: "));
            free_ctx(ctx, &fs, &m, "load all");
        }
    CHECK(dt_weights_load_all(NULL, (dt_load_desc){ 0 }, NULL) == DT_ERR_ARG);
    memory_clear(&fs);
}

static void test_corner_uses(void) {
    static const char both[] =
        "{\"deep\":{\"dtype\":\"F32\",\"shape\":[1,1,2,1,1,1,1],\"data_offsets\":[4,12]},"
        "\"flat\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    memory_fs fs;
    meter m[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
    float f[2] = { 1, 2 };
    memset(&fs, 0, sizeof fs);
    put_safetensors(&fs, "f", both, 12);
    for (int k = 0; k < 4; k++) {
        static const char *const errors[] = { "dt_weights_create: the path is NULL",
            "dt_weights_open: the path is NULL",
            "dt_weights_read(deep): it has more than 6 dimensions",
            "dt_weights_load('flat'): the parameter is NULL" };
        dt_ctx *ctx = make_ctx(&fs, &m[0]);
        dt_weights *w = dt_weights_open(ctx, "f");
        dt_weight_part part = { .name = "flat" };
        int at = dt_weights_find(w, "deep");
        CHECK(dt_weights_find(w, NULL) == -1 && dt_param_find(ctx, NULL) == NULL && at >= 0);
        CHECK(at >= 0 && !dt_weights_get(w, at)->readable && dt_weights_get(w, at)->count == 2 &&
              dt_weights_get(w, at)->shape.nd == 1 && dt_weights_get(w, at)->shape.d[0] == 2);
        CHECK(dt_weights_read(w, dt_weights_find(w, "flat"), 0, 1, DT_F32, f) == DT_OK);
        if (k == 0) CHECK(dt_weights_create(ctx, NULL, (dt_weights_desc){ 0 }) == NULL);
        if (k == 1) CHECK(dt_weights_open(ctx, NULL) == NULL);
        if (k == 2) CHECK(dt_weights_read(w, at, 0, 2, DT_F32, f) == DT_ERR_UNSUPPORTED);
        if (k == 3) CHECK(dt_weights_load(w, NULL, 0, &part, 1) == DT_ERR_ARG);
        CHECK_MSG(says(ctx, errors[k]), "case %d: %s", k, dt_error_text(ctx));
        free_ctx(ctx, &fs, &m[0], "corner");
    }
    dt_ctx *ctx[2];
    dt_weights *w[2];
    for (int rank = 0; rank < 2; rank++) {
        ctx[rank] = make_ctx(&fs, &m[rank]);
        ctx[rank]->rank = rank;
        w[rank] = dt_weights_create(ctx[rank], "o", (dt_weights_desc){ 0 });
        dt_weights_declare(w[rank], "a", DT_F32, DT_SHAPE(2));
        f[0] = (float)rank;
        CHECK(dt_weights_write(w[rank], 0, 0, 2, DT_F32, f) == DT_OK);
    }
    for (int rank = 0; rank < 2;
         rank++) { /* each close leaves a complete file; the last one stays */
        CHECK_MSG(dt_weights_close(w[rank]) == DT_OK, "%s", dt_error_text(ctx[rank]));
        w[rank] = dt_weights_open(ctx[rank], "o");
        CHECK(dt_weights_read(w[rank], 0, 0, 2, DT_F32, f) == DT_OK && f[0] == (float)rank);
        dt_weights_close(w[rank]);
    }
    for (int rank = 0; rank < 2; rank++) free_ctx(ctx[rank], &fs, &m[rank], "two writers");
    memory_clear(&fs);
}

// ==== 8. Every io call and every allocation fails once ==========================================

enum { F_SINGLE, F_SHARDS, F_TEXT, F_OPEN, F_INDEX, F_LOAD, F_SAVE, F_TOKENS, F_KINDS };

static dt_status run_operation(dt_ctx *ctx, int kind) {
    static const char *const shards[2] = { "t1", "t2" };
    dt_weights *w = NULL;
    float v[50];
    int32_t ids[4], labels[4];
    dt_tensor *p = NULL;
    switch (kind) {
    case F_SINGLE: return write_some(ctx, "model.safetensors", 0, 1);
    case F_SHARDS: return write_some(ctx, "d/model.safetensors", 240, 1);
    case F_TEXT: return dt_file_write(ctx, "config.json", "new", 3);
    case F_OPEN:
    case F_INDEX:
        w = dt_weights_open(ctx, kind == F_OPEN ? "one.safetensors" : "old");
        dt_weights_read(w, dt_weights_find(w, "a"), 0, 50, DT_F32, v);
        dt_weights_read(w, dt_weights_find(w, "c"), 0, 6, DT_F32, v);
        dt_weights_close(w);
        return dt_error(ctx);
    case F_LOAD:
    case F_SAVE:
        p = dt_param(ctx, "p", DT_SHAPE(10, 5), DT_ONES);
        w = kind == F_LOAD ? dt_weights_open(ctx, "one.safetensors")
                           : dt_weights_create(ctx, "model.safetensors", (dt_weights_desc){ 0 });
        if (kind == F_SAVE) dt_weights_declare(w, "a", DT_BF16, DT_SHAPE(5, 10));
        dt_weight_part part = { .name = "a", .transposed = 1 };
        if (kind == F_LOAD)
            dt_weights_load(w, p, 0, &part, 1);
        else
            dt_weights_save(w, p, 0, &part, 1);
        dt_weights_close(w);
        return dt_error(ctx);
    default: {
        dt_text *t = dt_text_open(ctx, shards, 2, 4);
        for (int i = 0; i < 2; i++) dt_text_read(t, i, ids, labels);
        dt_text_close(t);
        return dt_error(ctx);
    }
    }
}

static void put_tokens(memory_fs *fs, const char *name, int width, uint32_t magic, uint32_t version,
    uint32_t n, size_t bytes) {
    unsigned char data[1200] = { 0 };
    uint32_t head[3] = { magic, version, n };
    memcpy(data, head, sizeof head);
    for (uint32_t i = 0; i < n && i < 40; i++) {
        uint32_t token = 50000 + i + (name[1] == '2' ? 100 : 0);
        memcpy(data + 1024 + (size_t)width * i, &token, (size_t)width);
    }
    memory_put(fs, name, data, bytes);
}

static void put_old_files(memory_fs *fs) {
    meter m = { 0, 0, 0 };
    dt_ctx *ctx = make_ctx(fs, &m);
    CHECK(write_some(ctx, "model.safetensors", 0, 0) == DT_OK &&
          write_some(ctx, "old/model.safetensors", 240, 0) == DT_OK &&
          write_some(ctx, "d/model.safetensors", 0, 0) == DT_OK &&
          dt_file_write(ctx, "config.json", "old", 3) == DT_OK);
    put_tokens(fs, "t1", 2, 20240520, 1, 5, 1034);
    put_tokens(fs, "t2", 2, 20240520, 1, 9, 1042);
    CHECK(write_some(ctx, "one.safetensors", 0, 0) == DT_OK);
    free_ctx(ctx, fs, &m, "old files");
}

/* After a failed operation the old file is complete, or the new one if the failure came after its
   rename. */
static void check_files_after(memory_fs *fs, int kind, int failed, const char *what) {
    int i = memory_at(fs, "config.json");
    int version = kind == F_SINGLE   ? version_of(fs, "model.safetensors")
                  : kind == F_SHARDS ? version_of(fs, "d")
                                     : 1;
    CHECK_MSG(version == 1 || (failed && version == 0), "%s: version %d", what, version);
    if (kind == F_TEXT)
        CHECK_MSG(i >= 0 && fs->file[i].size == 3 &&
                      (memcmp(fs->file[i].data, "old", 3) == 0 ||
                          memcmp(fs->file[i].data, "new", 3) == 0),
            "%s: config.json is neither the old nor the new one", what);
    CHECK_MSG(fs->synced >= 0, "%s: a file was renamed before it was synced", what);
}

static void test_faults(void) {
    int points = 0, silent_points = 0;
    for (int kind = 0; kind < F_KINDS; kind++)
        for (long at = 1, more = 1; more; at++) {
            memory_fs fs;
            meter m = { 0, 0, 0 };
            char what[64];
            memset(&fs, 0, sizeof fs);
            put_old_files(&fs);
            snprintf(what, sizeof what, "kind %d, call %ld", kind, at);
            dt_ctx *ctx = make_ctx(&fs, &m);
            fs.calls = 0;
            fs.fail_at = at;
            fs.reason = at % 2 ? EIO : ENOSPC;
            dt_status status = run_operation(ctx, kind);
            more = fs.calls >= at;
            fs.fail_at = 0;
            points += (int)more;
            /* failures that dt may ignore: closing a file it read, removing, opening a folder */
            silent_points += more && status == DT_OK;
            CHECK_MSG(status == DT_OK || (dt_error(ctx) == DT_ERR_IO &&
                                             (says(ctx, "Input/output") || says(ctx, "No space"))),
                "%s: %s", what, dt_error_text(ctx));
            free_ctx(ctx, &fs, &m, what);
            check_files_after(&fs, kind, status != DT_OK, what);
            for (int i = 0; i < MEMORY_FILES && more; i++)
                CHECK_MSG(!fs.file[i].used || !strstr(fs.file[i].name, ".tmp") || status == DT_OK,
                    "%s: temporary file %s is left", what, fs.file[i].name);
            CHECK_MSG(
                more || status == DT_OK, "%s: the operation failed although no call did", what);
            memory_clear(&fs);
        }
    printf("io failed in %d places, which was harmless in %d\n", points, silent_points);
    CHECK(points > 120 && silent_points < 40);
}

static void test_memory(void) {
    int points = 0;
    for (int kind = 0; kind < F_KINDS; kind++)
        for (long at = 2, more = 1; more; at++) { /* allocation 1 is the context */
            memory_fs fs;
            meter m = { 0, 0, at };
            char what[64];
            memset(&fs, 0, sizeof fs);
            put_old_files(&fs);
            snprintf(what, sizeof what, "kind %d, allocation %ld", kind, at);
            dt_ctx *ctx = make_ctx(&fs, &m);
            dt_status status = run_operation(ctx, kind);
            more = m.calls >= at;
            points += (int)more;
            CHECK_MSG(more ? status == DT_ERR_MEM && says(ctx, "were refused") : status == DT_OK,
                "%s: %s", what, dt_error_text(ctx));
            free_ctx(ctx, &fs, &m, what);
            check_files_after(&fs, kind, status != DT_OK, what);
            memory_clear(&fs);
        }
    printf("memory refused in %d places\n", points);
    CHECK(points > 80);
}

// ==== 9. Token shards ===========================================================================

static void test_tokens(void) {
    static const struct {
        int width;
        uint32_t magic, version, n;
        size_t bytes;
        const char *error;
    } cases[] = { { 2, 20240520, 1, 5, 1034, "" }, { 4, 20240801, 7, 5, 1044, "" },
        { 2, 20240520, 1, 5, 1035, "version 1 with 5 tokens has 1035" },
        { 2, 20240520, 1, 5, 1033, "has 1033 bytes" },
        { 2, 20240520, 2, 5, 1034, "a shard of version 2" },
        { 4, 20240801, 1, 5, 1044, "version 7 and 1024 + 4" },
        { 2, 20240520, 1, 0xffffffff, 1034, "with 4294967295 tokens" },
        { 2, 20240520, 1, 0, 12, "has 12 bytes" }, { 2, 20240520, 1, 0, 11, "has 11 bytes" },
        { 2, 20240520, 1, 0, 4, "of version 0" },
        { 2, 20240520, 1, 1, 1026, "1 tokens, but one sequence needs 5" },
        { 2, 20240520, 1, 0, 1024, "0 tokens" } };
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        meter m = { 0, 0, 0 };
        const char *names[1] = { "s1" };
        put_tokens(&fs, "s1", cases[i].width, cases[i].magic, cases[i].version, cases[i].n,
            cases[i].bytes);
        dt_ctx *ctx = make_ctx(&fs, &m);
        dt_text *t = dt_text_open(ctx, names, 1, 4);
        int32_t ids[4], labels[4];
        CHECK_MSG(*cases[i].error ? !t && says(ctx, cases[i].error) : t != NULL, "case %d: %s",
            (int)i, dt_error_text(ctx));
        if (t) {
            CHECK(dt_text_tokens(t) == 5 &&
                  dt_text_token_limit(t) == (cases[i].width == 2 ? 65536 : (int64_t)1 << 31));
            CHECK(dt_text_read(t, 0, ids, labels) == DT_OK && ids[0] == 50000 && ids[3] == 50003 &&
                  labels[3] == 50004);
        }
        free_ctx(ctx, &fs, &m, "tokens");
    }
    memory_clear(&fs);
}

/* A shard of n tokens of 2 or 4 bytes. */
static void put_shard(memory_fs *fs, const char *name, int width, uint32_t n) {
    put_tokens(fs, name, width, width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, n,
        1024 + n * (size_t)width);
}

/* Sequences that cross from one file into the next, with an empty file between. */
static void test_tokens_windows(void) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    for (int width = 2; width <= 4; width += 2) {
        static const char *const names[3] = { "s1", "s2", "s3" };
        put_shard(&fs, "s1", width, 7);
        put_shard(&fs, "s2", width, 0);
        put_shard(&fs, "s3", width, 9);
        for (int seq = 1; seq <= 15; seq++) {
            meter m = { 0, 0, 0 };
            dt_ctx *ctx = make_ctx(&fs, &m);
            fs.most = seq % 2 ? 3 : 0;
            dt_text *t = dt_text_open(ctx, names, 3, seq);
            int ok = dt_text_tokens(t) == 16 && dt_text_sequences(t) == 15 / seq;
            int32_t ids[16], labels[16];
            for (int64_t s = 0; s < dt_text_sequences(t); s++) {
                ok &= dt_text_read(t, s, ids, labels) == DT_OK;
                for (int i = 0; i < seq; i++) {
                    int64_t at = s * seq + i;
                    ok &= ids[i] == 50000 + (at < 7 ? at : at - 7) &&
                          labels[i] == 50000 + (at + 1 < 7 ? at + 1 : at - 6);
                }
            }
            CHECK_MSG(ok, "%d bytes a token, sequences of %d", width, seq);
            free_ctx(ctx, &fs, &m, "windows");
        }
    }
    memory_clear(&fs);
}

/* Files with different bytes a token, and a value that is no token id. */
static void test_tokens_mixed(void) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    static const char *const mixed[2] = { "s1", "bytes" }, *const widths[2] = { "s1", "s4" };
    put_shard(&fs, "s1", 4, 7);
    memory_put(&fs, "bytes", "hello, world", 12);
    put_shard(&fs, "s4", 2, 5);
    for (int k = 0; k < 3; k++) {
        meter m = { 0, 0, 0 };
        dt_ctx *ctx = make_ctx(&fs, &m);
        int32_t ids[4], labels[4];
        uint32_t large = 0x80000000;
        if (k == 2) memcpy(fs.file[memory_at(&fs, "s1")].data + 1024 + 4, &large, 4);
        dt_text *t = dt_text_open(ctx, k == 0 ? mixed : widths, k == 2 ? 1 : 2, 4);
        CHECK((t != NULL) == (k == 2));
        if (k == 2) CHECK(dt_text_read(t, 0, ids, labels) == DT_ERR_IO);
        static const char *const errors[3] = {
            "bytes has 1 bytes a token, but s1 has 4: bytes and shards do not mix",
            "s4 has 2 bytes a token", "s1: token 1 is 2147483648, which is not a token id"
        };
        CHECK_MSG(says(ctx, errors[k]), "%s", dt_error_text(ctx));
        free_ctx(ctx, &fs, &m, "mixed");
    }
    CHECK(dt_text_token_limit(NULL) == 0);
    memory_clear(&fs);
}

static int note_open(void *user, const char *path, int mode) {
    snprintf((char *)user, 8000, "%s", mode == DT_IO_READ ? path : "");
    return 3;
}
static int accept_fd(void *user, int fd) { return user && fd == 3 ? 0 : -1; }

/* The folder of a file is synced, however long its path is, or the writer fails. */
static void test_long_folder(void) {
    static const int lengths[] = { 0, 1, 1022, 1023, 1024, 4094, 4095, 7000 };
    static char folder[8000], path[8000];
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int n = lengths[i];
        dt__writer w = {
            .io = { .user = folder, .open = note_open, .close = accept_fd, .fsync = accept_fd }
        };
        memset(path, 'x', (size_t)n);
        snprintf(path + n, sizeof path - (size_t)n, n ? "/file" : "file");
        folder[0] = 0;
        dt__writer_sync_parent(&w, path, 0);
        path[n ? n + 1 : 0] = 0;
        if (n < 4095)
            CHECK_MSG(!w.why[0] && strcmp(folder, n ? path : ".") == 0, "%d: %s", n, w.why);
        else
            CHECK_MSG(strstr(w.why, "fsync of its folder: ") && !folder[0], "%d: %s", n, w.why);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) golden_folder = argv[1];
    test_16_bit_types();
    test_convert();
    test_json_refused();
    test_json_limits();
    test_json_classes();
    test_json_accepted();
    test_json_read();
    test_json_numbers();
    test_json_write();
    test_json_bytes();
    test_json_keys();
    test_st_example();
    test_integers();
    test_st_headers();
    test_st_refused();
    test_st_read();
    test_long_folder();
    test_index();
    test_reference_library();
    test_other_types();
    test_llmc();
    test_llmc_write();
    for (int l = 0; l < LAYOUTS; l++) {
        for (int c = 0; c < (int)(sizeof shardings / sizeof *shardings); c++)
            check_sharded_load(&layouts[l], l, c, (l + c) % 2 ? DT_F64 : DT_F32);
        check_save(&layouts[l], l);
    }
    test_tiles();
    test_load_refused();
    test_load_all();
    test_write();
    test_write_refused();
    test_corner_uses();
    test_faults();
    test_memory();
    test_tokens();
    test_tokens_windows();
    test_tokens_mixed();
    return check_done("test_files");
}
