/* 18_classify_text.c - an encoder that classifies sentences, trained with data parallelism

   What you learn: data parallelism, in the program with which tutorials introduce it. A small BERT
       (arXiv:1810.04805) decides whether a sentence is praise. Each token attends to the tokens
       before and after it. The first token, [cls], belongs to no word; the classifier reads only
       what the layers have collected there. Sentences have unequal lengths: short ones are filled
       up with [pad], and no word may attend to [pad]. The calls and their counterparts in DDP:

           torchrun, init_process_group        dt_run
           DistributedSampler, set_epoch       dt_sampler_make, dt_sampler_set_epoch
           DistributedDataParallel, AdamW      dt_zero_make
           loss.backward(), optimizer.step()   dt_backward, dt_zero_step
           model.eval(), torch.no_grad         dt_no_grad
           all_reduce of a metric              dt_sum_doubles

   Run: cc -O3 examples/18_classify_text.c -o 18_classify_text -lm -lpthread && ./18_classify_text
   What you see: the accuracy on new sentences rises from that of guessing to nearly 100 %, and four
       ranks have the losses of one rank. "was not dull" is praise, and after "but" only the rest
       counts, so no single word decides.
   Think about: a sampler gives every rank the same number of samples, and repeats some if it must.
       Why does the evaluation below not use one? */
#define DT_IMPLEMENTATION
#include "../dt_zero.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* TRAIN sentences in an epoch, TEST new ones, B in a step; T tokens; width C, H heads of width D,
   MLP of width F, L layers; SHOWN new sentences are printed */
enum { EPOCHS = 6, TRAIN = 1024, TEST = 250, B = 32, T = 12, C = 32, H = 4, D = 8, F = 64, L = 2 };
enum { PAD, CLS, SHOWN = 4, WORDS = 30 };

static const char *const words[WORDS] = { "[pad]", "[cls]", "the", "this", "my", "their", "film",
    "book", "song", "play", "meal", "talk", "was", "but", "not", "never", "hardly", "very",
    "really", "so", "good", "great", "lovely", "clever", "witty", "bad", "poor", "dull", "awful",
    "boring" };

typedef struct layer {
    dt_tensor *q, *k, *v, *out, *gain[2], *bias[2], *up, *up_bias, *down, *down_bias;
} layer;
typedef struct model {
    dt_tensor *word, *position, *gain, *bias, *head, *head_bias;
    layer layer[L];
} model;
typedef struct result {
    double loss[EPOCHS], accuracy[EPOCHS];
    int say[SHOWN]; /* 1: the model calls the sentence praise */
} result;

/* Returns a number in 0 .. n-1 and changes *state. */
static int random_below(uint32_t *state, int n) {
    uint32_t k = *state += 0x9e3779b9u;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    k = (k ^ (k >> 16)) * 0x45d9f3bu;
    return (int)((k ^ (k >> 16)) % (uint32_t)n);
}

/* Writes sentence `number` to ids (T). Returns 1 if it is praise. */
static int sentence(int number, int32_t *ids) {
    uint32_t state = (uint32_t)number * 7919u;
    int n = 0, praise = 0, clauses = 1 + random_below(&state, 2);
    for (int i = 0; i < T; i++) ids[i] = PAD; /* the numbers below are places in words[] */
    ids[n++] = CLS;
    ids[n++] = 2 + random_below(&state, 4);
    ids[n++] = 6 + random_below(&state, 6);
    for (int c = 0; c < clauses; c++) { /* "was not very good but really dull" */
        int negation = random_below(&state, 6), stress = random_below(&state, 6),
            opinion = random_below(&state, 10);
        ids[n++] = c ? 13 : 12;
        if (negation < 3) ids[n++] = 14 + negation;
        if (stress < 3) ids[n++] = 17 + stress;
        ids[n++] = 20 + opinion;
        praise = (opinion < 5) != (negation < 3);
    }
    return praise;
}

static void model_make(dt_ctx *ctx, model *m) {
    dt_init w = DT_NORMAL(0.1);
    m->word = dt_param(ctx, "word", DT_SHAPE(WORDS, C), w);
    m->position = dt_param(ctx, "position", DT_SHAPE(T, C), w);
    m->gain = dt_param(ctx, "norm.gain", DT_SHAPE(C), DT_ONES);
    m->bias = dt_param(ctx, "norm.bias", DT_SHAPE(C), DT_ZEROS);
    m->head = dt_param(ctx, "head", DT_SHAPE(2, C), w);
    m->head_bias = dt_param(ctx, "head_bias", DT_SHAPE(2), DT_ZEROS);
    for (int l = 0; l < L; l++) {
        layer *p = &m->layer[l];
        char prefix[16];
        snprintf(prefix, sizeof prefix, "layer.%d.", l);
        dt_scope(ctx, prefix);
        p->q = dt_param(ctx, "q", DT_SHAPE(H, D, C), w);
        p->k = dt_param(ctx, "k", DT_SHAPE(H, D, C), w);
        p->v = dt_param(ctx, "v", DT_SHAPE(H, D, C), w);
        p->out = dt_param(ctx, "out", DT_SHAPE(C, H * D), w);
        p->up = dt_param(ctx, "up", DT_SHAPE(F, C), w);
        p->up_bias = dt_param(ctx, "up_bias", DT_SHAPE(F), DT_ZEROS);
        p->down = dt_param(ctx, "down", DT_SHAPE(C, F), w);
        p->down_bias = dt_param(ctx, "down_bias", DT_SHAPE(C), DT_ZEROS);
        for (int i = 0; i < 2; i++) {
            p->gain[i] = dt_param(ctx, i ? "norm_2.gain" : "norm_1.gain", DT_SHAPE(C), DT_ONES);
            p->bias[i] = dt_param(ctx, i ? "norm_2.bias" : "norm_1.bias", DT_SHAPE(C), DT_ZEROS);
        }
    }
}

/* x (n,T,C) -> (n,T,C). A token attends to the tokens with its own document number. */
static dt_tensor *layer_run(const layer *p, dt_tensor *x, dt_tensor *documents) {
    dt_attn_desc attention = { .full = 1, .documents = documents };
    dt_linear_desc gelu = { .activation = DT_ACT_GELU };
    dt_tensor *a = dt_attention(
        dt_linear(x, p->q, NULL), dt_linear(x, p->k, NULL), dt_linear(x, p->v, NULL), attention);
    a = dt_linear(dt_reshape(a, DT_SHAPE(-1, T, C)), p->out, NULL);
    x = dt_layernorm(dt_add(x, a), p->gain[0], p->bias[0], 0);
    a = dt_linear(dt_linear_at(x, p->up, p->up_bias, gelu), p->down, p->down_bias);
    return dt_layernorm(dt_add(x, a), p->gain[1], p->bias[1], 0);
}

/* ids (n,T), in host memory -> logits (n,2) */
static dt_tensor *model_run(dt_ctx *ctx, const model *m, int n, const int32_t *ids) {
    int32_t is_pad[B * T];
    for (int i = 0; i < n * T; i++) is_pad[i] = ids[i] == PAD; /* the padding is another document */
    dt_tensor *documents = dt_input(ctx, DT_I32, DT_SHAPE(n, T), is_pad);
    dt_tensor *x = dt_embedding(m->word, dt_input(ctx, DT_I32, DT_SHAPE(n, T), ids));
    x = dt_layernorm(dt_add(x, m->position), m->gain, m->bias, 0);
    for (int l = 0; l < L; l++) x = layer_run(&m->layer[l], x, documents);
    return dt_linear(dt_select(x, 1, 0), m->head, m->head_bias); /* of token 0, [cls] */
}

/* Returns the fraction of TEST new sentences that the model classifies correctly. */
static double evaluate(dt_ctx *ctx, const model *m, int *say) {
    int rank = dt_ctx_rank(ctx), ranks = dt_comm_size(dt_world(ctx));
    double right = 0;
    dt_no_grad(ctx, 1);
    for (int i = rank; i < TEST; i += ranks) {
        int32_t ids[T], answer = 0;
        int praise = sentence(TRAIN + i, ids);
        dt_read(dt_argmax(model_run(ctx, m, 1, ids), -1), &answer);
        right += answer == praise;
        if (i < SHOWN) say[i] = answer;
        dt_reset(ctx);
    }
    dt_no_grad(ctx, 0);
    dt_sum_doubles(dt_world(ctx), &right, 1);
    return right / TEST;
}

static dt_status train(dt_ctx *ctx, void *user) { /* runs on every rank */
    result *out = (result *)user;
    dt_comm *world = dt_world(ctx);
    int rank = dt_comm_rank(world), ranks = dt_comm_size(world), n = B / ranks;
    int32_t ids[B * T], labels[B];
    model m;
    if (rank == 0) printf("%d rank%s\n", ranks, ranks > 1 ? "s" : "");
    model_make(ctx, &m);
    dt_zero *opt = dt_zero_make(ctx, (dt_zero_desc){ .weight_decay = 0.01, .clip = 1 });
    dt_sampler *order = dt_sampler_make(
        ctx, (dt_sampler_desc){ .samples = TRAIN, .replicas = ranks, .rank = rank, .shuffle = 1 });
    for (int epoch = 0; epoch < EPOCHS && dt_error(ctx) == DT_OK; epoch++) {
        double loss = 0;
        dt_sampler_set_epoch(order, epoch);
        for (int step = 0; step < TRAIN / B; step++) {
            for (int i = 0; i < n; i++)
                labels[i] = sentence((int)dt_sampler_next(order), ids + i * T);
            dt_tensor *want = dt_input(ctx, DT_I32, DT_SHAPE(n), labels);
            /* the divisor is that of all ranks, so the losses and gradients of the ranks add up */
            dt_tensor *mine = dt_cross_entropy(model_run(ctx, &m, n, ids), want, B);
            dt_backward(mine);
            loss += dt_item(mine) * B / TRAIN;
            dt_zero_step(opt, 0.003);
            dt_reset(ctx);
        }
        dt_sum_doubles(world, &loss, 1);
        double accuracy = evaluate(ctx, &m, out->say); /* each rank writes the ones that it has */
        if (rank > 0) continue;
        out->loss[epoch] = loss;
        out->accuracy[epoch] = accuracy;
        printf("    epoch %d  loss %.4f  %5.1f %% of %d new sentences are right\n", epoch + 1, loss,
            100 * accuracy, TEST);
    }
    return dt_error(ctx);
}

int main(void) {
    static result one, four;
    double difference = 0;
    if (dt_run((dt_run_desc){ .ranks = 1 }, train, &one) != DT_OK ||
        dt_run((dt_run_desc){ .ranks = 4 }, train, &four) != DT_OK)
        return 1;
    for (int i = 0; i < SHOWN; i++) {
        int32_t ids[T];
        sentence(TRAIN + i, ids);
        for (int t = 1; t < T && ids[t] != PAD; t++) printf(" %s", words[ids[t]]);
        printf(": %s\n", four.say[i] ? "praise" : "blame");
    }
    for (int i = 0; i < EPOCHS; i++)
        difference = fmax(difference, fabs(one.loss[i] - four.loss[i]));
    int ok = difference < 0.01 && one.accuracy[0] < 0.9 && four.accuracy[EPOCHS - 1] > 0.97;
    printf("%s: losses of one rank and four differ by %.1e\n", ok ? "ok" : "WRONG", difference);
    return !ok;
}
