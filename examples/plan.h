/* plan.h - clusters, tables and files of train_gpt --plan - public domain or MIT, at your choice

   The search itself is dt_plan_search (dt_parallel.h, section 11). This file reads the cluster and
   prints the answer: the ranked layouts, what limits each, which faster ones do not fit and what
   would make them fit. */
#ifndef PLAN_H
#define PLAN_H

#include <stdarg.h>
#include <stdio.h>

typedef struct plan_cluster {
    const dt_plan_profile *shipped;
    dt_plan_profile profile; /* a copy of it with the cluster's GPUs per node and memory */
    int nodes, gpus;         /* gpus: of each node */
    double price;            /* of a GPU and hour; 0: not known */
} plan_cluster;

/* Sets the profile whose name is `name` or begins with `name` and a hyphen ("h100" is
   "h100-nanotron"). Returns 0 and writes the reason if there is none. */
static inline int plan_set_profile(plan_cluster *c, const char *name, char *why, size_t bytes) {
    int n, k = 0;
    size_t length = strlen(name);
    const dt_plan_profile *all = dt_plan_profiles(&n);
    while (k < n && (strncmp(all[k].name, name, length) != 0 ||
                        (all[k].name[length] && all[k].name[length] != '-')))
        k++;
    if (length == 0 || k == n) {
        int at = snprintf(why, bytes, "no profile '%s'; there are", name);
        for (k = 0; k < n && at >= 0 && (size_t)at < bytes; k++)
            at += snprintf(why + at, bytes - (size_t)at, "%s %s", k ? "," : "", all[k].name);
        return 0;
    }
    c->shipped = &all[k];
    c->profile = all[k];
    return 1;
}

/* Replaces the memory that the profile's training system needs by that of train_gpt: parameters,
   gradients and optimizer state as dt_zero.h stores them, and the activations in the table at the
   head of gpt.h, in elements of `size` bytes. An estimate suffices here, because dry runs count the
   memory of the best rows exactly. */
static inline void plan_own_memory(plan_cluster *c, const dt_plan_model *m, double size) {
    dt_plan_profile *p = &c->profile;
    int narrow = size < 4;
    p->param_bytes = size;
    p->grad_bytes = narrow ? 4 : size;
    p->optim_bytes = narrow ? 12 : 2 * size;
    p->act_shared = 2 * size;
    p->act_width = (2 + 2.0 * m->kv_heads / m->heads) * size;
    p->act_ffn = (m->gated || narrow ? 2 : 1) * size;
    p->act_scores = p->act_ahead = 0;
    p->act_gathered = 2 * size;
    p->logit_bytes = 4;
    p->logit_count = 1 << 24;
    p->base_bytes = 5e8;
    p->partition = 0;
}

enum { PLAN_MOST_GPUS = 1 << 20 };

/* Checks the numbers of a cluster. Returns 0 and writes the reason if one is impossible. */
static inline int plan_check_cluster(plan_cluster *c, char *why, size_t bytes) {
    if (c->nodes < 1 || c->gpus < 1 || (int64_t)c->nodes * c->gpus > PLAN_MOST_GPUS)
        return snprintf(why, bytes, "%d nodes of %d GPUs; 1 to %d GPUs are possible", c->nodes,
                   c->gpus, (int)PLAN_MOST_GPUS),
               0;
    c->profile.node = c->gpus;
    return 1;
}

/* Reads KIND:NODESxGPUS, such as "h100:16x8". */
static inline int plan_cluster_of_text(const char *text, plan_cluster *c, char *why, size_t bytes) {
    char kind[64];
    int used = 0;
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    snprintf(kind, sizeof kind, "%.*s", (int)(length < 63 ? length : 63), text);
    if (!plan_set_profile(c, kind, why, bytes)) return 0;
    if (!colon || strspn(colon + 1, "0123456789x") != strlen(colon + 1) ||
        sscanf(colon + 1, "%7dx%7d%n", &c->nodes, &c->gpus, &used) != 2 || colon[1 + used])
        return snprintf(why, bytes, "'%s' is not KIND:NODESxGPUS, such as h100:16x8", text), 0;
    return plan_check_cluster(c, why, bytes);
}

/* Reads a JSON object with the keys profile, nodes, gpus and, if wanted, memory_gib and price. The
   reason names the file, line and column. */
static inline int plan_cluster_of_file(
    dt_ctx *ctx, const char *path, plan_cluster *c, char *why, size_t bytes) {
    static const char *const keys[] = { "profile", "nodes", "gpus", "memory_gib", "price" };
    char *text = NULL;
    size_t size = 0;
    FILE *f = fopen(path, "rb");
    if (f) {
        text = (char *)malloc(1 << 16);
        size = text ? fread(text, 1, 1 << 16, f) : 0;
        fclose(f);
    }
    if (!text) return snprintf(why, bytes, "%s: %s", path, strerror(errno)), 0;
    dt_json *json = size < 1 << 16 ? dt_json_parse(ctx, path, text, size) : NULL;
    if (size == 1 << 16) dt_fail(ctx, DT_ERR_IO, "%s: a cluster of more than 64 KiB", path);
    if (json && dt_json_kind_of(json, 0) != DT_JSON_OBJECT)
        dt_json_fail(json, 0, "an object is needed");
    double values[5] = { 0, 0, 0, 0, 0 };
    for (int i = 0; json && dt_error(ctx) == DT_OK && i < dt_json_count(json, 0); i++) {
        int node = dt_json_at(json, 0, i), k = 0;
        const char *key = dt_json_key(json, node, NULL), *name = dt_json_string(json, node, NULL);
        while (k < 5 && (!key || strcmp(key, keys[k]) != 0)) k++;
        if (k == 5)
            dt_json_fail(
                json, node, "unknown key; the keys are profile, nodes, gpus, memory_gib and price");
        else if (k == 0 && (!name || !plan_set_profile(c, name, why, bytes)))
            dt_json_fail(json, node, "%s", name ? why : "the name of a profile is needed");
        else if (k > 0 && (!dt_json_number(json, node, &values[k]) ||
                              !(values[k] > 0 && values[k] <= PLAN_MOST_GPUS)))
            dt_json_fail(json, node, "%s: a number above 0 and up to %d is needed", keys[k],
                (int)PLAN_MOST_GPUS);
        else if ((k == 1 || k == 2) && values[k] != floor(values[k]))
            dt_json_fail(json, node, "a whole number is needed");
    }
    int missing = !c->shipped ? 0 : values[1] == 0 ? 1 : 2;
    if (json && dt_error(ctx) == DT_OK && (!c->shipped || values[1] == 0 || values[2] == 0))
        dt_json_fail(json, 0, "the key %s is missing", keys[missing]);
    const char *error = dt_error(ctx) != DT_OK ? strchr(dt_error_text(ctx), ' ') : NULL;
    error = error ? strchr(error + 1, ' ') : NULL; /* after "rank 0:" */
    if (dt_error(ctx) != DT_OK) snprintf(why, bytes, "%s", error ? error + 1 : dt_error_text(ctx));
    dt_json_free(json);
    free(text);
    if (dt_error(ctx) != DT_OK) return 0;
    c->nodes = (int)values[1], c->gpus = (int)values[2], c->price = values[4];
    if (values[3] > 0) c->profile.memory = values[3] * 1073741824;
    return plan_check_cluster(c, why, bytes);
}

/* Reads a number of tokens such as "300B" or "2T". Returns 0 if the text is no such number. */
static inline double plan_tokens(const char *text) {
    static const char suffixes[] = "KMBT";
    double number = 0;
    size_t n = decimal(text, 1, &number);
    const char *suffix = n && text[n] ? strchr(suffixes, text[n]) : NULL;
    if (n == 0 || (text[n] && (!suffix || text[n + 1]))) return 0;
    return suffix ? number * pow(1000, (double)(suffix - suffixes + 1)) : number;
}

// ==== The answer ================================================================================

static const char *const plan_recomputes[] = { "none", "selective", "full" };

static inline const char *plan_schedule(int schedule) {
    switch (schedule) {
    case DT_SCHEDULE_NAIVE: return "naive";
    case DT_SCHEDULE_AFAB: return "afab";
    case DT_SCHEDULE_INTERLEAVED: return "interleaved";
    case DT_SCHEDULE_ZB: return "zb";
    case DT_SCHEDULE_ZBV: return "zbv";
    case DT_SCHEDULE_DUALPIPE_V: return "dualpipe-v";
    default: return "1f1b";
    }
}

typedef struct plan_answer {
    const dt_plan_model *model;
    const plan_cluster *cluster;
    const dt_plan_desc *desc;
    const dt_plan_row *rows, *too_big;
    dt_plan_found found;
    double tokens; /* of the training; 0: not known */
} plan_answer;

/* Hours of all GPUs for the tokens of the training; 0 if these are not known. */
static inline double plan_gpu_hours(const plan_answer *a, const dt_plan_row *row) {
    return a->tokens / row->cost.tokens_per_s_gpu / 3600;
}

static inline double plan_gib(double bytes) { return bytes / 1073741824; }

/* Writes the options of train_gpt that set this layout. */
static inline void plan_options(const dt_layout *l, char *text, size_t bytes) {
    snprintf(text, bytes,
        "--dp %d --tp %d --cp %d --pp %d --ep %d --zero %d --recompute %s --schedule %s --chunks "
        "%d "
        "--micro-batch %d --accum %d --sp %s",
        l->mesh.dp, l->mesh.tp, l->mesh.cp, l->mesh.pp, l->mesh.ep, l->zero,
        plan_recomputes[l->recompute], plan_schedule(l->schedule), l->chunks, l->micro_batch,
        l->accum, l->sp ? "on" : "off");
}

static inline void plan_json_layout(dt_json_out *out, const dt_layout *l) {
    dt_json_put_int(out, "dp", l->mesh.dp);
    dt_json_put_int(out, "tp", l->mesh.tp);
    dt_json_put_int(out, "cp", l->mesh.cp);
    dt_json_put_int(out, "pp", l->mesh.pp);
    dt_json_put_int(out, "ep", l->mesh.ep);
    dt_json_put_int(out, "zero", l->zero);
    dt_json_put_string(out, "recompute", plan_recomputes[l->recompute]);
    dt_json_put_string(out, "schedule", plan_schedule(l->schedule));
    dt_json_put_int(out, "chunks", l->chunks);
    dt_json_put_int(out, "micro_batch", l->micro_batch);
    dt_json_put_int(out, "accum", l->accum);
    dt_json_put_bool(out, "sp", l->sp);
}

/* Writes what would make a layout fit, or "". */
static inline void plan_would_fit(
    const plan_answer *a, const dt_plan_row *row, char *text, size_t bytes) {
    dt_plan_row fits;
    const dt_layout *l = &row->layout, *f = &fits.layout;
    char micro[48] = "";
    text[0] = 0;
    if (!dt_plan_would_fit(*a->desc, l, &fits)) return;
    if (f->micro_batch != l->micro_batch) snprintf(micro, sizeof micro, ", micro-batch 1");
    snprintf(text, bytes, "zero %d, recompute %s%s, at %.2f x the time", f->zero,
        plan_recomputes[f->recompute], micro, fits.cost.seconds / row->cost.seconds);
}

static inline void plan_json(const plan_answer *a, dt_json_out *out) {
    char text[160];
    dt_json_open(out, NULL, '{');
    dt_json_open(out, "rows", '[');
    for (int i = 0; i < a->found.rows; i++) {
        const dt_plan_row *r = &a->rows[i];
        const dt_plan_cost *c = &r->cost;
        dt_json_open(out, NULL, '{');
        plan_json_layout(out, &r->layout);
        dt_json_put_number(out, "gib", plan_gib(r->bytes));
        dt_json_put_number(out, "seconds_per_step", c->seconds);
        dt_json_put_number(out, "tokens_per_s_gpu", c->tokens_per_s_gpu);
        dt_json_put_number(out, "mfu", c->mfu);
        dt_json_put_number(out, "bubble", c->bubble / c->seconds);
        dt_json_put_number(out, "gpu_hours", plan_gpu_hours(a, r));
        dt_json_put_string(out, "limited_by", r->limited_by);
        dt_json_close(out, '}');
    }
    dt_json_close(out, ']');
    dt_json_open(out, "refused", '[');
    for (int i = 0; i < a->found.too_big; i++) {
        const dt_plan_row *r = &a->too_big[i];
        plan_would_fit(a, r, text, sizeof text);
        dt_json_open(out, NULL, '{');
        plan_json_layout(out, &r->layout);
        dt_json_put_number(out, "gib_over", plan_gib(r->bytes - a->desc->memory));
        dt_json_put_string(out, "would_fit", text[0] ? text : NULL);
        dt_json_close(out, '}');
    }
    dt_json_close(out, ']');
    dt_json_close(out, '}');
}

/* Prints the plan. `print` is printf to the program's output. */
static inline void plan_print(const plan_answer *a, void (*print)(const char *fmt, ...)) {
    const plan_cluster *c = a->cluster;
    char text[240];
    print("%d nodes x %d GPUs, profile %s, %.1f GiB a GPU; %lld layouts compared\n", c->nodes,
        c->gpus, c->profile.name, plan_gib(a->desc->memory), (long long)a->found.tried);
    print("  row  dp  tp  cp  pp  ep zero recompute schedule      v mbs accum    GiB   s/step  MFU "
          "bubble   tp   dp    GPU-h   days  limited by\n");
    for (int i = 0; i < a->found.rows; i++) {
        const dt_plan_row *r = &a->rows[i];
        const dt_layout *l = &r->layout;
        const dt_plan_cost *k = &r->cost;
        double hours = plan_gpu_hours(a, r);
        print("%5d%4d%4d%4d%4d%4d%5d %-9s %-11s%3d%4d%6d%7.1f%9.3f%4.0f%%%6.0f%%%4.0f%%%4.0f%%%9.3g"
              "%7.1f  %s\n",
            i + 1, l->mesh.dp, l->mesh.tp, l->mesh.cp, l->mesh.pp, l->mesh.ep, l->zero,
            plan_recomputes[l->recompute], l->mesh.pp > 1 ? plan_schedule(l->schedule) : "-",
            l->chunks, l->micro_batch, l->accum, plan_gib(r->bytes), k->seconds, 100 * k->mfu,
            100 * k->bubble / k->seconds, 100 * k->tp / k->seconds, 100 * k->dp / k->seconds, hours,
            hours / 24 / (c->nodes * c->gpus), r->limited_by);
    }
    if (a->found.rows > 0) {
        const dt_plan_row *best = &a->rows[0];
        const dt_layout *l = &best->layout;
        plan_options(l, text, sizeof text);
        print("row 1 as options: %s\n", text);
        print(
            "1. fit       %.1f billion parameters over tp %d x pp %d, ZeRO-%d: %.1f of %.1f GiB\n",
            best->cost.parameters / 1e9, l->mesh.tp, l->mesh.pp, l->zero, plan_gib(best->bytes),
            plan_gib(a->desc->memory));
        print("2. batch     %d sequences = %d replicas x %d micro-batches x %d\n", a->desc->batch,
            l->mesh.dp * l->mesh.ep, l->accum, l->micro_batch);
        print("3. speed     compute %.0f %%, bubble %.0f %%, tp %.0f %%, cp %.0f %%, ep %.0f %%, "
              "pp %.0f %%, dp "
              "%.0f %%, optimizer %.0f %%\n",
            100 * best->cost.compute / best->cost.seconds,
            100 * best->cost.bubble / best->cost.seconds, 100 * best->cost.tp / best->cost.seconds,
            100 * best->cost.cp / best->cost.seconds, 100 * best->cost.ep / best->cost.seconds,
            100 * best->cost.pp / best->cost.seconds, 100 * best->cost.dp / best->cost.seconds,
            100 * best->cost.optimizer / best->cost.seconds);
        if (a->tokens > 0 && c->price > 0)
            print("   cost      %.3g for %.3g tokens\n", plan_gpu_hours(a, best) * c->price,
                a->tokens);
    }
    if (a->found.rows == 0) print("no layout fits\n");
    for (int i = 0; i < a->found.too_big; i++) {
        const dt_plan_row *r = &a->too_big[i];
        if (i == 0) print("faster, but do not fit:\n");
        plan_options(&r->layout, text, sizeof text);
        print("  %.3f s/step, %.1f GiB too much: %s\n", r->cost.seconds,
            plan_gib(r->bytes - a->desc->memory), text);
        plan_would_fit(a, r, text, sizeof text);
        print(
            "      would fit with %s\n", text[0] ? text : "none of ZeRO, recompute, micro-batches");
    }
}

#endif /* PLAN_H */
