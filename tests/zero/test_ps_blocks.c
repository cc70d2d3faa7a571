/* test_ps_blocks.c - dt_ps_embedding inside blocks of dt_tensor.h, plain and recomputed (activation
   checkpointing), in owned and served mode: the rows have the bits of a run without blocks, because
   the second run of a block pulls the same rows and only its backward adds gradients. */
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"

enum { KEYS = 16, WIDTH = 4, N = 4, STEPS = 4, NO_BLOCK = 0, BLOCK, RECOMPUTED, KINDS };

typedef struct job {
    int servers, kind;
    float before[KEYS * WIDTH], rows[KEYS * WIDTH];
    int64_t pulled;
} job;

typedef struct call {
    dt_ps *ps;
    int table, step, rank;
} call;

static dt_tensor *layer(dt_tensor *x, void *user) {
    const call *c = (const call *)user;
    uint64_t keys[N];
    for (int i = 0; i < N; i++) keys[i] = (uint64_t)((i * 5 + c->step * 3 + c->rank) % KEYS);
    return dt_tanh(dt_mul(dt_tanh(dt_ps_embedding(c->ps, c->table, keys, DT_SHAPE(N))), x));
}

static void read_rows(dt_ps *ps, int table, float *to) {
    uint64_t keys[KEYS];
    float rows[KEYS * WIDTH];
    for (int i = 0; i < KEYS; i++) keys[i] = (uint64_t)i;
    dt_ps_wait(ps, dt_ps_pull_start(ps, table, keys, KEYS, rows));
    if (dt_ctx_rank(ps->ctx) == 0) memcpy(to, rows, sizeof rows);
}

static dt_status train(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = j->servers });
    int table = dt_ps_table(
        ps, (dt_table_desc){
                .name = "t", .width = WIDTH, .init = DT_NORMAL(1), .optimizer = DT_TABLE_ADAGRAD });
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    read_rows(ps, table, j->before);
    for (int step = 0; step < STEPS && dt_error(ctx) == DT_OK; step++) {
        float x[N * WIDTH], y[N * WIDTH];
        call c = { ps, table, step, dt_ctx_rank(ctx) };
        for (int i = 0; i < N * WIDTH; i++) {
            x[i] = (float)(i % 5) / 4 + 0.3f;
            y[i] = (float)(i % 3) - 1;
        }
        dt_tensor *in = dt_input(ctx, DT_F32, DT_SHAPE(N, WIDTH), x), *out;
        dt_block_desc d = { .recompute = j->kind == RECOMPUTED, .user_bytes = sizeof c };
        out = j->kind == NO_BLOCK ? layer(in, &c) : dt_block_at(ctx, layer, in, &c, d);
        dt_backward(dt_mse(out, dt_input(ctx, DT_F32, DT_SHAPE(N, WIDTH), y), N * WIDTH));
        dt_ps_step(ps, 0.1);
        dt_reset(ctx);
    }
    if (dt_ctx_rank(ctx) == 0) j->pulled = dt_ps_info(ps).pulled;
    read_rows(ps, table, j->rows);
    dt_ps_end(ps);
    return dt_error(ctx);
}

int main(void) {
    for (int servers = 0; servers <= 2; servers++) {
        static job jobs[KINDS];
        for (int kind = 0; kind < KINDS; kind++) {
            job *j = &jobs[kind];
            dt_report report;
            memset(j, 0, sizeof *j);
            memset(&report, 0, sizeof report);
            j->servers = servers;
            j->kind = kind;
            dt_status status =
                dt_run((dt_run_desc){ .ranks = 2 + servers, .timeout_s = 30, .report = &report },
                    train, j);
            CHECK_MSG(status == DT_OK, "%d servers, kind %d: %s", servers, kind, report.text);
            CHECK_MSG(memcmp(j->rows, jobs[0].rows, sizeof j->rows) == 0,
                "%d servers, kind %d: the rows differ from those without blocks", servers, kind);
            CHECK(memcmp(j->rows, j->before, sizeof j->rows) != 0);
        }
        CHECK_MSG(jobs[RECOMPUTED].pulled == KEYS + 2 * (jobs[BLOCK].pulled - KEYS),
            "%lld keys pulled with recompute, %lld without", (long long)jobs[RECOMPUTED].pulled,
            (long long)jobs[BLOCK].pulled);
    }
    return check_done("test_ps_blocks");
}
