/* test_offload.c - dt_zero.h, sections 13 and 14: state, values and gradients in a file or in host memory

   A GPT and some frozen, unevenly sharded and scaled parameters are trained for a few steps. The
   place of the training state (device, host memory or disk) must not change a bit of the results,
   at any stage, dtype and chunk size. After a failed, short or missing answer of the disk the last
   good state must remain. The disk of these tests is a dt_io table over memory that counts calls
   and makes chosen ones fail; each rank's I/O thread makes the calls. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "examples/gpt.h"
#include "tests/support/check.h"
#include "tests/support/jitter.h"
#include <sys/stat.h>

enum { RANKS = 6, STEPS = 3, T = 8, SIDE = 12, TALL = 70 };

static char folder[64], wrong_folder[80];

// ==== Tables that count calls and inject faults =================================================

/* An allocator that knows which blocks were not freed. */
enum { KEPT = 4096 };
typedef struct counting {
    dt_host host;
    pthread_mutex_t lock;
    void *block[KEPT];
    size_t bytes[KEPT];
    int live;
} counting;

static void *counting_alloc(void *user, size_t bytes, dt_mem mem) {
    counting *c = (counting *)user;
    void *p = dt_host_default()->alloc(NULL, bytes, mem);
    /* callers must not rely on zeroed memory */
    if (p && mem != DT_MEM_COMM) memset(p, 0xA5, bytes < 65536 ? bytes : 65536);
    pthread_mutex_lock(&c->lock);
    for (int i = 0; p && i < KEPT; i++)
        if (!c->block[i]) {
            c->block[i] = p;
            c->bytes[i] = bytes;
            c->live++;
            break;
        }
    pthread_mutex_unlock(&c->lock);
    return p;
}

static void counting_free(void *user, void *p, size_t bytes, dt_mem mem) {
    counting *c = (counting *)user;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; p && i < KEPT; i++)
        if (c->block[i] == p) {
            CHECK_MSG(
                c->bytes[i] == bytes, "%zu bytes freed of a block of %zu", bytes, c->bytes[i]);
            c->block[i] = NULL;
            c->live--;
        }
    pthread_mutex_unlock(&c->lock);
    dt_host_default()->free(NULL, p, bytes, mem);
}

static void silent(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static void counting_make(counting *c) {
    memset(c, 0, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    c->host = *dt_host_default();
    c->host.user = c;
    c->host.alloc = counting_alloc;
    c->host.free = counting_free;
    c->host.log = silent;
}

/* A disk in memory, one file for each rank. */
enum { OPEN = 0, REMOVE, RESIZE, PREAD, PWRITE, FORGET, CLOSE, OPS };
enum { FAILS = 0, NOTHING, HALF_THEN_FAILS, HALF_THEN_REST, HOWS };
static const char *const op_names[OPS] = { "open", "remove", "resize", "pread", "pwrite", "forget",
    "close" };

typedef struct fake_file {
    unsigned char *data;
    size_t size;
    int open, named, half; /* half: half of a transfer was done, so the next one fails */
    long calls[OPS];
} fake_file;

typedef struct fake {
    dt_io io;
    pthread_mutex_t lock;
    pthread_cond_t released;
    fake_file file[RANKS];
    int rank, op, how;    /* the fault: on which rank, in which operation, of which kind */
    long at;              /* number of the faulty call, from 1; 0: no fault */
    int blocked, release; /* the faulty call blocks while release is 0 */
    int blocks;
    double nap_s; /* duration of a transfer */
} fake;

/* Counts a call. Returns 1 if it is the faulty one. */
static int fake_counts(fake *f, int rank, int op) {
    pthread_mutex_lock(&f->lock);
    long call = ++f->file[rank].calls[op];
    int faulty = f->at == call && f->rank == rank && f->op == op;
    pthread_mutex_unlock(&f->lock);
    errno = EIO;
    return faulty;
}

static int fake_rank(const char *path) {
    const char *at = strstr(path, "dt-rank-");
    return CHECK_MSG(at != NULL, "%s", path) ? atoi(at + 8) : 0;
}

static int fake_open(void *user, const char *path, int mode) {
    fake *f = (fake *)user;
    int rank = fake_rank(path);
    CHECK(mode == DT_IO_PRIVATE && rank < RANKS);
    if (fake_counts(f, rank, OPEN)) return -1;
    f->file[rank].open++;
    f->file[rank].named = 1;
    return rank;
}

static int fake_close(void *user, int fd) {
    fake *f = (fake *)user;
    int faulty = fake_counts(f, fd, CLOSE);
    pthread_mutex_lock(&f->lock);
    f->file[fd].open--;
    pthread_mutex_unlock(&f->lock);
    return faulty ? -1 : 0;
}

static int fake_remove(void *user, const char *path) {
    fake *f = (fake *)user;
    int rank = fake_rank(path);
    if (fake_counts(f, rank, REMOVE)) return -1;
    f->file[rank].named = 0;
    return 0;
}

static int fake_resize(void *user, int fd, int64_t bytes) {
    fake *f = (fake *)user;
    fake_file *file = &f->file[fd];
    if (fake_counts(f, fd, RESIZE)) return -1;
    unsigned char *data = (unsigned char *)realloc(file->data, bytes ? (size_t)bytes : 1);
    if (!data) return -1;
    if ((size_t)bytes > file->size) memset(data + file->size, 0, (size_t)bytes - file->size);
    file->data = data;
    file->size = (size_t)bytes;
    return 0;
}

/* Returns the number of bytes to transfer, or -1 on error. */
static int64_t fake_moves(fake *f, int rank, int op, size_t bytes, int64_t offset) {
    fake_file *file = &f->file[rank];
    int faulty = fake_counts(f, rank, op);
    if (!CHECK_MSG(offset >= 0 && (size_t)offset + bytes <= file->size,
            "%s of %zu bytes at %lld of %zu", op_names[op], bytes, (long long)offset, file->size))
        return -1;
    if (f->nap_s > 0) dt_host_default()->sleep(NULL, f->nap_s);
    if (file->half) return file->half = 0, errno = ENOSPC, -1;
    if (faulty && f->blocks) {
        pthread_mutex_lock(&f->lock);
        f->blocked++;
        while (!f->release) pthread_cond_wait(&f->released, &f->lock);
        pthread_mutex_unlock(&f->lock);
    } else if (faulty) {
        file->half = f->how == HALF_THEN_FAILS;
        return f->how == FAILS ? (errno = EIO, -1) : f->how == NOTHING ? 0 : (int64_t)(bytes / 2);
    }
    return (int64_t)bytes;
}

static int64_t fake_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    fake *f = (fake *)user;
    int64_t n = fake_moves(f, fd, PREAD, bytes, offset);
    if (n > 0) memcpy(buf, f->file[fd].data + offset, (size_t)n);
    return n;
}

static int64_t fake_pwrite(void *user, int fd, const void *buf, size_t bytes, int64_t offset) {
    fake *f = (fake *)user;
    int64_t n = fake_moves(f, fd, PWRITE, bytes, offset);
    if (n > 0) memcpy(f->file[fd].data + offset, buf, (size_t)n);
    return n;
}

static int fake_forget(void *user, int fd, int64_t bytes, int64_t offset) {
    fake *f = (fake *)user;
    CHECK(bytes > 0 && (size_t)(offset + bytes) <= f->file[fd].size);
    return fake_counts(f, fd, FORGET) ? -1 : 0;
}

static void fake_make(fake *f) {
    memset(f, 0, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->released, NULL);
    f->io = *dt_io_default();
    f->io.user = f;
    f->io.open = fake_open;
    f->io.close = fake_close;
    f->io.remove = fake_remove;
    f->io.resize = fake_resize;
    f->io.pread = fake_pread;
    f->io.pwrite = fake_pwrite;
    f->io.sync_and_evict = fake_forget;
}

static void fake_drop(fake *f) {
    for (int r = 0; r < RANKS; r++) free(f->file[r].data);
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->released);
}

// ==== The run ===================================================================================

/* What a rank observed: digests of each step's inputs and results. */
enum { NORM = 0, GRADS, VALUES, STATE_0, STATE_1, KINDS };
static const char *const kind_names[KINDS] = { "norm", "gradients", "values", "state 0",
    "state 1" };

typedef struct seen {
    /* kept: digest of the values in memory before step k + 1 */
    uint64_t digest[STEPS][KINDS], kept[STEPS + 1];
    uint64_t kept_at_end;
    int done; /* completed steps */
    int64_t slot_bytes;
    dt_memory memory;
    dt_status status;
    char text[512];
} seen;

typedef struct job {
    /* unseen: gradients and state are not read */
    int ranks, steps, accum, recompute, unseen;
    dt_mesh_desc mesh;
    dt_zero_desc zero;
    dt_dtype dtype;
    const char *load; /* a file of weights for side.big */
    fake *disk;       /* `good` stores the slots after each step */
    unsigned char *good[STEPS + 1][RANKS];
    seen rank[RANKS];
} job;

static uint64_t digest(uint64_t h, const void *data, size_t bytes) {
    return dt__digest(h, data, bytes);
}

static uint64_t kept_digest(dt_ctx *ctx) {
    uint64_t h = 1;
    for (int u = 0; u < dt_bucket_count(ctx); u++) {
        const dt_bucket *unit = dt_bucket_get(ctx, u);
        if (unit->shard) h = digest(h, unit->shard, unit->shard_count * dt_dtype_size(unit->dtype));
    }
    return h;
}

/* A user update of both states, element by element. */
static dt_status own_update(const dt_update_args *f, void *user) {
    (void)user;
    for (size_t i = 0; i < f->count; i++) {
        dt_dtype type = dt_grad_dtype(f->tensor);
        double g = dt__number(type, f->grad, i) * f->grad_scale, x = dt__number(type, f->param, i);
        double a = 0.5 * dt__number(type, f->state[0], i) + g,
               b = dt__number(type, f->state[1], i) + a * a;
        dt__set_number(type, f->state[0], i, a);
        dt__set_number(type, f->state[1], i, b);
        dt__set_number(type, f->param, i, x - f->lr * a / (1 + b));
    }
    return DT_OK;
}

/* A frozen weight, a bias with its own learning-rate scale, and a weight larger than a unit of 4
   KiB. */
static void register_extra_params(dt_ctx *ctx, dt_dtype dtype) {
    dt_scope(ctx, "side.");
    dt_param_at(ctx, "ice", DT_SHAPE(SIDE, 16), DT_NORMAL(0.3),
        (dt_param_desc){ .frozen = 1, .dtype = dtype });
    dt_param_at(
        ctx, "lone", DT_SHAPE(SIDE), DT_ZEROS, (dt_param_desc){ .lr_scale = 2, .dtype = dtype });
    dt_param_at(ctx, "big", DT_SHAPE(TALL, SIDE), DT_NORMAL(0.3),
        (dt_param_desc){ .no_decay = 1, .dtype = dtype });
}

static dt_tensor *extra_loss(dt_ctx *ctx, dt_dtype dtype, int seed) {
    double x[4 * 16], y[4 * TALL];
    char xs[sizeof x], ys[sizeof y];
    dt_tensor *ice = dt_param_find(ctx, "side.ice"), *lone = dt_param_find(ctx, "side.lone");
    for (int i = 0; i < 4 * 16; i++)
        dt__set_number(dtype, xs, (size_t)i, (seed * 7 + i * 5) % 13 / 13.0);
    for (int i = 0; i < 4 * TALL; i++)
        dt__set_number(dtype, ys, (size_t)i, (seed * 3 + i * 11) % 17 / 17.0);
    dt_tensor *h = dt_linear(dt_input(ctx, dtype, DT_SHAPE(4, 16), xs), ice, lone);
    dt_tensor *out = dt_linear(h, dt_param_find(ctx, "side.big"), NULL);
    return dt_mse(out, dt_input(ctx, dtype, DT_SHAPE(4, TALL), ys), 4 * TALL);
}

static void micro_batch(gpt *model, const job *j, int step, int micro, int replica) {
    dt_ctx *ctx = model->ctx;
    int32_t ids[T], labels[T];
    int seed = (step * 8 + micro) * 8 + replica;
    for (int i = 0; i < T; i++) {
        ids[i] = (seed * 7 + i * i) % 19;
        labels[i] = (ids[i] * 5 + seed) % 19;
    }
    dt_micro(ctx, micro, j->accum);
    dt_tensor *loss = gpt_loss(model, dt_input(ctx, DT_I32, DT_SHAPE(1, T), ids),
        dt_input(ctx, DT_I32, DT_SHAPE(1, T), labels), T * 4);
    dt_backward(dt_add(loss, extra_loss(ctx, j->dtype, seed)));
    dt_reset(ctx);
}

/* Digest of full parameters, of their gradients before the step, or of their state. */
static uint64_t digest_of(dt_ctx *ctx, dt_zero *zero, int kind) {
    static __thread double host[2048];
    uint64_t h = 1;
    for (int i = 0; i < dt_param_count(ctx); i++) {
        dt_tensor *t = dt_param_get(ctx, i);
        size_t bytes =
            t->param->count * dt_dtype_size(kind == VALUES ? t->dtype : dt_grad_dtype(t));
        if (!CHECK(bytes <= sizeof host) || (kind != VALUES && t->param->desc.frozen)) continue;
        memset(host, 0x77, sizeof host);
        dt_status status = kind == VALUES  ? dt_read(t, host)
                           : kind == GRADS ? dt_zero_grad(zero, t, host)
                                           : dt_zero_state(zero, kind - STATE_0, t, host);
        if (status != DT_OK) return 0;
        h = digest(h, host, bytes);
    }
    return h;
}

static int states_of(const job *j) {
    return j->zero.optimizer == DT_SGD ? j->zero.momentum > 0 : 2;
}

/* Stores the slot that holds the current state after `done` steps. */
static void keep_slot(job *j, int rank, int done) {
    fake_file *file = &j->disk->file[rank];
    size_t bytes = (size_t)j->rank[rank].slot_bytes;
    j->good[done][rank] = (unsigned char *)malloc(bytes ? bytes : 1);
    if (j->good[done][rank] && file->size >= 2 * bytes)
        memcpy(j->good[done][rank], file->data + (done % 2) * bytes, bytes);
}

static void run_steps(job *j, gpt *model, dt_zero *zero, const dt_mesh *mesh) {
    dt_ctx *ctx = model->ctx;
    seen *s = &j->rank[dt_ctx_rank(ctx)];
    s->kept[0] = kept_digest(ctx);
    for (int step = 0; step < j->steps && dt_error(ctx) == DT_OK; step++) {
        for (int m = 0; m < j->accum; m++) micro_batch(model, j, step, m, mesh->replica);
        if (!j->unseen) s->digest[step][GRADS] = digest_of(ctx, zero, GRADS);
        dt_step_info info = dt_zero_step(zero, 0.01 * (step + 1));
        s->done = (int)info.step; /* the comparison of replicas may fail after a completed step */
        if (dt_error(ctx) != DT_OK) break;
        double both[2] = { info.grad_norm, info.clip_scale };
        s->digest[step][NORM] = digest(1, both, sizeof both);
        s->kept[step + 1] = kept_digest(ctx);
        if (j->disk) keep_slot(j, dt_ctx_rank(ctx), s->done);
        for (int k = VALUES; k < STATE_0 + states_of(j) && !j->unseen; k++)
            s->digest[step][k] = digest_of(ctx, zero, k);
    }
    s->kept_at_end = kept_digest(ctx);
}

static dt_status offload_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    seen *s = &j->rank[dt_ctx_rank(ctx)];
    dt_mesh mesh = dt_mesh_make(ctx, j->mesh);
    dt_zero_desc d = j->zero;
    gpt model = gpt_register(ctx, (gpt_config){ .layers = 1,
                                      .width = 16,
                                      .heads = 2,
                                      .kv_heads = 2,
                                      .ffn = 24,
                                      .seq = T,
                                      .vocab = 19,
                                      .norm_eps = 1e-5,
                                      .tied = 1,
                                      .dtype = j->dtype,
                                      .recompute = j->recompute,
                                      .tp = mesh.sizes.tp > 1 ? mesh.tp : NULL });
    register_extra_params(ctx, j->dtype);
    d.mesh = &mesh;
    d.poison = 1;
    if (j->dtype == DT_F16) d.loss_scale = 64;
    dt_zero *zero = dt_zero_make(ctx, d);
    if (zero && zero->disk) s->slot_bytes = zero->disk->slot_bytes;
    if (zero && j->load) {
        dt_weight_part part = { .name = "side.big" };
        dt_weights *w = dt_weights_open(ctx, j->load);
        if (w) dt_weights_load(w, dt_param_find(ctx, "side.big"), 0, &part, 1);
        dt_weights_close(w);
    }
    if (zero && j->disk) keep_slot(j, dt_ctx_rank(ctx), 0);
    if (zero) run_steps(j, &model, zero, &mesh);
    s->memory = dt_memory_used(ctx);
    dt_barrier(dt_world(ctx)); /* ranks that do not know of a failure yet learn of it here */
    s->status = dt_error(ctx);
    snprintf(s->text, sizeof s->text, "%s", dt_error_text(ctx));
    return dt_error(ctx);
}

/* Runs a job over threads, with its disk if it has one. No block, open file or named file may
   remain. */
static dt_report run_job(job *j, double timeout_s) {
    counting *c = (counting *)malloc(sizeof *c);
    dt_report report;
    counting_make(c);
    double begin = dt_host_default()->now(NULL);
    dt_run((dt_run_desc){ .ranks = j->ranks,
               .timeout_s = timeout_s,
               .host = &c->host,
               .io = j->disk ? &j->disk->io : NULL,
               .report = &report },
        offload_main, j);
    double took = dt_host_default()->now(NULL) - begin;
    CHECK_MSG(in_time(took, 0.6 * timeout_s), "%.1f s", took);
    CHECK_MSG(c->live == 0, "%d blocks were not freed", c->live);
    for (int r = 0; j->disk && r < j->ranks; r++) {
        CHECK_MSG(j->disk->file[r].open == 0, "rank %d has not closed its file", r);
        CHECK_MSG(
            !j->disk->file[r].named || j->disk->op == REMOVE, "rank %d's file still has a name", r);
    }
    pthread_mutex_destroy(&c->lock);
    free(c);
    return report;
}

static void drop_good(job *j) {
    for (int i = 0; i <= STEPS; i++)
        for (int r = 0; r < RANKS; r++) free(j->good[i][r]), j->good[i][r] = NULL;
}

// ==== (a) Offload does not change a bit =========================================================

static const char *place(int code) { return code == 0 ? NULL : code == 1 ? "cpu" : folder; }

static int same_seen(const job *a, const job *b, const char *name) {
    int same = 1;
    for (int r = 0; r < a->ranks; r++)
        for (int s = 0; s < a->steps; s++)
            for (int k = 0; k < KINDS; k++)
                same &= CHECK_MSG(a->rank[r].digest[s][k] == b->rank[r].digest[s][k],
                    "%s: different %s in step %d on rank "
                    "%d",
                    name, kind_names[k], s + 1, r);
    return same;
}

static job *job_like(const job *like) {
    job *j = (job *)malloc(sizeof *j);
    *j = *like;
    memset(j->rank, 0, sizeof j->rank);
    return j;
}

static void run_way(
    const job *base, const char *name, int optim, int params, size_t chunk, dt_backend backend) {
    job *j = job_like(base);
    char text[200];
    dt_report report = { DT_OK, -1, "", 0 };
    j->zero.offload_optim = place(optim);
    j->zero.offload_params = place(params);
    j->zero.offload_chunk = chunk;
    snprintf(text, sizeof text, "%s, optim %d, params %d, chunk %zu, %s", name, optim, params,
        chunk, backend == DT_BACKEND_PROCS ? "procs" : "threads");
    if (backend == DT_BACKEND_PROCS) {
        dt_host quiet = *dt_host_default();
        quiet.log = silent;
        dt_run((dt_run_desc){ .ranks = j->ranks,
                   .backend = backend,
                   .timeout_s = 60,
                   .host = &quiet,
                   .report = &report,
                   .user_bytes = sizeof *j },
            offload_main, j);
    } else {
        report = run_job(j, 60);
    }
    if (CHECK_MSG(report.status == DT_OK, "%s: %s", text, report.text)) same_seen(base, j, text);
    for (int r = 0; r < j->ranks; r++) {
        const dt_memory *m = &j->rank[r].memory;
        CHECK_MSG(
            (m->peak[DT_MEM_OPTIM] == 0) ==
                (optim != 0 || states_of(j) + (j->dtype == DT_BF16 || j->dtype == DT_F16) == 0),
            "%s: %zu bytes of optim", text, m->peak[DT_MEM_OPTIM]);
        CHECK_MSG((m->live[DT_MEM_PARAMS] == 0) == (params != 0), "%s: %zu bytes of params", text,
            m->live[DT_MEM_PARAMS]);
        CHECK_MSG((m->peak[DT_MEM_GRADS] == 0) == (optim == 2 && params == 2 && !j->zero.tree),
            "%s: %zu bytes of "
            "grads",
            text, m->peak[DT_MEM_GRADS]);
    }
    free(j);
}

/* Random settings. */
static void draw(uint32_t code, job *j) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16, DT_F16 };
    static const dt_zero_desc optimizers[] = {
        { .optimizer = DT_ADAMW, .weight_decay = 0.1, .clip = 0.5 },
        { .optimizer = DT_SGD, .weight_decay = 0.1 },
        { .optimizer = DT_SGD, .momentum = 0.9, .clip = 0.3 },
        { .optimizer = DT_OPTIMIZER_CUSTOM, .update = own_update, .states = 2, .clip = 0.4 },
    };
    uint64_t x = dt__digest(77, &code, sizeof code);
    memset(j, 0, sizeof *j);
    j->dtype = types[code % 4];
    j->zero = optimizers[code / 4 % 4];
    j->zero.stage = (int)(code / 16 % 4);
    j->mesh.dp = 1 + (int)(x % 4);
    j->mesh.tp = j->mesh.dp <= 2 && (x >> 8) % 3 == 0 ? 2 : 1;
    j->ranks = j->mesh.dp * j->mesh.tp;
    j->steps = STEPS;
    j->accum = 1 + (int)((x >> 16) % 3);
    j->recompute = (x >> 20) % 3 == 0 ? GPT_RECOMPUTE_FULL : GPT_RECOMPUTE_NONE;
    j->zero.tree = (x >> 24) % 5 == 0;
    j->zero.keep_gathered = (x >> 28) % 3 == 0;
    j->zero.no_overlap = (x >> 32) % 4 == 0;
    j->zero.bucket_bytes = (x >> 36) % 3 == 0 ? 0 : 4096;
    if (j->zero.stage > 0 && (x >> 40) % 2)
        j->zero.shard_group = j->mesh.dp % 2 ? 1 : j->mesh.dp / 2;
}

static void test_same_bits(void) {
    static const size_t chunks[] = { 1000, 1 << 30, 29, 0, 333 };
    for (uint32_t code = 0; code < 64; code++) {
        job base;
        char name[120];
        draw(code, &base);
        snprintf(name, sizeof name,
            "%s, optimizer %d, stage %d, dp %d in groups of %d, tp %d, accum %d%s",
            dt_dtype_name(base.dtype), base.zero.optimizer, base.zero.stage, base.mesh.dp,
            base.zero.shard_group, base.mesh.tp, base.accum, base.zero.tree ? ", tree" : "");
        dt_report report = run_job(&base, 60);
        if (!CHECK_MSG(report.status == DT_OK, "%s: %s", name, report.text)) continue;
        for (int way = 1; way < (base.zero.stage == 3 ? 9 : 3); way++)
            run_way(&base, name, way % 3, way / 3, chunks[(code + (uint32_t)way) % 5],
                (code + (uint32_t)way) % 5 == 1 ? DT_BACKEND_PROCS : DT_BACKEND_THREADS);
    }
    /* chunks of one element: 3 transfers per element */
    job base;
    draw(58, &base);
    base.steps = 2;
    CHECK(run_job(&base, 60).status == DT_OK);
    run_way(&base, "chunks of 1", 1, 1, 1, DT_BACKEND_THREADS);
    run_way(&base, "chunks of 7", 1, 2, 7, DT_BACKEND_THREADS);
    draw(48, &base);
    base.ranks = base.mesh.dp = base.mesh.tp = 1;
    base.zero.shard_group = base.zero.tree = 0;
    base.steps = 1;
    CHECK(run_job(&base, 60).status == DT_OK);
    run_way(&base, "chunks of 1, one rank", 2, 2, 1, DT_BACKEND_THREADS);
}

/* Values loaded from a file reach the disk; parameters outside the file stay unchanged. */
static void test_load(void) {
    char path[120], head[120] = "", names[2][16] = { "memory", "disk" };
    float big[TALL * SIDE];
    snprintf(path, sizeof path, "%s/big.safetensors", folder);
    int n = snprintf(head + 8, sizeof head - 8,
        "{\"side.big\":{\"dtype\":\"F32\",\"shape\":[%d,%d],"
        "\"data_offsets\":[0,%zu]}}",
        TALL, SIDE, sizeof big);
    head[0] = (char)n;
    for (int i = 0; i < TALL * SIDE; i++) big[i] = (float)(i * 37 % 101) / 64 - 0.7f;
    FILE *file = fopen(path, "wb");
    CHECK(
        file && fwrite(head, (size_t)n + 8, 1, file) == 1 && fwrite(big, sizeof big, 1, file) == 1);
    if (file) fclose(file);
    for (int code = 48; code < 52; code++) {
        job base, *j;
        draw((uint32_t)code, &base);
        job *plain = job_like(&base);
        CHECK(run_job(plain, 60).status == DT_OK);
        base.load = path;
        dt_report report = run_job(&base, 60);
        CHECK_MSG(report.status == DT_OK, "loading into %s: %s", names[0], report.text);
        CHECK(plain->rank[0].digest[0][VALUES] != base.rank[0].digest[0][VALUES]);
        j = job_like(&base);
        j->zero.offload_optim = j->zero.offload_params = folder;
        report = run_job(j, 60);
        CHECK_MSG(report.status == DT_OK, "loading into %s: %s", names[1], report.text);
        same_seen(&base, j, "loaded");
        free(j);
        free(plain);
    }
    CHECK(remove(path) == 0);
}

// ==== (b) A fault in every call =================================================================

typedef struct way {
    const char *name;
    int stage, disk_params, optimizer, accum;
    dt_dtype dtype;
} way;
static const way ways[] = {
    { "stage 0, bf16", 0, 0, DT_ADAMW, 1, DT_BF16 },
    { "stage 1, f32, momentum", 1, 0, DT_SGD, 2, DT_F32 },
    { "stage 2, bf16", 2, 0, DT_ADAMW, 1, DT_BF16 },
    { "stage 3, f32, values in memory", 3, 0, DT_ADAMW, 1, DT_F32 },
    { "stage 3, f32, all on disk", 3, 1, DT_ADAMW, 2, DT_F32 },
    { "stage 3, bf16, all on disk", 3, 1, DT_SGD, 1, DT_BF16 },
};

static job faulty_job(const way *w, fake *disk) {
    job j;
    memset(&j, 0, sizeof j);
    fake_make(disk);
    j.ranks = 2;
    j.steps = 2;
    j.accum = w->accum;
    j.dtype = w->dtype;
    j.unseen = 1;
    j.disk = disk;
    j.zero = (dt_zero_desc){ .stage = w->stage,
        .optimizer = w->optimizer,
        .offload_optim = "nowhere",
        .offload_params = w->disk_params ? "nowhere" : NULL,
        .offload_chunk = 700,
        .momentum = w->optimizer == DT_SGD ? 0.9 : 0 };
    return j;
}

/* The failing rank's text must name the file, the array and the operation. */
static void check_text(const char *text, const fake *f) {
    char path[64];
    int named = strstr(text, "optimizer state") || strstr(text, "values") ||
                strstr(text, "gradients") || strstr(text, "master parameters");
    snprintf(path, sizeof path, "nowhere/dt-rank-%d.offload: ", f->rank);
    CHECK_MSG(strstr(text, path), "%s of rank %d: %s", op_names[f->op], f->rank, text);
    if (f->op == OPEN || f->op == REMOVE) CHECK_MSG(strstr(text, op_names[f->op]), "%s", text);
    if (f->op == RESIZE) CHECK_MSG(strstr(text, "making room for"), "%s", text);
    if (f->op < PREAD) return;
    CHECK_MSG(named && (f->op == FORGET || strstr(text, ", byte ")), "%s", text);
    if (f->op == PREAD) CHECK_MSG(strstr(text, ": reading "), "%s", text);
    if (f->op == PWRITE) CHECK_MSG(strstr(text, ": writing "), "%s", text);
    const char *nothing = f->op == PREAD ? "become shorter" : strerror(ENOSPC);
    const char *reason = strerror(f->how == HALF_THEN_FAILS && f->op != FORGET ? ENOSPC : EIO);
    CHECK_MSG(strstr(text, f->how == NOTHING ? nothing : reason), "%d: %s", f->how, text);
    if (f->op < FORGET)
        CHECK_MSG((strstr(text, ", byte 0: ") == NULL) == (f->how == HALF_THEN_FAILS), "%s", text);
}

/* All ranks have completed the same steps; or the rank with the fault is one step ahead, if it
   fails before the others have left the last collective of a step. Memory and the current slot equal
   those of a good run after these steps. */
static void check_unchanged(const way *w, const job *good, const job *j) {
    const fake *f = j->disk;
    int at_fault = j->rank[f->rank].done;
    for (int r = 0; r < j->ranks; r++) {
        const seen *s = &j->rank[r];
        int done = s->done;
        size_t bytes = (size_t)s->slot_bytes;
        CHECK_MSG(s->status != DT_OK, "%s: rank %d does not know of the failure", w->name, r);
        CHECK_MSG(done == at_fault || (r != f->rank && done == at_fault - 1),
            "%s: rank %d made %d steps, rank %d with the fault %d", w->name, r, done, f->rank,
            at_fault);
        if (s->kept_at_end == 0) continue; /* dt_zero_make failed */
        CHECK_MSG(s->kept_at_end == good->rank[r].kept[done],
            "%s: %s %ld of rank %d, way %d: after %d steps rank %d "
            "has wrong values in memory",
            w->name, op_names[f->op], f->at, f->rank, f->how, done, r);
        CHECK_MSG(
            bytes && memcmp(f->file[r].data + (done % 2) * bytes, good->good[done][r], bytes) == 0,
            "%s: %s %ld "
            "of rank %d, way %d: after %d steps the file of rank %d holds wrong state",
            w->name, op_names[f->op], f->at, f->rank, f->how, done, r);
    }
}

static void run_with_fault(const way *w, const job *good, int rank, int op, long at, int how) {
    fake *disk = (fake *)malloc(sizeof *disk);
    job j = faulty_job(w, disk);
    disk->rank = rank;
    disk->op = op;
    disk->at = at;
    disk->how = how;
    dt_report report = run_job(&j, 30);
    if (op == CLOSE || (how == HALF_THEN_REST && (op == PREAD || op == PWRITE))) {
        if (CHECK_MSG(
                report.status == DT_OK, "%s: %s %ld: %s", w->name, op_names[op], at, report.text))
            for (int r = 0; r < 2; r++)
                CHECK(j.rank[r].kept_at_end == good->rank[r].kept_at_end &&
                      memcmp(j.rank[r].digest, good->rank[r].digest, sizeof j.rank[r].digest) == 0);
    } else {
        CHECK_MSG(report.status == DT_ERR_IO && report.rank == rank, "%s: %s %ld of rank %d: %s %s",
            w->name, op_names[op], at, rank, dt_status_name(report.status), report.text);
        CHECK(j.rank[rank].status == DT_ERR_IO && j.rank[!rank].status == DT_ERR_PEER);
        check_text(report.text, disk);
        check_unchanged(w, good, &j);
    }
    drop_good(&j);
    fake_drop(disk);
    free(disk);
}

/* full: a fault in each call of rank 1, else in every third, or fifth */
static void test_faulty_calls(int full) {
    int every = full ? 1 : check_all_cases() ? 3 : 5;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        fake *disk = (fake *)malloc(sizeof *disk);
        job good = faulty_job(&ways[i], disk);
        long runs = 0;
        CHECK(run_job(&good, 30).status == DT_OK);
        for (int rank = 0; rank < 2; rank++)
            for (int op = 0; op < OPS; op++)
                for (long at = 1; at <= disk->file[rank].calls[op]; at += rank ? every : 9)
                    for (int how = 0; how < (op == PREAD || op == PWRITE ? (int)HOWS : 1);
                         how++, runs++)
                        run_with_fault(&ways[i], &good, rank, op, at, how);
        printf("%s: %ld reads, %ld writes, %ld runs with a fault in one call\n", ways[i].name,
            disk->file[1].calls[PREAD], disk->file[1].calls[PWRITE], runs);
        CHECK(disk->file[1].calls[PREAD] > 10 && disk->file[1].calls[PWRITE] > 10);
        drop_good(&good);
        fake_drop(disk);
        free(disk);
    }
}

/* A folder that does not exist, and a path that is too long. */
static void test_no_folder(void) {
    static char long_folder[2000];
    memset(long_folder, 'x', sizeof long_folder - 1);
    for (int k = 0; k < 2; k++) {
        job j;
        draw(48, &j);
        j.zero.offload_optim = k ? long_folder : wrong_folder;
        dt_report report = run_job(&j, 60);
        CHECK_MSG(report.status == (k ? DT_ERR_ARG : DT_ERR_IO) &&
                      strstr(report.text, k ? "a path of at most" : "open: No such file"),
            "%s", report.text);
    }
}

// ==== (c) A disk that does not answer ===========================================================

/* Rank 1 fails for another reason while a read of its values is pending and never returns. */
static dt_status failing_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    fake *disk = j->disk;
    seen *s = &j->rank[dt_ctx_rank(ctx)];
    dt_zero_desc d = j->zero;
    register_extra_params(ctx, j->dtype);
    dt_zero *zero = dt_zero_make(ctx, d);
    if (dt_ctx_rank(ctx) == 1 && zero) {
        pthread_mutex_lock(&disk->lock);
        disk->at = disk->file[1].calls[PREAD] + 1;
        pthread_mutex_unlock(&disk->lock);
        dt__params_read_start(zero, &zero->buckets[0]);
        for (int blocked = 0, k = 0; !blocked && CHECK(k < 1000); k++) {
            dt_host_default()->sleep(NULL, 0.001);
            pthread_mutex_lock(&disk->lock);
            blocked = disk->blocked;
            pthread_mutex_unlock(&disk->lock);
        }
        dt_fail(ctx, DT_ERR_TIMEOUT, "dt-rank-1.offload: no answer from the disk, says the test");
    }
    dt_barrier(dt_world(ctx));
    s->status = dt_error(ctx);
    snprintf(s->text, sizeof s->text, "%s", dt_error_text(ctx));
    return dt_error(ctx);
}

/* If a transfer never returns, the run still ends in time, whether the rank waits for the transfer
   or leaves (at = 0). When the disk answers later, the I/O thread continues and must touch no freed
   memory: by then the run has freed everything except the thread's own block. */
static void test_no_answer(int op, long at) {
    fake *disk = (fake *)malloc(sizeof *disk);
    counting *c = (counting *)malloc(sizeof *c);
    job j = faulty_job(&ways[4], disk);
    dt_report report;
    counting_make(c);
    disk->rank = 1;
    disk->op = op;
    disk->at = at;
    disk->blocks = 1;
    double begin = dt_host_default()->now(NULL);
    dt_run(
        (dt_run_desc){
            .ranks = 2, .timeout_s = 1, .host = &c->host, .io = &disk->io, .report = &report },
        at ? offload_main : failing_main, &j);
    double took = dt_host_default()->now(NULL) - begin;
    CHECK_MSG(in_time(took, 10), "%.1f s", took);
    CHECK_MSG(
        report.status == DT_ERR_TIMEOUT && (report.rank == 1 || strstr(report.text, "rank 1")),
        "%s", report.text);
    CHECK_MSG(strstr(j.rank[1].text, "dt-rank-1.offload: ") &&
                  strstr(j.rank[1].text, "no answer from the disk") &&
                  j.rank[1].status == DT_ERR_TIMEOUT,
        "%s", j.rank[1].text);
    CHECK_MSG(disk->blocked == 1 && c->live == 1, "%d blocked, %d blocks not freed", disk->blocked,
        c->live);
    pthread_mutex_lock(&disk->lock);
    disk->release = 1;
    pthread_cond_broadcast(&disk->released);
    pthread_mutex_unlock(&disk->lock);
    /* the I/O thread's last call closes the file */
    for (int open = 1, k = 0; open && k < 1000; k++) {
        dt_host_default()->sleep(NULL, 0.005);
        pthread_mutex_lock(&disk->lock);
        open = disk->file[0].open + disk->file[1].open;
        pthread_mutex_unlock(&disk->lock);
        if (k == 999) CHECK(!open);
    }
    dt_host_default()->sleep(NULL, 0.05);
    for (int i = 0; i < KEPT; i++)
        if (c->block[i]) dt_host_default()->free(NULL, c->block[i], c->bytes[i], DT_MEM_HOST);
    pthread_mutex_destroy(&c->lock);
    free(c);
    drop_good(&j);
    fake_drop(disk);
    free(disk);
}

// ==== (d) Overlap: reads are prefetched, writes are asynchronous ================================

enum { LAYERS = 12, WIDE = 32 };
static const double slow_s = 0.004;

typedef struct timing {
    int all; /* 1: values, gradients and state on disk; 0: state alone */
    /* durations of one transfer, and of one chunk's update or one layer */
    double disk_s, compute_s;
    double step_s; /* the fastest step */
} timing;

static void nap(double seconds) {
    if (seconds > 0) dt_host_default()->sleep(NULL, seconds);
}

static dt_status slow_update(const dt_update_args *f, void *user) {
    nap(((const timing *)user)->compute_s);
    for (size_t i = 0; i < f->count; i++)
        ((float *)f->param)[i] -= (float)f->lr * ((const float *)f->grad)[i];
    return DT_OK;
}

static dt_tensor *slow_layer(dt_tensor *x, void *user) {
    const void *const *both = (const void *const *)user;
    nap(((const timing *)both[1])->compute_s);
    return dt_linear(x, (dt_tensor *)(uintptr_t)both[0], NULL);
}

static dt_status slow_main(dt_ctx *ctx, void *user) {
    timing *t = (timing *)user;
    const void *both[LAYERS][2];
    float input[4 * WIDE];
    for (int i = 0; i < 4 * WIDE; i++) input[i] = (float)(i % 7) / 7;
    for (int i = 0; i < LAYERS; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        both[i][0] = dt_param(ctx, name, DT_SHAPE(WIDE, WIDE), DT_NORMAL(0.2));
        both[i][1] = t;
    }
    dt_zero *zero = dt_zero_make(ctx, (dt_zero_desc){ .stage = t->all ? 3 : 1,
                                          .optimizer = DT_OPTIMIZER_CUSTOM,
                                          .update = slow_update,
                                          .user = t,
                                          .states = t->all ? 0 : 1,
                                          .bucket_bytes = WIDE * WIDE * 4,
                                          .offload_optim = "x",
                                          .offload_params = t->all ? "x" : NULL });
    CHECK(dt_bucket_count(ctx) == LAYERS);
    t->step_s = 1e9;
    for (int step = 0; step < 3 && dt_error(ctx) == DT_OK; step++) {
        double begin = dt_host_default()->now(NULL);
        dt_tensor *x = dt_input(ctx, DT_F32, DT_SHAPE(4, WIDE), input);
        for (int i = 0; i < LAYERS; i++)
            x = t->all ? dt_block_at(ctx, slow_layer, x, both[i], (dt_block_desc){ .recompute = 1 })
                       : dt_linear(x, (dt_tensor *)(uintptr_t)both[i][0], NULL);
        dt_backward(dt_mse(x, dt_input(ctx, DT_F32, DT_SHAPE(4, WIDE), input), 8));
        double middle = dt_host_default()->now(NULL);
        dt_zero_step(zero, 1e-6);
        dt_reset(ctx);
        double took = t->all ? middle - begin : dt_host_default()->now(NULL) - middle;
        if (step > 0 && took < t->step_s) t->step_s = took;
    }
    return dt_error(ctx);
}

static double fastest_step(int all, double disk_s, double compute_s) {
    fake disk;
    timing t = { all, disk_s, compute_s, 0 };
    fake_make(&disk);
    disk.io.sync_and_evict = NULL; /* an optional entry */
    disk.nap_s = disk_s;
    CHECK(dt_run((dt_run_desc){ .ranks = 1, .io = &disk.io, .timeout_s = 30 }, slow_main, &t) ==
          DT_OK);
    fake_drop(&disk);
    return t.step_s;
}

/* Other load on the machine can only make a run slower, so the fastest of several rounds counts. */
static void test_overlap(int all) {
    enum { ROUNDS = 10, MOST_ROUNDS = 30 };
    double compute_s = all ? 3 * slow_s : 2 * slow_s, compute = 1e9, io = 1e9, both = 1e9;
    int round = 0, hidden = 0;
    while (round++ < MOST_ROUNDS && !hidden) {
        compute = fmin(compute, fastest_step(all, 0, compute_s));
        io = fmin(io, fastest_step(all, slow_s, 0));
        both = fmin(both, fastest_step(all, slow_s, compute_s));
        /* under load a step takes a few scheduling gaps longer */
        double less = fmin(compute, io), slack_s = round < ROUNDS ? 0 : 8 * jitter_s();
        hidden = both <= fmax(compute, io) + 0.3 * less + fmin(slack_s, 0.3 * less);
    }
    printf("%s: %.1f ms of computation, %.1f ms of disk time, %.1f ms together\n",
        all ? "forward and backward, all on disk" : "update, state on disk", 1e3 * compute,
        1e3 * io, 1e3 * both);
    CHECK(io > 1.8 * LAYERS * slow_s && compute > (1 + all) * LAYERS * compute_s);
    CHECK_MSG(
        hidden, "not overlapped: computation %g s, disk %g s, together %g s", compute, io, both);
}

// ==== (e) A device ==============================================================================

typedef struct device {
    dt_kernels table;
    int live;
    long moves;
    size_t bytes;
} device;

static void *device_alloc(void *user, size_t bytes) {
    device *d = (device *)user;
    __atomic_add_fetch(&d->live, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&d->bytes, bytes, __ATOMIC_SEQ_CST);
    return dt_host_default()->alloc(NULL, bytes, DT_MEM_PARAMS);
}

static void device_free(void *user, void *p, size_t bytes) {
    device *d = (device *)user;
    if (p) __atomic_sub_fetch(&d->live, 1, __ATOMIC_SEQ_CST);
    dt_host_default()->free(NULL, p, bytes, DT_MEM_PARAMS);
}

static device *moving; /* because d.table.move has no user argument */

static dt_status device_move(void *dst, const void *src, size_t bytes, void *stream) {
    __atomic_add_fetch(&moving->moves, 1, __ATOMIC_SEQ_CST);
    return dt_kernels_cpu()->move(dst, src, bytes, stream);
}

static dt_status device_update_forbidden(const dt_adamw_args *a, void *stream) {
    (void)a, (void)stream;
    return DT_ERR_UNSUPPORTED;
}

static void test_device(void) {
    for (int code = 0; code < 12; code++) {
        device d = { *dt_kernels_cpu(), 0, 0, 0 };
        job base, *j;
        draw(0, &base);
        base.dtype = code % 3 == 0 ? DT_F32 : code % 3 == 1 ? DT_BF16 : DT_F64;
        base.zero.stage = code / 3;
        base.zero.shard_group = base.zero.tree = 0;
        base.mesh.dp = base.ranks = 2;
        base.mesh.tp = 1;
        CHECK(run_job(&base, 60).status == DT_OK);
        j = job_like(&base);
        j->zero.offload_optim = "cpu";
        j->zero.offload_params = code / 3 == 3 ? "cpu" : NULL;
        d.table.user = moving = &d;
        d.table.alloc = device_alloc;
        d.table.free = device_free;
        d.table.move = device_move;
        d.table.adamw = device_update_forbidden; /* an update on the device is reported */
        dt_report report;
        dt_host quiet = *dt_host_default();
        quiet.log = silent;
        dt_run((dt_run_desc){ .ranks = 2,
                   .timeout_s = 60,
                   .host = &quiet,
                   .kernels = &d.table,
                   .report = &report },
            offload_main, j);
        CHECK_MSG(report.status == DT_OK, "%s", report.text);
        same_seen(&base, j, "a device's state in host memory");
        CHECK_MSG(
            d.live == 0 && d.moves > 0 && d.bytes > 0, "%d device blocks were not freed", d.live);
        for (int r = 0; r < 2; r++) {
            const dt_memory *m = &j->rank[r].memory;
            CHECK(m->peak[DT_MEM_OPTIM] == 0 &&
                  m->live[DT_MEM_HOST] > base.rank[r].memory.live[DT_MEM_OPTIM]);
        }
        free(j);
    }
}

int main(int argc, char **argv) {
    snprintf(folder, sizeof folder, "/tmp/dt_test_offload.XXXXXX");
    if (!CHECK(mkdtemp(folder) != NULL)) return check_done("test_offload");
    snprintf(wrong_folder, sizeof wrong_folder, "%s/nothing", folder);
    test_same_bits();
    test_load();
    test_faulty_calls(argc > 1 && strcmp(argv[1], "full") == 0);
    test_no_folder();
    for (int k = 0; k < 4; k++) test_no_answer(k % 2 ? PREAD : PWRITE, k < 2 ? 3 : 12);
    test_no_answer(PREAD, 0);
    test_overlap(0);
    test_overlap(1);
    test_device();
    CHECK(rmdir(folder) == 0); /* the folder is empty, even after failed runs */
    return check_done("test_offload");
}
