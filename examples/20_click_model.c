/* 20_click_model.c - DeepFM (arXiv:1703.04247) on a parameter server: predicts whether a user
   clicks, from 26 categories

   What you learn: why recommenders use a parameter server. A step of 256 samples touches a few
       hundred of the table's rows, so workers pull these rows only and push gradients of these rows
       only. The model adds a linear part, the products of all pairs of embeddings (a factorization
       machine) and an MLP, whose weights the servers hold too, in runs of 1,024 elements. The data
       are drawn from a model that we know, so the best possible AUC, Bayes, is known exactly. (AUC
       is the probability that a random click has a higher prediction than a random non-click.)
   Run: cc -O3 examples/20_click_model.c -o 20_click_model -lm -lpthread && ./20_click_model
        ./20_click_model write 100000 prints that many samples in the text format of the Criteo data
        sets, for build/train_ctr --data - (a third argument: the number of the first sample);
        with bayes instead of write, the Bayes AUC of these samples
   What you see: AUC rises towards Bayes, which more samples would come nearer to; pulls that are up
       to 2 steps stale cost little; rows and bytes of the servers, as their tables count them.
   Think about: a server answers a pull of 500 rows of 8 numbers. How many bytes would data
       parallelism send for the same table, with one all-reduce of its gradient? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* samples in training, in a step of one worker, in the test; slots of V categories; width of an
   embedding and of the MLP's hidden layer; sizes of the true model's vectors */
enum { TRAIN = 200000, B = 128, TEST = 20000, SLOTS = 26, V = 400, K = 8, HIDDEN = 32, TRUE_K = 4 };
enum { WORKERS = 2, SERVERS = 1, REPORTS = 5 };

// ---- the stream: sample i is a function of i ----

/* The c-th random number in (0,1) of a counter-based generator: a function of c alone. */
static double uniform(uint64_t c) {
    c = (c + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    c = (c ^ (c >> 27)) * 0x94d049bb133111ebu;
    c = (c ^ (c >> 31)) * 0xbf58476d1ce4e5b9u;
    return ((double)((c ^ (c >> 29)) >> 12) + 0.5) / 4503599627370496.0;
}
static double normal(uint64_t c) {
    return sqrt(-2 * log(uniform(2 * c))) * cos(6.283185307179586 * uniform(2 * c + 1));
}

static double cdf[V];                                                   /* of a slot's category */
static float weight[SLOTS * V], vector[SLOTS * V][TRUE_K];              /* the true model */
enum { WEIGHTS = 1, VECTORS = 1000000, SAMPLES = 1 << 30, DRAWS = 32 }; /* counters of uniform */

/* Categories follow Zipf's law with exponent 1.15: a few are frequent and most are rare. The last
   category stands for all beyond V. */
static void stream_make(void) {
    double zeta = pow(V, -0.15) / 0.15 + pow(V, -1.15) / 2, sum = 0;
    for (int k = 1; k < V; k++) zeta += pow(k, -1.15);
    for (int k = 0; k < V; k++) cdf[k] = sum += k + 1 < V ? pow(k + 1, -1.15) / zeta : 1 - sum;
    for (int i = 0; i < SLOTS * V; i++) {
        weight[i] = (float)(0.18 * normal(WEIGHTS + (uint64_t)i));
        for (int d = 0; d < TRUE_K; d++)
            vector[i][d] = (float)(0.16 * normal(VECTORS + (uint64_t)(i * TRUE_K + d)));
    }
}

/* Draws sample i: key s is in [s V, (s+1) V). Returns the probability of a click; *label is drawn
   from it. */
static double sample(int64_t i, uint64_t *keys, float *label) {
    uint64_t c = SAMPLES + (uint64_t)i * DRAWS;
    double y = -1.6, sum[TRUE_K] = { 0 }, squares = 0;
    for (int s = 0; s < SLOTS; s++) {
        double u = uniform(c + (uint64_t)s);
        int lo = 0, hi = V - 1; /* the first category with u < cdf */
        while (lo < hi) (u < cdf[(lo + hi) / 2]) ? (hi = (lo + hi) / 2) : (lo = (lo + hi) / 2 + 1);
        int k = s * V + lo;
        keys[s] = (uint64_t)k;
        y += weight[k];
        for (int d = 0; d < TRUE_K; d++) {
            sum[d] += vector[k][d];
            squares += vector[k][d] * vector[k][d];
        }
    }
    for (int d = 0; d < TRUE_K; d++) y += sum[d] * sum[d] / 2;
    double p = 1 / (1 + exp(squares / 2 - y));
    *label = uniform(c + SLOTS) < p;
    return p;
}

static int stream_write(int64_t first, int64_t n) {
    for (int64_t i = first; i < first + n; i++) {
        uint64_t keys[SLOTS];
        float label;
        sample(i, keys, &label);
        printf("%d\t\t\t\t\t\t\t\t\t\t\t\t\t", label > 0);
        for (int s = 0; s < SLOTS; s++) printf("\t%llx", (unsigned long long)keys[s]);
        printf("\n");
    }
    return fflush(stdout) != 0;
}

// ---- AUC ----

typedef struct scored {
    double score, weight; /* weight: the label, or for Bayes the probability of a click */
} scored;
static int by_score(const void *a, const void *b) {
    double x = ((const scored *)a)->score, y = ((const scored *)b)->score;
    return (x > y) - (x < y);
}
static double auc(scored *s, int n) {
    double pairs = 0, clicks = 0, others = 0;
    qsort(s, (size_t)n, sizeof *s, by_score);
    for (int i = 0; i < n; i++) {
        pairs += s[i].weight * others;
        others += 1 - s[i].weight;
        clicks += s[i].weight;
    }
    return pairs / (clicks * others);
}

/* The largest AUC that any model can expect on n samples from number `first` on: scores and weights
   are the true probabilities. */
static double bayes(int64_t first, int n) {
    scored *s = (scored *)malloc((size_t)n * sizeof *s);
    uint64_t keys[SLOTS];
    float label;
    for (int i = 0; i < n && s; i++) s[i].score = s[i].weight = sample(first + i, keys, &label);
    double best = s ? auc(s, n) : 0;
    free(s);
    return best;
}

// ---- the model ----

typedef struct result {
    double auc[REPORTS], bytes, rows;
    int64_t stale[DT_PS_HISTOGRAM];
} result;
typedef struct run {
    int stale;  /* the bound of staleness, in steps; 0 is synchronous training */
    result out; /* filled in by worker 0 */
} run;
typedef struct model {
    dt_ps *ps;
    int linear, embedding, up, up_bias, down, bias; /* tables */
} model;

static model model_make(dt_ctx *ctx, int stale) {
    dt_ps_desc desc = { .servers = SERVERS, .mode = DT_PS_SSP, .staleness = stale };
    model m = { .ps = dt_ps_make(ctx, desc) };
    dt_table_desc d = { .optimizer = DT_TABLE_ADAGRAD, .initial_accumulator = 1e-5 };
    d.name = "linear", d.width = 1, d.init = DT_ZEROS;
    m.linear = dt_ps_table(m.ps, d);
    d.name = "embedding", d.width = K, d.init = DT_NORMAL(0.01);
    m.embedding = dt_ps_table(m.ps, d);
    d.name = "up", d.init = DT_NORMAL(0.1); /* the width of dense tables is chosen by dt */
    m.up = dt_ps_dense(m.ps, d, DT_SHAPE(HIDDEN, SLOTS * K));
    d.name = "down";
    m.down = dt_ps_dense(m.ps, d, DT_SHAPE(1, HIDDEN));
    d.name = "up_bias", d.init = DT_ZEROS;
    m.up_bias = dt_ps_dense(m.ps, d, DT_SHAPE(HIDDEN));
    d.name = "bias";
    m.bias = dt_ps_dense(m.ps, d, DT_SHAPE(1));
    return m;
}

/* keys (n,26) -> logits (n) */
static dt_tensor *forward(const model *m, const uint64_t *keys, int n) {
    dt_tensor *e = dt_ps_embedding(m->ps, m->embedding, keys, DT_SHAPE(n, SLOTS)); /* (n,26,K) */
    dt_tensor *linear = dt_ps_embedding(m->ps, m->linear, keys, DT_SHAPE(n, SLOTS));
    dt_tensor *y = dt_sum_over(dt_reshape(linear, DT_SHAPE(n, SLOTS)), 1);
    /* sum over pairs of <e_i, e_j> = ((sum e)^2 - sum e^2) / 2 */
    dt_tensor *sum = dt_sum_over(e, 1), *squares = dt_sum_over(dt_mul(e, e), 1);
    y = dt_add(y, dt_affine(dt_sum_over(dt_sub(dt_mul(sum, sum), squares), 1), 0.5, 0));
    dt_tensor *up = dt_ps_dense_read(m->ps, m->up), *up_bias = dt_ps_dense_read(m->ps, m->up_bias);
    dt_tensor *down = dt_ps_dense_read(m->ps, m->down), *bias = dt_ps_dense_read(m->ps, m->bias);
    dt_tensor *x = dt_reshape(e, DT_SHAPE(n, SLOTS * K));
    dt_tensor *deep = dt_linear(dt_relu(dt_linear(x, up, up_bias)), down, bias);
    return dt_add(y, dt_reshape(deep, DT_SHAPE(n)));
}

static double test(dt_ctx *ctx, const model *m) {
    static scored s[TEST];
    dt_no_grad(ctx, 1);
    for (int at = 0; at < TEST && dt_error(ctx) == DT_OK; at += B) {
        uint64_t keys[B * SLOTS];
        float labels[B], logits[B];
        int n = TEST - at < B ? TEST - at : B;
        for (int i = 0; i < n; i++) sample(TRAIN + at + i, keys + i * SLOTS, &labels[i]);
        dt_read(forward(m, keys, n), logits);
        dt_reset(ctx);
        for (int i = 0; i < n; i++) s[at + i] = (scored){ logits[i], labels[i] };
    }
    dt_no_grad(ctx, 0);
    return auc(s, TEST);
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    run *r = (run *)user;
    int rank = dt_ctx_rank(ctx), steps = TRAIN / B / WORKERS;
    model m = model_make(ctx, r->stale);
    double held[2] = { 0, 0 };
    if (dt_ps_is_server(m.ps)) {
        dt_ps_serve(m.ps);
        for (int t = m.linear; t <= m.bias; t++) {
            dt_table_stats s = dt_table_info(dt_ps_owned(m.ps, t));
            held[0] += (double)(s.row_bytes + s.state_bytes + s.index_bytes);
            held[1] += (double)s.rows;
        }
    } else {
        for (int step = 0; step < steps && dt_error(ctx) == DT_OK; step++) {
            uint64_t keys[B * SLOTS];
            float labels[B];
            for (int i = 0; i < B; i++)
                sample(((int64_t)step * WORKERS + rank) * B + i, keys + i * SLOTS, &labels[i]);
            dt_tensor *want = dt_input(ctx, DT_F32, DT_SHAPE(B), labels);
            dt_backward(dt_bce_with_logits(forward(&m, keys, B), want, B * WORKERS));
            dt_reset(ctx);
            dt_ps_step(m.ps, 0.05);
            if ((step + 1) % (steps / REPORTS) == 0 && rank == 0)
                r->out.auc[(step + 1) / (steps / REPORTS) - 1] = test(ctx, &m);
        }
        dt_ps_end(m.ps);
        if (rank == 0) memcpy(r->out.stale, dt_ps_info(m.ps).staleness, sizeof r->out.stale);
    }
    dt_sum_doubles(dt_world(ctx), held, 2);
    if (rank == 0) r->out.bytes = held[0], r->out.rows = held[1];
    return dt_error(ctx);
}

int main(int argc, char **argv) {
    static run runs[2] = { { .stale = 0 }, { .stale = 2 } };
    int ok = 1;
    stream_make();
    int64_t n = argc > 2 ? atoll(argv[2]) : TEST, first = argc > 3 ? atoll(argv[3]) : TRAIN;
    if (argc > 2 && strcmp(argv[1], "write") == 0) return stream_write(argc > 3 ? first : 0, n);
    double best = bayes(first, (int)n), *last = runs[0].out.auc + REPORTS - 1;
    printf("Bayes AUC of %d new samples: %.4f\n", (int)n, best);
    if (argc > 2) return 0;
    for (int k = 0; k < 2; k++) {
        if (dt_run((dt_run_desc){ .ranks = WORKERS + SERVERS }, train, &runs[k]) != DT_OK) return 1;
        printf("%s  AUC after each %d %% of the samples:", k ? "ssp:2" : "sync ", 100 / REPORTS);
        for (int i = 0; i < REPORTS; i++) printf(" %.4f", runs[k].out.auc[i]);
        printf("\n       servers hold %.0f rows in %.2f MB; pulls that were n steps stale:",
            runs[k].out.rows, runs[k].out.bytes / 1e6);
        for (int i = 0; i < DT_PS_HISTOGRAM; i++)
            if (runs[k].out.stale[i]) printf(" %d: %lld", i, (long long)runs[k].out.stale[i]);
        for (int i = runs[k].stale + 1; i < DT_PS_HISTOGRAM; i++) ok &= !runs[k].out.stale[i];
        printf("\n");
    }
    double apart = fabs(*last - runs[1].out.auc[REPORTS - 1]);
    ok &= *last > 0.735 && *last < best && apart < 0.02;
    printf("%s: sync is %.4f below Bayes; ssp and sync differ by %.4f\n", ok ? "ok" : "WRONG",
        best - *last, apart);
    return !ok;
}
