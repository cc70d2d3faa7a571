/* 10_context_parallel.c - context parallelism: attention over sequences that are divided among four
   ranks, in four variants

   What you learn: context parallelism. Each of c ranks holds T/c tokens of every sequence. The
       projections to q, k and v need only the rank's own tokens, but a query attends to the keys of
       all ranks. The program compares four ways to compute this attention:
           ring        ring attention (arXiv:2310.01889): blocks of keys and values travel around a
                       ring of the ranks; each rank computes with one block while it receives the
                       next block
           zigzag      ring attention in which each rank holds one early and one late piece of the
                       sequence, so that a causal mask leaves every rank the same work
           all-gather  every rank gathers all keys and values, then computes; it keeps the gathered
                       keys and values for the backward pass
           Ulysses     (arXiv:2309.14509) an all-to-all gives each rank all tokens of H/c heads; the
                       rank computes these heads, and a second all-to-all gives it the results of
                       all heads for its own tokens
       Each rank applies the weights to only T/c tokens, so the weights' gradients are summed over
       cp, the group of these ranks.
   Run: cc -O3 examples/10_context_parallel.c -o 10_context_parallel -lm -lpthread
       && ./10_context_parallel
   What you see: a map that shows which rank computes which block of the attention matrix. Then a
       table that shows for each variant the load of the busiest rank, the differences from a run on
       one rank, and the bytes sent.
   Think about: before you run, which of the 4 ranks computes most in the variant `ring`, and how
       much more than the mean? Which variant sends the fewest bytes when c is large? */
#define DT_IMPLEMENTATION
#include "../dt_parallel.h"
#include <math.h>
#include <stdio.h>

/* H query heads share K key/value heads (grouped-query attention); D is the width of a head */
enum { RANKS = 4, B = 2, T = 64, H = 8, K = 4, D = 8, C = H * D };
enum { WEIGHTS = (H + 2 * K) * D * C + C * C, PIECES = 2 * RANKS };

/* One run and its results: the outputs y and the gradients of x, both in the order of the sequence,
   and the gradients of the weights. */
typedef struct job {
    const char *name;
    int kind; /* DT_CP_* */
    float y[B][T][C], dx[B][T][C], dw[WEIGHTS];
    /* bytes that each rank sends over cp in the forward and in the backward pass */
    size_t forward, backward;
} job;

/* Returns the k-th number of a fixed pseudo-random sequence in [-1, 1). */
static float random_number(uint32_t k) {
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

/* The attention layer: x (B,t,C) -> (B,t,C), where t = T/c is the number of this rank's tokens per
   sequence. Without context parallelism the model calls dt_attention(q, k, v, ..) instead of
   dt_cp_attention. */
static dt_tensor *layer_forward(const layer *l, dt_tensor *x, dt_cp *context) {
    dt_tensor *q = dt_linear(x, l->q, NULL), *k = dt_linear(x, l->k, NULL),
              *v = dt_linear(x, l->v, NULL);
    dt_tensor *heads = dt_cp_attention(q, k, v, context); /* (B,t,H,D) */
    return heads ? dt_linear(dt_reshape(heads, DT_SHAPE(B, heads->shape.d[1], C)), l->o, NULL)
                 : NULL;
}

/* Copies this rank's tensor `from` (B,t,C) into `to`, each token to its position in the sequence.
   The ranks are threads and write into the same array. */
static void place_tokens(const job *j, dt_comm *cp, const void *from, float (*to)[T][C]) {
    int c = dt_comm_size(cp), t = T / c;
    for (int i = 0; from && i < B * t * C; i++)
        to[i / C / t][dt_cp_token(j->kind, T, c, dt_comm_rank(cp), i / C % t)][i % C] =
            ((const float *)from)[i];
}

static dt_status run(dt_ctx *ctx, void *user) { /* runs on every rank */
    job *j = (job *)user;
    dt_mesh mesh = dt_mesh_make(ctx, (dt_mesh_desc){ .cp = dt_comm_size(dt_world(ctx)) });
    layer l = layer_make(ctx);
    int t = T / mesh.sizes.cp;
    float local_x[B * T * C], output_grads[B * T * C];
    if (dt_buckets_make(ctx, (dt_buckets_desc){ 0 }) != DT_OK) return dt_error(ctx);
    for (int i = 0; i < B * t * C; i++) {
        int64_t token = dt_cp_token(j->kind, T, mesh.sizes.cp, mesh.coord.cp, i / C % t);
        uint32_t element = (uint32_t)((i / C / t * T + token) * C + i % C);
        local_x[i] = random_number(element);
        output_grads[i] = random_number(element + B * T * C);
    }
    dt_cp *context =
        dt_cp_make(ctx, mesh.cp, (dt_cp_desc){ .kind = j->kind, .batch = B, .tokens = T });
    dt_tensor *x = dt_require_grad(dt_input(ctx, DT_F32, DT_SHAPE(B, t, C), local_x));
    size_t start = dt_comm_bytes(ctx, DT_AXIS_CP);
    dt_tensor *y = layer_forward(&l, x, context);
    size_t middle = dt_comm_bytes(ctx, DT_AXIS_CP);
    /* The gradient of sum(y * g) with respect to y is g, so y gets the gradient output_grads. */
    dt_backward(
        dt_sum_over(dt_mul(y, dt_input(ctx, DT_F32, DT_SHAPE(B, t, C), output_grads)), DT_ALL));
    size_t end = dt_comm_bytes(ctx, DT_AXIS_CP);
    if (dt_error(ctx) != DT_OK) return dt_error(ctx);
    /* the only bucket holds q, k, v and o in this order */
    dt_bucket *weights = dt_bucket_get(ctx, 0);
    dt_all_reduce(mesh.cp, weights->grad, weights->grad, WEIGHTS, DT_F32, DT_SUM);
    place_tokens(j, mesh.cp, y->data, j->y);
    place_tokens(j, mesh.cp, x->grad, j->dx);
    if (dt_ctx_rank(ctx) > 0) return dt_error(ctx);
    for (int i = 0; i < WEIGHTS; i++) j->dw[i] = ((const float *)weights->grad)[i];
    j->forward = middle - start;
    j->backward = end - middle;
    return dt_error(ctx);
}

/* Returns the largest difference between n elements of a and b, divided by the largest |b|. */
static double relative_difference(const float *a, const float *b, int n) {
    double max = 0, size = 0;
    for (int i = 0; i < n; i++)
        max = fmax(max, fabs((double)a[i] - b[i])), size = fmax(size, fabs((double)b[i]));
    return max / size;
}

/* Returns the rank that holds this token. That rank computes the attention of the token's query. */
static int owner(int kind, int token) {
    for (int at = 0; at < T; at++)
        if (dt_cp_token(kind, T, RANKS, at / (T / RANKS), at % (T / RANKS)) == token)
            return at / (T / RANKS);
    return -1;
}

/* Returns the number of (query, key) pairs that the busiest rank computes, per head and sequence.
   Token t attends to t + 1 keys. With Ulysses each rank computes all pairs, but only for H/c of the
   H heads, so the result is 1/c of the pairs. */
static int busiest(int kind) {
    int pairs[RANKS] = { 0 }, max = 0;
    for (int t = 0; t < T; t++) pairs[owner(kind, t)] += t + 1;
    for (int r = 0; r < RANKS; r++) max = pairs[r] > max ? pairs[r] : max;
    return kind == DT_CP_ULYSSES ? T * (T + 1) / 2 / RANKS : max;
}

static void draw(void) {
    printf("The rank that computes each block of the attention matrix: a row is a piece of the "
           "queries, a column a piece of the keys, a piece is %d tokens.\n"
           "    ring, all-gather      zigzag\n",
        T / PIECES);
    for (int at = 0; at < PIECES * 2 * PIECES; at++) {
        int q = at / PIECES / 2, zigzag = at / PIECES % 2, k = at % PIECES;
        int rank = owner(zigzag ? DT_CP_ZIGZAG : DT_CP_RING, q * (T / PIECES));
        printf("%s %c", k ? "" : zigzag ? "      " : "    ", k > q ? '.' : '0' + rank);
        if (zigzag && k == PIECES - 1) printf("\n");
    }
    printf("Ulysses: rank r computes all pieces, for heads %d r .. %d r + %d\n", H / RANKS,
        H / RANKS, H / RANKS - 1);
}

int main(void) {
    static job one, jobs[] = { { .name = "ring", .kind = DT_CP_RING },
        { .name = "zigzag", .kind = DT_CP_ZIGZAG },
        { .name = "all-gather", .kind = DT_CP_ALLGATHER },
        { .name = "Ulysses", .kind = DT_CP_ULYSSES } };
    /* n: bytes of one rank's keys and values; exchange: bytes that one rank sends with Ulysses */
    const size_t n = 2 * B * K * D * (T / RANKS) * sizeof(float), others = RANKS - 1;
    const size_t exchange = B * D * (T / RANKS) * (2 * H + 2 * K) * sizeof(float) * others / RANKS;
    double worst = 0;
    /* Use the CPU kernels even in a CUDA build, because the program reads tensor data directly. */
    int ok = dt_run((dt_run_desc){ .ranks = 1, .kernels = dt_kernels_cpu() }, run, &one) == DT_OK;
    draw();
    printf("\n%24s     per   relative difference to one      sent forward    sent backward\n",
        "pairs on the");
    printf("%24s    mean   rank: y       dx       dw        (formula)        (formula)\n",
        "busiest rank");
    for (int i = 0; i < 4; i++) {
        job *j = &jobs[i];
        size_t forward = j->kind == DT_CP_ULYSSES ? exchange : others * n;
        size_t backward = j->kind == DT_CP_RING || j->kind == DT_CP_ZIGZAG ? 2 * forward : forward;
        ok &= dt_run((dt_run_desc){ .ranks = RANKS, .kernels = dt_kernels_cpu() }, run, j) == DT_OK;
        double dy = relative_difference(&j->y[0][0][0], &one.y[0][0][0], B * T * C),
               dw = relative_difference(j->dw, one.dw, WEIGHTS);
        double dx = relative_difference(&j->dx[0][0][0], &one.dx[0][0][0], B * T * C);
        printf("%-12s %11d %7.3f   %7.1e  %7.1e  %7.1e   %6zu (%6zu)  %6zu (%6zu)\n", j->name,
            busiest(j->kind), busiest(j->kind) / (T * (T + 1) / 2.0 / RANKS), dy, dx, dw,
            j->forward, forward, j->backward, backward);
        ok &= j->forward == forward && j->backward == backward;
        worst = fmax(worst, fmax(dy, fmax(dx, dw)));
    }
    ok &= worst < 1e-5;
    printf("%s: outputs and gradients of all four variants equal those of one rank to %.1e\n",
        ok ? "ok" : "WRONG", worst);
    return ok ? 0 : 1;
}
