/* fuzz_json.c - any text as JSON. An accepted text is written again and must parse to the same
   value. */
#include "tests/fuzz/fuzz.h"

static void write_node(dt_json_out *o, const dt_json *j, int node, const char *key) {
    dt_json_kind kind = dt_json_kind_of(j, node);
    double v = 0;
    int64_t n = 0;
    int flag = 0;
    if (kind == DT_JSON_NULL) dt_json_put_string(o, key, "null");
    if (kind == DT_JSON_STRING) dt_json_put_string(o, key, dt_json_string(j, node, NULL));
    if (dt_json_bool(j, node, &flag)) dt_json_put_bool(o, key, flag);
    if (dt_json_int(j, node, &n) && n >= -(int64_t)1e15 && n <= (int64_t)1e15)
        dt_json_put_int(o, key, n);
    else if (dt_json_number(j, node, &v))
        dt_json_put_number(o, key, v);
    if (kind < DT_JSON_ARRAY) return;
    dt_json_open(o, key, kind == DT_JSON_ARRAY ? '[' : '{');
    for (int i = 0; i < dt_json_count(j, node); i++) {
        int child = dt_json_at(j, node, i);
        size_t bytes = 0;
        const char *name = kind == DT_JSON_OBJECT ? dt_json_key(j, child, &bytes) : NULL;
        if (name && strlen(name) == bytes)
            fuzz_must(dt_json_find(j, node, name) == child, "a member is not found");
        write_node(o, j, child, name);
    }
    dt_json_close(o, kind == DT_JSON_ARRAY ? ']' : '}');
}

static int same_node(const dt_json *a, int x, const dt_json *b, int y) {
    double v = 0, w = 0;
    if (dt_json_kind_of(a, x) == DT_JSON_NULL) return dt_json_kind_of(b, y) == DT_JSON_STRING;
    if (dt_json_kind_of(a, x) != dt_json_kind_of(b, y) ||
        dt_json_count(a, x) != dt_json_count(b, y))
        return 0;
    if (dt_json_number(a, x, &v) && (!dt_json_number(b, y, &w) || v != w)) return 0;
    for (int i = 0; i < dt_json_count(a, x); i++)
        if (!same_node(a, dt_json_at(a, x, i), b, dt_json_at(b, y, i))) return 0;
    return 1;
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    memory_fs fs;
    memset(&fs, 0, sizeof fs);
    int zeros =
        bytes > 0 && (memchr(data, 0, bytes) != NULL || memmem(data, bytes, "\\u0000", 6) != NULL);
    dt_ctx *ctx = fuzz_ctx(&fs);
    dt_json *j = dt_json_parse(ctx, "fuzz", (const char *)data, bytes);
    fuzz_must((j == NULL) == (dt_error(ctx) == DT_ERR_IO), "no error text");
    if (j) {
        dt_json_out o = { ctx, NULL, 0, 0 };
        write_node(&o, j, 0, NULL);
        /* a key with a NUL would be written only up to the NUL */
        dt_json *again = zeros ? NULL : dt_json_parse(ctx, "again", o.text, o.used);
        fuzz_must(
            zeros || (again && same_node(j, 0, again, 0)), "what was written reads otherwise");
        dt_json_fail(j, dt_json_count(j, 0), "a place");
        dt_json_free(again);
        dt_json_out_free(&o);
    }
    dt_json_free(j);
    fuzz_must(dt_memory_used(ctx).live[DT_MEM_HOST] <= 2000, "memory is leaked");
    dt_ctx_free(ctx);
}
