/* 10_context_parallel.c - one attention whose sequence is cut over four ranks, in four ways:
   context parallelism

   What you learn: each rank has T/c tokens. Projections need nobody else, but a query attends to
   keys of all ranks.
       ring        keys and values go round; each rank computes with what it has while the next part
                   comes
       zigzag      the same; but each rank has one early and one late piece, so that a causal mask
                   leaves all as much
       all-gather  every rank gets all keys and values at once, and keeps them
       Ulysses     tokens are exchanged for heads: each rank has the whole sequence of H/c heads,
                   and goes back after
   Weights saw a part of the tokens on each rank, so their gradients are summed over cp. Predict
   before you run: which of 4 ranks is the busiest, and by how much? Which way sends the least as c
   grows? Run: cc -O3 examples/10_context_parallel.c -o 10_context_parallel -lm -lpthread &&
   ./10_context_parallel */
#define DT_IMPLEMENTATION
#include "../dt_parallel.h"
#include <math.h>
#include <stdio.h>

/* K heads of keys and values serve H of queries */
enum { RANKS = 4, B = 2, T = 64, H = 8, K = 4, D = 8, C = H * D };
enum { WEIGHTS = (H + 2 * K) * D * C + C * C, PIECES = 2 * RANKS };

/* What a run gives: outputs and gradients of x by token in the sequence's own order, gradients of
   the weights. */
typedef struct job {
    const char *name;
    int kind; /* DT_CP_* */
    float y[B][T][C], dx[B][T][C], dw[WEIGHTS];
    /* bytes that rank 0 sends on cp; those of each rank are as many */
    size_t forward, backward;
} job;

/* The k-th of a sequence of numbers that look random, in [-1, 1). */
static float number(uint32_t k) {
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (float)((k ^ (k >> 16)) >> 8) / 8388608.0f - 1;
}

typedef struct layer {
    dt_tensor *q, *k, *v, *o;
} layer;

static layer layer_make(dt_ctx *ctx) {
    dt_tensor *q = dt_param(ctx, "q", DT_SHAPE(H, D, C), DT_NORMAL(0.3));
    dt_tensor *k = dt_param(ctx, "k", DT_SHAPE(K, D, C), DT_NORMAL(0.3));
    dt_tensor *v = dt_param(ctx, "v", DT_SHAPE(K, D, C), DT_NORMAL(0.3));
    return (layer){ q, k, v, dt_param(ctx, "o", DT_SHAPE(C, C), DT_NORMAL(0.3)) };
}

/* x (B,t,C), this rank's t = T/c tokens -> (B,t,C). Without cp it would read dt_attention(q, k, v,
   ..). */
static dt_tensor *layer_forward(const layer *l, dt_tensor *x, dt_context *context) {
    dt_tensor *q = dt_linear(x, l->q, NULL), *k = dt_linear(x, l->k, NULL),
              *v = dt_linear(x, l->v, NULL);
    dt_tensor *heads = dt_context_attention(q, k, v, context); /* (B,t,H,D) */
    return heads ? dt_linear(dt_reshape(heads, DT_SHAPE(B, heads->shape.d[1], C)), l->o, NULL)
                 : NULL;
}

/* A tensor (B,t,C) of this rank to its tokens' places. Ranks are threads: all write into one
   array. */
static void put_tokens(const job *j, dt_comm *cp, const void *from, float (*to)[T][C]) {
    int c = dt_comm_size(cp), t = T / c;
    for (int i = 0; from && i < B * t * C; i++)
        to[i / C / t][dt_context_token(j->kind, T, c, dt_comm_rank(cp), i / C % t)][i % C] =
            ((const float *)from)[i];
}

static dt_status run(dt_ctx *ctx, void *user) { /* every rank runs this */
    job *j = (job *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .cp = dt_comm_size(dt_world(ctx)) });
    layer l = layer_make(ctx);
    int t = T / mesh.sizes.cp;
    float mine[B * T * C], slopes[B * T * C];
    if (dt_buckets_make(ctx, (dt_buckets_desc){ 0 }) != DT_OK) return dt_error(ctx);
    /* token i / C of this rank is which of the sequence? */
    for (int i = 0; i < B * t * C; i++) {
        int64_t token = dt_context_token(j->kind, T, mesh.sizes.cp, mesh.at.cp, i / C % t);
        uint32_t place = (uint32_t)((i / C / t * T + token) * C + i % C);
        mine[i] = number(place);
        slopes[i] = number(place + B * T * C);
    }
    dt_context *context = dt_context_make(
        ctx, mesh.cp, (dt_context_desc){ .kind = j->kind, .batch = B, .tokens = T });
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(B, t, C), mine));
    size_t start = dt_comm_bytes(ctx, DT_AXIS_CP);
    dt_tensor *y = layer_forward(&l, x, context);
    size_t middle = dt_comm_bytes(ctx, DT_AXIS_CP);
    dt_backward(dt_sum_over(dt_mul(y, dt_input(ctx, DT_F32, DT_SHAPE(B, t, C), slopes)), DT_ALL));
    size_t end = dt_comm_bytes(ctx, DT_AXIS_CP);
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    /* q, k, v and o, one after the other */
    dt_bucket *weights = dt_bucket_get(ctx, 0);
    dt_all_reduce(mesh.cp, weights->grad, weights->grad, WEIGHTS, DT_F32, DT_SUM);
    put_tokens(j, mesh.cp, y->data, j->y);
    put_tokens(j, mesh.cp, x->grad, j->dx);
    if (dt_ctx_rank(ctx) > 0) return dt_error(ctx);
    for (int i = 0; i < WEIGHTS; i++) j->dw[i] = ((const float *)weights->grad)[i];
    j->forward = middle - start;
    j->backward = end - middle;
    return dt_error(ctx);
}

/* The largest difference of n numbers, as a share of the largest of b. */
static double apart(const float *a, const float *b, int n) {
    double most = 0, size = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, fabs((double)a[i] - b[i])), size = fmax(size, fabs((double)b[i]));
    return most / size;
}

/* Which rank has token i of the sequence, and so computes all pairs of its query. */
static int owner(int kind, int token) {
    for (int at = 0; at < T; at++)
        if (dt_context_token(kind, T, RANKS, at / (T / RANKS), at % (T / RANKS)) == token)
            return at / (T / RANKS);
    return -1;
}

/* (query, key) pairs that the busiest rank computes for a head of a sequence. Token t sees t + 1
   keys. With Ulysses each rank has all pairs, but of H/c heads. */
static int busiest(int kind) {
    int pairs[RANKS] = { 0 }, most = 0;
    for (int t = 0; t < T; t++) pairs[owner(kind, t)] += t + 1;
    for (int r = 0; r < RANKS; r++) most = pairs[r] > most ? pairs[r] : most;
    return kind == DT_CP_ULYSSES ? T * (T + 1) / 2 / RANKS : most;
}

static void draw(void) {
    printf("Which rank computes queries of a piece (down) with keys of a piece (across); a piece "
           "is %d tokens.\n"
           "    ring, all-gather      zigzag\n",
        T / PIECES);
    for (int at = 0; at < PIECES * 2 * PIECES; at++) {
        int q = at / PIECES / 2, zigzag = at / PIECES % 2, k = at % PIECES;
        int rank = owner(zigzag ? DT_CP_ZIGZAG : DT_CP_RING, q * (T / PIECES));
        printf("%s %c", k ? "" : zigzag ? "      " : "    ", k > q ? '.' : '0' + rank);
        if (zigzag && k == PIECES - 1) printf("\n");
    }
    printf("Ulysses: rank r computes all of them, of heads %d r .. %d r + %d\n", H / RANKS,
        H / RANKS, H / RANKS - 1);
}

int main(void) {
    static job one, jobs[] = { { .name = "ring", .kind = DT_CP_RING },
        { .name = "zigzag", .kind = DT_CP_ZIGZAG },
        { .name = "all-gather", .kind = DT_CP_ALLGATHER },
        { .name = "Ulysses", .kind = DT_CP_ULYSSES } };
    /* n: as in section 4 */
    const size_t n = 2 * B * K * D * (T / RANKS) * sizeof(float), others = RANKS - 1;
    const size_t exchange = B * D * (T / RANKS) * (2 * H + 2 * K) * sizeof(float) * others / RANKS;
    double worst = 0;
    /* The CPU, in a build for GPUs too: we look at data. */
    int ok = dt_run((dt_run_desc){ .ranks = 1, .kernels = dt_kernels_cpu() }, run, &one) == DT_OK;
    draw();
    printf("\n%24s  to the   differs from one rank in      sends forward     and backward\n",
        "pairs of the busiest");
    printf("%24s    mean   outputs  inputs' weights'          (formula)        (formula)\n", "");
    for (int i = 0; i < 4; i++) {
        job *j = &jobs[i];
        size_t forward = j->kind == DT_CP_ULYSSES ? exchange : others * n;
        size_t backward = j->kind == DT_CP_RING || j->kind == DT_CP_ZIGZAG ? 2 * forward : forward;
        ok &= dt_run((dt_run_desc){ .ranks = RANKS, .kernels = dt_kernels_cpu() }, run, j) == DT_OK;
        double dy = apart(&j->y[0][0][0], &one.y[0][0][0], B * T * C),
               dw = apart(j->dw, one.dw, WEIGHTS);
        double dx = apart(&j->dx[0][0][0], &one.dx[0][0][0], B * T * C);
        printf("%-12s %11d %7.3f   %7.1e  %7.1e  %7.1e   %6zu (%6zu)  %6zu (%6zu)\n", j->name,
            busiest(j->kind), busiest(j->kind) / (T * (T + 1) / 2.0 / RANKS), dy, dx, dw,
            j->forward, forward, j->backward, backward);
        ok &= j->forward == forward && j->backward == backward;
        worst = fmax(worst, fmax(dy, fmax(dx, dw)));
    }
    ok &= worst < 1e-5;
    printf(
        "%s: four ways, outputs and gradients of one rank to %.1e\n", ok ? "ok" : "WRONG", worst);
    return ok ? 0 : 1;
}
