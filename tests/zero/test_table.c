/* test_table.c - sparse tables of dt_zero.h against a model of arrays that shares no code with them

   The model keeps its rows in an array, computes initial values with its own Philox, and every
   operation of an update in double, rounded to the table's type: for f32 that is the float
   operation itself, because a double has more than twice its digits. Random sequences of all
   operations must agree in every bit of values, state, clocks, statistics and counts, also after
   loads from a simulated disk, whole or damaged. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include "tests/support/check.h"
#include "tests/zero/disk_sim.h"

enum { KEYS = 24, WIDTH = 9, STATES = 2 * WIDTH + 1, MOST = 60, SAVES = 64 };

static uint64_t random_word(uint64_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    return *x ^= *x << 17;
}
static int draw(uint64_t *x, int n) { return (int)((random_word(x) >> 20) % (uint64_t)n); }

/* ---- the model ---- */

typedef struct model_row {
    uint64_t key;
    int exists, count, touched; /* count: pushes of a key that is not admitted */
    int64_t clock;
    float shows, clicks;
    double w[WIDTH], s[STATES]; /* numbers of the compute type */
} model_row;

typedef struct model {
    dt_table_desc d;
    uint64_t seed;
    int64_t clock, removed;
    model_row row[KEYS];
} model;

static void philox(uint64_t key, uint64_t counter, uint32_t out[4]) {
    uint32_t x[4] = { (uint32_t)counter, (uint32_t)(counter >> 32), 0, 0 };
    uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
    for (int i = 0; i < 10; i++) {
        uint64_t a = 0xD2511F53ull * x[0], b = 0xCD9E8D57ull * x[2];
        uint32_t y[4] = { (uint32_t)(b >> 32) ^ x[1] ^ k[0], (uint32_t)b,
            (uint32_t)(a >> 32) ^ x[3] ^ k[1], (uint32_t)a };
        memcpy(x, y, sizeof x);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, x, sizeof x);
}

static uint64_t philox64(uint64_t key, uint64_t counter) {
    uint32_t out[4];
    philox(key, counter, out);
    return (uint64_t)out[0] << 32 | out[1];
}

static uint64_t name_key(uint64_t seed, const char *name) {
    uint64_t h = 14695981039346656037ull;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 1099511628211ull;
    return philox64(seed, h);
}

static int is_f64(const model *m) { return m->d.dtype == DT_F64; }
static double rounded(const model *m, double x) { return is_f64(m) ? x : (double)(float)x; }

/* The number as the type of the table stores it. */
static double stored(const model *m, double x) {
    if (m->d.dtype != DT_BF16) return x;
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &bits, 4);
    return (double)f;
}

static void initial(const model *m, uint64_t key, double *w) {
    uint64_t stream = name_key(m->seed, m->d.name), first = key * (uint64_t)m->d.width;
    if (key >= UINT64_MAX / (uint64_t)m->d.width) stream = philox64(stream, key), first = 0;
    for (int c = 0; c < m->d.width; c++) {
        uint32_t word[4];
        uint64_t at = first + (uint64_t)c;
        philox(stream, at / 2, word);
        double u = (double)((((uint64_t)word[0] << 32) | word[1]) >> 11) / 9007199254740992.0;
        double v = (double)((((uint64_t)word[2] << 32) | word[3]) >> 11) / 9007199254740992.0;
        double radius = m->d.init.scale * sqrt(-2 * log(1 - u)), angle = 6.283185307179586 * v;
        double x = m->d.init.kind == 1 ? 1 : 0;
        if (m->d.init.kind == 2) x = radius * (at % 2 ? sin(angle) : cos(angle));
        if (m->d.init.kind == 3) x = m->d.init.scale * (2 * (at % 2 ? v : u) - 1);
        w[c] = rounded(m, x);
    }
}

#define R(x) rounded(m, x)
static void optimizer(const model *m, model_row *r, const double *g, double step_size) {
    double lr = R(step_size), eps = R(m->d.eps), b1 = R(m->d.beta1), b2 = R(m->d.beta2);
    double one1 = R(1 - b1), one2 = R(1 - b2), l1 = R(m->d.l1);
    double sum[4] = { 0, 0, 0, 0 };
    int n = m->d.width;
    for (int i = 0; i < n; i++) {
        double *w = &r->w[i], *s = r->s, g2 = R(g[i] * g[i]);
        sum[i % 4] = R(sum[i % 4] + g2);
        if (m->d.optimizer == DT_TABLE_SGD) *w = R(*w - R(lr * g[i]));
        if (m->d.optimizer == DT_TABLE_CUSTOM) { /* momentum */
            s[i] = R(R(R(0.9) * s[i]) + g[i]);
            *w = R(*w - R(lr * s[i]));
        }
        if (m->d.optimizer == DT_TABLE_ADAGRAD) {
            s[i] = R(s[i] + g2);
            *w = R(*w - R(lr * R(g[i] / R(R(sqrt(s[i])) + eps))));
        }
        if (m->d.optimizer == DT_TABLE_ADAM) {
            double t = s[2 * n] = i == 0 ? R(s[2 * n] + 1) : s[2 * n];
            double *p = &s[i], *q = &s[n + i];
            *p = R(R(b1 * *p) + R(one1 * g[i]));
            *q = R(R(b2 * *q) + R(one2 * g2));
            double mean = R(*p / R(1 - pow(m->d.beta1, t)));
            double var = R(*q / R(1 - pow(m->d.beta2, t)));
            *w = R(*w - R(lr * R(mean / R(R(sqrt(var)) + eps))));
        }
        if (m->d.optimizer == DT_TABLE_FTRL) {
            double *z = &s[i], *a = &s[n + i], more = R(*a + g2), root = R(sqrt(more));
            *z = R(*z + R(g[i] - R(R(R(root - R(sqrt(*a))) / lr) * *w)));
            *a = more;
            double slope = R(R(R(R(m->d.ftrl_beta) + root) / lr) + R(m->d.l2));
            *w = fabs(*z) <= l1 ? 0 : R(R(*z < 0 ? R(fabs(*z) - l1) : R(l1 - fabs(*z))) / slope);
        }
    }
    if (m->d.optimizer == DT_TABLE_ROWWISE_ADAGRAD) {
        double all = R(R(sum[0] + sum[1]) + R(sum[2] + sum[3]));
        r->s[0] = R(r->s[0] + R(all / n));
        double factor = R(lr / R(R(sqrt(r->s[0])) + eps));
        for (int i = 0; i < n; i++) r->w[i] = R(r->w[i] - R(factor * g[i]));
    }
}
#undef R

static int model_states(const model *m) {
    int n = m->d.width, states[] = { 0, n, 1, 2 * n + 1, 2 * n, n };
    return states[m->d.optimizer];
}

static int model_admits(model *m, model_row *r, int64_t clock) {
    if (r->exists) return 1;
    if (m->d.admit_probability > 0) {
        uint32_t word[4];
        philox(philox64(name_key(m->seed, m->d.name) + 1, r->key), (uint64_t)clock, word);
        return word[0] < m->d.admit_probability * 4294967296.0;
    }
    r->count++;
    r->touched = 1;
    return r->count >= m->d.admit_count;
}

static void model_push(model *m, const int *keys, int n, const double *grads, const float *shows,
    const float *clicks, double lr, int64_t clock) {
    int done[KEYS] = { 0 };
    m->clock = clock;
    for (int i = 0; i < n; i++) {
        model_row *r = &m->row[keys[i]];
        double g[WIDTH];
        float sum_shows = 0, sum_clicks = 0;
        int first = 1;
        if (done[keys[i]]) continue;
        done[keys[i]] = 1;
        for (int j = i; j < n; j++) {
            if (keys[j] != keys[i]) continue;
            for (int c = 0; c < m->d.width; c++)
                g[c] = first ? grads[j * m->d.width + c]
                             : rounded(m, g[c] + grads[j * m->d.width + c]);
            first = 0;
            sum_shows += shows ? shows[j] : 1;
            sum_clicks += clicks ? clicks[j] : 0;
        }
        if (!model_admits(m, r, clock)) continue;
        if (!r->exists) {
            memset(r->s, 0, sizeof r->s);
            r->exists = 1;
            r->count = r->touched = 0;
            r->shows = r->clicks = 0;
            initial(m, r->key, r->w);
            int from = m->d.optimizer == DT_TABLE_FTRL ? m->d.width : 0;
            int adaptive = m->d.optimizer == DT_TABLE_ADAGRAD || from > 0 ||
                           m->d.optimizer == DT_TABLE_ROWWISE_ADAGRAD;
            for (int k = from; k < model_states(m) && adaptive; k++)
                r->s[k] = rounded(m, m->d.initial_accumulator);
        }
        r->clock = clock;
        r->shows += sum_shows;
        r->clicks += sum_clicks;
        optimizer(m, r, g, lr);
    }
}

static int64_t model_shrink(model *m, int64_t clock) {
    int64_t gone = 0;
    m->clock = clock;
    for (int k = 0; k < KEYS && (m->d.ttl > 0 || m->d.threshold > 0); k++) {
        model_row *r = &m->row[k];
        int old = 0;
        if (!r->exists) {
            if (!r->touched) r->count = 0;
            r->touched = 0;
            continue;
        }
        if (m->d.ttl > 0 && r->clock + m->d.ttl < clock) old = 1;
        if (m->d.threshold > 0) {
            r->shows *= (float)m->d.decay;
            r->clicks *= (float)m->d.decay;
            double score = m->d.show_weight * ((double)r->shows - (double)r->clicks) +
                           m->d.click_weight * (double)r->clicks;
            if (score < m->d.threshold) old = 1;
        }
        if (!old) continue;
        gone++;
        r->exists = r->count = r->touched = 0;
    }
    return gone;
}

/* ---- one table beside its model ---- */

typedef struct save {
    dt__ckpt_id id;
    int before; /* index of the snapshot that a delta continues; -1: a base */
    int damaged;
    model state;
} save;

typedef struct pair {
    dt_ctx *ctx;
    dt_table *t;
    model m;
    disk disk;
    disk_seat seat;
    dt_io io;
    dt_host host;
    save save[SAVES];
    int saves, last; /* last: the snapshot that a delta would continue; -1: none */
    uint64_t x;
    int wrong;
} pair;

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

static dt_status momentum(const dt_table_update_args *a, void *user) {
    const dt_table_desc *d = (const dt_table_desc *)user;
    for (int i = 0; i < a->width && d->dtype != DT_F64; i++) {
        float *w = (float *)a->row, *s = (float *)a->state;
        float scaled = 0.9f * s[i];
        s[i] = scaled + ((const float *)a->grad)[i];
        float step = (float)a->lr * s[i];
        w[i] -= step;
    }
    for (int i = 0; i < a->width && d->dtype == DT_F64; i++) {
        double *w = (double *)a->row, *s = (double *)a->state;
        double scaled = 0.9 * s[i];
        s[i] = scaled + ((const double *)a->grad)[i];
        double step = a->lr * s[i];
        w[i] -= step;
    }
    return DT_OK;
}

static void open_table(pair *p) {
    p->ctx = dt_ctx_make((dt_ctx_desc){
        .seed = p->m.seed, .kernels = dt_kernels_cpu(), .host = &p->host, .io = &p->io });
    p->t = dt_table_make(p->ctx, p->m.d);
    if (!CHECK_MSG(p->t != NULL, "%s", dt_error_text(p->ctx))) exit(1);
}

static void draw_desc(pair *p) {
    static const dt_dtype types[] = { DT_F32, DT_F64, DT_BF16 };
    static const double decays[] = { 0.5, 0.9, 0.98, 1 };
    dt_table_desc *d = &p->m.d;
    uint64_t *x = &p->x;
    memset(&p->m, 0, sizeof p->m);
    p->m.seed = 1 + random_word(x) % 1000;
    d->name = draw(x, 2) ? "user" : "a longer name, with blanks";
    d->width = 1 + draw(x, WIDTH);
    d->dtype = types[draw(x, 3)];
    d->optimizer = draw(x, 6);
    dt_init inits[] = { DT_ZEROS, DT_ONES, DT_NORMAL(0.3), DT_UNIFORM(0.1) };
    d->init = inits[draw(x, 4)];
    d->beta1 = draw(x, 2) ? 0.9 : 0.8;
    d->beta2 = 0.99;
    d->eps = draw(x, 2) ? 1e-8 : 1e-3;
    d->initial_accumulator = draw(x, 2) ? 0.1 : 0;
    d->l1 = draw(x, 2) ? 0.05 : 0;
    d->l2 = draw(x, 2) ? 0.1 : 0;
    d->ftrl_beta = draw(x, 2);
    if (draw(x, 2)) d->admit_count = draw(x, 5);
    if (d->admit_count < 2 && draw(x, 2)) d->admit_probability = 0.3;
    if (draw(x, 2)) {
        d->threshold = 0.5 + draw(x, 3);
        d->decay = decays[draw(x, 4)];
        d->show_weight = draw(x, 2) ? 1 : 0.25;
        d->click_weight = draw(x, 2) ? 1 : 3;
    }
    if (draw(x, 2)) d->ttl = 1 + draw(x, 6);
    if (draw(x, 2)) d->memory_limit = 1; /* 16 rows */
    d->spill = "s";
    d->update = momentum;
    d->user = d;
    d->states = d->width;
    for (int k = 0; k < KEYS; k++) {
        static const uint64_t special[] = { 0, ~0ull, 1, ~0ull - 1, 1ull << 63, 0xffffffffu };
        p->m.row[k].key = k < 6 ? special[k] : k < 12 ? (uint64_t)k : random_word(x);
    }
}

/* Compares number i of an array of the compute type, bit for bit; NaN differs from all. */
static int same_number(const model *m, const void *array, int i, double want) {
    float f = (float)want;
    if (is_f64(m)) return memcmp((const double *)array + i, &want, 8) == 0;
    return memcmp((const float *)array + i, &f, 4) == 0;
}

static int same_value(const model *m, const void *row, int i, double want) {
    float f = (float)stored(m, want);
    uint16_t high = 0;
    if (m->d.dtype != DT_BF16) return same_number(m, row, i, want);
    memcpy(&high, (const char *)&f + 2, 2);
    return memcmp((const uint16_t *)row + i, &high, 2) == 0;
}

/* Compares everything. Returns 1 if table and model agree. */
static int agrees(const pair *p) {
    const model *m = &p->m;
    const dt_table *t = p->t;
    int rows = 0, pending = 0, records = 0, good = 1;
    for (int k = 0; k < KEYS; k++) {
        const model_row *r = &m->row[k];
        const uint32_t *slot = dt__table_find(t, r->key, dt__table_hash(r->key));
        rows += r->exists;
        pending += !r->exists && r->count > 0;
        if (!slot) {
            good &= !r->exists && r->count == 0;
        } else if (*slot >= DT__TABLE_PENDING) {
            good &= !r->exists && (int)(*slot & DT__TABLE_COUNT) == r->count &&
                    ((*slot & DT__TABLE_TOUCHED) != 0) == r->touched;
        } else {
            char *notes = dt__table_notes(p->t, *slot);
            int spilled = *slot >= DT__TABLE_SPILLED;
            const char *values = spilled ? notes + t->note_bytes : dt__table_values(t, *slot);
            const char *master = spilled ? values + t->row_bytes : dt__table_state(t, *slot);
            const char *state = master + t->master_bytes;
            const float *shows = (const float *)(void *)(notes + 8);
            good &= r->exists && memcmp(notes, &r->clock, 8) == 0;
            records += spilled;
            for (int i = 0; i < m->d.width; i++) {
                good &= same_value(m, values, i, r->w[i]);
                if (t->master_bytes) good &= same_number(m, master, i, r->w[i]);
            }
            for (int i = 0; i < model_states(m); i++) good &= same_number(m, state, i, r->s[i]);
            if (m->d.threshold > 0) good &= shows[0] == r->shows && shows[1] == r->clicks;
        }
    }
    dt_table_stats s = dt_table_info(t);
    return good && s.rows == rows && s.pending == pending && s.spilled == records &&
           s.clock == m->clock;
}

static void fill_numbers(const model *m, void *out, const double *in, int n) {
    for (int i = 0; i < n; i++)
        if (is_f64(m))
            ((double *)out)[i] = in[i];
        else
            ((float *)out)[i] = (float)in[i];
}

static void do_push(pair *p) {
    int keys[MOST], n = draw(&p->x, MOST), width = p->m.d.width;
    int unique = draw(&p->x, 4) == 0, few = 1 + draw(&p->x, KEYS);
    double grads[MOST * WIDTH], buffer[MOST * WIDTH];
    float shows[MOST], clicks[MOST];
    uint64_t words[MOST];
    if (unique && n > KEYS) n = KEYS;
    for (int i = 0; i < n; i++) {
        keys[i] = unique ? (i * 7 + few) % KEYS : draw(&p->x, few);
        words[i] = p->m.row[keys[i]].key;
        shows[i] = (float)draw(&p->x, 3);
        clicks[i] = (float)draw(&p->x, 2);
        for (int c = 0; c < width; c++)
            grads[i * width + c] =
                draw(&p->x, 8) ? rounded(&p->m, (draw(&p->x, 2001) - 1000) / 777.0) : 0;
    }
    fill_numbers(&p->m, buffer, grads, n * width);
    int with_shows = draw(&p->x, 2), with_clicks = draw(&p->x, 2);
    dt_table_push_desc d = { .lr = 0.05,
        .clock = p->m.clock + draw(&p->x, 3),
        .shows = with_shows ? shows : NULL,
        .clicks = with_clicks ? clicks : NULL,
        .unique = unique };
    p->wrong |= dt_table_push(p->t, words, (size_t)n, buffer, d) != DT_OK;
    model_push(&p->m, keys, n, grads, d.shows, d.clicks, d.lr, d.clock);
}

static void do_pull(pair *p) {
    int n = draw(&p->x, MOST), width = p->m.d.width, hits = 0;
    uint64_t words[MOST] = { 0 };
    int keys[MOST];
    double rows[MOST * WIDTH], w[WIDTH];
    int64_t before = dt_table_info(p->t).hits;
    for (int i = 0; i < n; i++) words[i] = p->m.row[keys[i] = draw(&p->x, KEYS)].key;
    p->wrong |= dt_table_pull(p->t, words, (size_t)n, rows) != DT_OK;
    for (int i = 0; i < n; i++) {
        const model_row *r = &p->m.row[keys[i]];
        initial(&p->m, r->key, w);
        hits += r->exists;
        for (int c = 0; c < width; c++)
            p->wrong |=
                !same_value(&p->m, (char *)rows + (size_t)(i * width) * dt_dtype_size(p->m.d.dtype),
                    c, r->exists ? r->w[c] : w[c]);
    }
    p->wrong |= dt_table_info(p->t).hits - before != hits;
}

static void do_changed(pair *p) {
    uint64_t keys[KEYS];
    int64_t since = p->m.clock - draw(&p->x, 4), want = 0;
    int64_t n = dt_table_changed(p->t, since, keys, KEYS);
    for (int k = 0; k < KEYS; k++) {
        const model_row *r = &p->m.row[k];
        int found = 0, is = r->exists && r->clock >= since;
        for (int64_t i = 0; i < n && i < KEYS; i++) found += keys[i] == r->key;
        p->wrong |= found != is;
        want += is;
    }
    p->wrong |= n != want || dt_table_changed(p->t, since, NULL, 0) != want;
}

static void do_save(pair *p) {
    int delta = draw(&p->x, 3) > 0 && p->last >= 0;
    if (p->saves == SAVES) return;
    p->wrong |= dt_table_save(p->t, "snap", (dt_table_save_desc){ delta, 0 }) != DT_OK;
    save *s = &p->save[p->saves];
    s->id = p->t->saved;
    s->before = delta ? p->last : -1;
    s->damaged = 0;
    s->state = p->m;
    p->last = p->saves++;
}

/* Changes one bit of a snapshot, or cuts its end off. */
static void do_damage(pair *p) {
    if (p->saves == 0) return;
    save *s = &p->save[draw(&p->x, 2) ? p->saves - 1 : draw(&p->x, p->saves)];
    char name[64], path[120];
    dt__ckpt_name(s->id, name, sizeof name);
    snprintf(path, sizeof path, "snap/%s/table.bin", name);
    int node = disk_find(&p->disk, "", path);
    if (!CHECK_MSG(node >= 0, "%s is not there", path)) return;
    disk_node *f = &p->disk.node[node];
    if (f->size == 0) return;
    if (draw(&p->x, 2))
        f->size -= 1 + (size_t)draw(&p->x, (int)f->size);
    else
        f->data[draw(&p->x, (int)f->size)] ^= (unsigned char)(1 << draw(&p->x, 8));
    s->damaged = 1;
}

/* Loads into a new table, as a job that was killed would. */
static void do_load(pair *p) {
    int want = -1;
    for (int i = 0; i < p->saves; i++) {
        int good = 1;
        for (int k = i; k >= 0; k = p->save[k].before) good &= !p->save[k].damaged;
        if (good && (want < 0 || dt__ckpt_before(p->save[want].id, p->save[i].id))) want = i;
    }
    dt_ctx_free(p->ctx);
    dt_table_desc d = p->m.d;
    open_table(p);
    int64_t clock = dt_table_load(p->t, "snap", (dt_table_load_desc){ 0 });
    p->wrong |= dt_error(p->ctx) != DT_OK;
    if (want < 0) {
        model empty = { .d = d, .seed = p->m.seed };
        for (int k = 0; k < KEYS; k++) empty.row[k].key = p->m.row[k].key;
        p->m = empty;
        p->wrong |= clock != -1;
        /* the folder's snapshots are all damaged; a job would use another folder */
        dt_ctx_free(p->ctx);
        disk_free(&p->disk);
        disk_make(&p->disk);
        p->io.make_folder(p->io.user, "s");
        open_table(p);
        p->saves = 0;
    } else {
        p->m = p->save[want].state;
        p->wrong |= clock != p->m.clock;
    }
    p->last = want;
}

static int spilled; /* sequences that ended with spilled rows */

static void run_sequence(uint64_t seed) {
    static pair p;
    memset(&p, 0, sizeof p);
    p.x = seed * 0x9E3779B97F4A7C15ull + 1;
    p.last = -1;
    p.seat.disk = &p.disk;
    p.seat.root = "";
    p.io = disk_io(&p.seat);
    p.host = *dt_host_default();
    p.host.log = no_log;
    disk_make(&p.disk);
    p.io.make_folder(p.io.user, "s");
    draw_desc(&p);
    open_table(&p);
    int ops = 10 + draw(&p.x, 40), op = -1, i = 0;
    for (; i < ops && !p.wrong; i++) {
        op = draw(&p.x, 16);
        if (op < 8) do_push(&p);
        if (op == 8 || op == 9) do_pull(&p);
        if (op == 10) do_changed(&p);
        if (op == 11 || op == 12) do_save(&p);
        if (op == 13) do_load(&p);
        if (op == 14 && draw(&p.x, 2)) do_damage(&p);
        if (op == 15) {
            int64_t clock = p.m.clock + draw(&p.x, 4);
            p.wrong |= dt_table_shrink(p.t, clock) != model_shrink(&p.m, clock);
        }
        p.wrong |= !agrees(&p);
    }
    CHECK_MSG(!p.wrong, "sequence %llu: operation %d of kind %d: optimizer %d, type %s: %s",
        (unsigned long long)seed, i, op, p.m.d.optimizer, dt_dtype_name(p.m.d.dtype),
        dt_error_text(p.ctx));
    dt_memory memory = dt_memory_used(p.ctx);
    dt_table_stats s = dt_table_info(p.t);
    spilled += s.spilled > 0;
    CHECK(memory.live[DT_MEM_PARAMS] == s.row_bytes && memory.live[DT_MEM_OPTIM] == s.state_bytes);
    CHECK(p.m.d.memory_limit == 0 || s.row_bytes <= 16 * p.t->row_bytes);
    size_t of_table = s.total_bytes - s.row_bytes - s.state_bytes;
    dt_table_free(p.t);
    CHECK(memory.live[DT_MEM_HOST] - dt_memory_used(p.ctx).live[DT_MEM_HOST] == of_table);
    memory = dt_memory_used(p.ctx);
    CHECK(memory.live[DT_MEM_PARAMS] == 0 && memory.live[DT_MEM_OPTIM] == 0);
    dt_ctx_free(p.ctx);
    CHECK_MSG(p.disk.open == 0, "%d files are open", p.disk.open);
    disk_free(&p.disk);
}

/* ---- the optimizers against their formulas, in long double ---- */

typedef long double wide;
static void formula(int optimizer, int n, wide *w, wide *s, const double *g, wide lr, int t) {
    wide sum = 0;
    for (int i = 0; i < n; i++) sum += (wide)g[i] * g[i];
    if (optimizer == DT_TABLE_ROWWISE_ADAGRAD) s[0] += sum / n;
    for (int i = 0; i < n; i++) {
        wide x = g[i], *a = &s[i], *b = &s[n + i];
        switch (optimizer) {
        case DT_TABLE_SGD: w[i] -= lr * x; break;
        case DT_TABLE_ADAGRAD:
            *a += x * x;
            w[i] -= lr * x / (sqrtl(*a) + 1e-8L);
            break;
        case DT_TABLE_ROWWISE_ADAGRAD: w[i] -= lr * x / (sqrtl(s[0]) + 1e-8L); break;
        case DT_TABLE_ADAM:
            *a = (wide)0.9 * *a + (1 - (wide)0.9) * x;
            *b = (wide)0.999 * *b + (1 - (wide)0.999) * x * x;
            w[i] -= lr * (*a / (1 - powl(0.9, t))) / (sqrtl(*b / (1 - powl(0.999, t))) + 1e-8L);
            break;
        case DT_TABLE_FTRL: {
            wide before = *b, z;
            *b += x * x;
            z = *a += x - (sqrtl(*b) - sqrtl(before)) / lr * w[i];
            wide l1 = 0.01, l2 = 0.1, beta = 1;
            w[i] = fabsl(z) <= l1 ? 0 : -(z - (z > 0 ? l1 : -l1)) / ((beta + sqrtl(*b)) / lr + l2);
            break;
        }
        }
    }
}

static void test_formulas(void) {
    enum { N = 7, STEPS = 60 };
    for (int optimizer = 0; optimizer < DT_TABLE_CUSTOM; optimizer++)
        for (int type = 0; type < 2; type++) {
            dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu() });
            dt_table_desc d = { .name = "t",
                .width = N,
                .dtype = type ? DT_F64 : DT_F32,
                .optimizer = optimizer,
                .l1 = 0.01,
                .l2 = 0.1,
                .ftrl_beta = 1 };
            dt_table *t = dt_table_make(ctx, d);
            wide w[N] = { 0 }, s[2 * N] = { 0 }, worst = 0;
            uint64_t x = 7, key = 5;
            double row[N];
            for (int step = 1; step <= STEPS; step++) {
                double g[N];
                float f[N];
                for (int i = 0; i < N; i++)
                    g[i] = (double)(f[i] = (float)(draw(&x, 2001) - 1000) / 500);
                dt_table_push(t, &key, 1, type ? (void *)g : (void *)f,
                    (dt_table_push_desc){ .lr = 0.1, .clock = step });
                formula(optimizer, N, w, s, g, 0.1, step);
            }
            dt_table_pull(t, &key, 1, row);
            for (int i = 0; i < N; i++) {
                wide error = fabsl((type ? (wide)row[i] : (wide)((float *)row)[i]) - w[i]);
                worst = error > worst ? error : worst;
            }
            CHECK_MSG((double)worst < (type ? 1e-13 : 3e-5), "optimizer %d, %s: error %g",
                optimizer, type ? "f64" : "f32", (double)worst);
            dt_ctx_free(ctx);
        }
}

/* ---- a large table: growth, memory, removal, and the parts of several servers ---- */

static int owns_third(uint64_t key, void *user) { return key % 3 == *(const uint64_t *)user; }
static int owns_half(uint64_t key, void *user) { return key / 3 % 2 == *(const uint64_t *)user; }

static void test_large(void) {
    enum { N = 300000, PIECE = 1000, W = 16 };
    static uint64_t keys[PIECE];
    static float grads[PIECE * W], rows[2][PIECE * W];
    disk disk;
    disk_seat seat = { &disk, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&disk);
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 3, .kernels = dt_kernels_cpu(), .io = &io });
    dt_table_desc d = { .name = "t",
        .width = W,
        .init = DT_UNIFORM(0.01),
        .optimizer = DT_TABLE_ROWWISE_ADAGRAD,
        .ttl = 100 };
    dt_table *t = dt_table_make(ctx, d), *part[3], *half[2];
    for (int i = 0; i < 3; i++) part[i] = dt_table_make(ctx, d);
    for (int i = 0; i < 2; i++) half[i] = dt_table_make(ctx, d);
    size_t begin = dt_memory_used(ctx).live_total;
    uint64_t x = 11;
    for (int at = 0; at < N; at += PIECE) {
        for (int i = 0; i < PIECE; i++) keys[i] = (uint64_t)(at + i) * 0x9E3779B97F4A7C15ull;
        for (int i = 0; i < PIECE * W; i++) grads[i] = (float)draw(&x, 100) / 50 - 1;
        dt_table_push_desc push = { .lr = 0.1, .clock = at < N / 2 ? 1 : 2 };
        dt_table_push(t, keys, PIECE, grads, push);
    }
    dt_table_stats s = dt_table_info(t);
    double bytes = (double)(dt_memory_used(ctx).live_total - begin) / N;
    CHECK_MSG(s.rows == N && s.created == N, "%lld rows", (long long)s.rows);
    CHECK_MSG(bytes < 1.35 * (W * 4 + 4) + 16, "%g bytes a row", bytes);
    CHECK(s.row_bytes == dt_memory_used(ctx).live[DT_MEM_PARAMS]);
    CHECK(s.state_bytes == dt_memory_used(ctx).live[DT_MEM_OPTIM]);
    /* 3 servers save, 2 load */
    for (uint64_t i = 0; i < 3; i++) {
        char dir[] = "part0", whole[] = "whole";
        dir[4] = (char)('0' + i);
        if (i == 0) dt_table_save(t, whole, (dt_table_save_desc){ 0, 0 });
        dt_table_load(part[i], whole, (dt_table_load_desc){ .owns = owns_third, .user = &i });
        dt_table_save(part[i], dir, (dt_table_save_desc){ 0, 0 });
        for (uint64_t k = 0; k < 2; k++)
            dt_table_load(
                half[k], dir, (dt_table_load_desc){ .merge = 1, .owns = owns_half, .user = &k });
    }
    int64_t sum = dt_table_info(half[0]).rows + dt_table_info(half[1]).rows;
    CHECK_MSG(sum == N, "%lld rows of 2 servers", (long long)sum);
    int wrong = 0;
    for (int at = 0; at < N; at += PIECE) {
        for (int i = 0; i < PIECE; i++) keys[i] = (uint64_t)(at + i) * 0x9E3779B97F4A7C15ull;
        dt_table_pull(t, keys, PIECE, rows[0]);
        for (uint64_t k = 0; k < 2; k++) {
            dt_table_pull(half[k], keys, PIECE, rows[1]);
            for (int i = 0; i < PIECE; i++)
                wrong += owns_half(keys[i], &k) &&
                         memcmp(&rows[0][i * W], &rows[1][i * W], W * sizeof(float)) != 0;
        }
    }
    CHECK_MSG(wrong == 0, "%d rows differ", wrong);
    CHECK_MSG(dt_table_shrink(t, 101) == 0, "a row of clock 1 is 100 clocks old at clock 101");
    CHECK(dt_table_shrink(t, 102) == N / 2 && dt_table_info(t).rows == N / 2);
    /* removed rows are used again */
    for (int i = 0; i < PIECE; i++) keys[i] = (uint64_t)i * 77 + 1;
    dt_table_push(t, keys, PIECE, grads, (dt_table_push_desc){ .lr = 0.1, .clock = 103 });
    CHECK(dt_table_info(t).row_bytes == s.row_bytes);
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    disk_free(&disk);
}

/* Many blocks of the spill file: the rows of a table with a limit are those of one without, and no
   block stays with more than a quarter of free records while others are added. */
static void test_spill_blocks(void) {
    enum { KEYS_ALL = 6000, N = 400, W = 3, STEPS = 120 };
    static uint64_t keys[KEYS_ALL];
    static float grads[N * W], rows[2][KEYS_ALL * W];
    disk disk;
    disk_seat seat = { &disk, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&disk);
    io.make_folder(io.user, "s");
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 5, .kernels = dt_kernels_cpu(), .io = &io });
    dt_table_desc d = { .name = "t",
        .width = W,
        .dtype = DT_BF16, /* records of 32 bytes, 30 of them used */
        .init = DT_UNIFORM(0.01),
        .optimizer = DT_TABLE_ADAGRAD,
        .ttl = 40 };
    dt_table *free_table = dt_table_make(ctx, d);
    d.memory_limit = 20000;
    d.spill = "s";
    dt_table *t = dt_table_make(ctx, d);
    uint64_t x = 3;
    int64_t most = 0;
    int different = 0;
    for (int64_t step = 1; step <= STEPS; step++) {
        for (int i = 0; i < N; i++) keys[i] = (uint64_t)draw(&x, step < 80 ? KEYS_ALL : 1000);
        for (int i = 0; i < N * W; i++) grads[i] = (float)draw(&x, 100) / 50 - 1;
        dt_table_pull(t, keys, N, rows[0]);
        dt_table_push(t, keys, N, grads, (dt_table_push_desc){ .lr = 0.1, .clock = step });
        dt_table_push(free_table, keys, N, grads, (dt_table_push_desc){ .lr = 0.1, .clock = step });
        if (step % 10 == 0) dt_table_shrink(t, step), dt_table_shrink(free_table, step);
        int64_t records = dt_table_info(t).spilled;
        most = records > most ? records : most;
        for (uint64_t k = 0; k < KEYS_ALL && step % 20 == 0; k++) keys[k] = k;
        if (step % 20 > 0) continue;
        dt_table_pull(t, keys, KEYS_ALL, rows[0]);
        dt_table_pull(free_table, keys, KEYS_ALL, rows[1]);
        different += memcmp(rows[0], rows[1], 2 * KEYS_ALL * W) != 0;
    }
    CHECK_MSG(
        different == 0, "%d of 6 comparisons differ from the table without a limit", different);
    CHECK_MSG(most > 3000 && t->n_blocks * (int64_t)t->block_rows <= most * 4 / 3 + 128,
        "%d blocks for %lld rows", t->n_blocks, (long long)most);
    CHECK(
        dt_table_info(t).rows == dt_table_info(free_table).rows && dt_table_info(t).fetched > 5000);
    CHECK_MSG(dt_error(ctx) == DT_OK, "%s", dt_error_text(ctx));
    dt_ctx_free(ctx);
    disk_free(&disk);
}

/* ---- saves that fail ---- */

typedef struct scene {
    dt_ctx *ctx;
    dt_table *t;
} scene;

static scene open_scene(dt_io *io, dt_host *host) {
    dt_table_desc d = { .name = "t",
        .width = 3,
        .optimizer = DT_TABLE_ADAGRAD,
        .admit_count = 2,
        .ttl = 3,
        .threshold = 0.1,
        .decay = 0.9,
        .memory_limit = 1,
        .spill = "s" };
    scene s;
    io->make_folder(io->user, "s");
    s.ctx = dt_ctx_make(
        (dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu(), .host = host, .io = io });
    s.t = dt_table_make(s.ctx, d);
    return s;
}

static void step_scene(scene *s, int64_t clock) {
    uint64_t keys[8];
    float grads[24];
    for (int i = 0; i < 8; i++) keys[i] = (uint64_t)((clock * 5 + i) % 17);
    for (int i = 0; i < 24; i++) grads[i] = (float)((i * 7 + clock) % 11) - 5;
    dt_table_push(s->t, keys, 8, grads, (dt_table_push_desc){ .lr = 0.1, .clock = clock });
    dt_table_shrink(s->t, clock);
}

/* A digest of all bits of a table. */
static uint64_t digest(const scene *s) {
    uint64_t h = (uint64_t)dt_table_info(s->t).clock * 77 + (uint64_t)dt_table_info(s->t).pending;
    if (!s->t) return 0;
    for (uint64_t key = 0; key < 17; key++) {
        const uint32_t *slot = dt__table_find(s->t, key, dt__table_hash(key));
        if (!slot) continue;
        h = dt__digest(h, &key, 8);
        if (*slot >= DT__TABLE_PENDING) {
            uint32_t count = *slot & ~DT__TABLE_CHANGED;
            h = dt__digest(h, &count, 4);
            continue;
        }
        const char *record = dt__table_notes(s->t, *slot);
        if (!record) return 0;
        char copy[200];
        const size_t notes = s->t->note_bytes, row = s->t->row_bytes;
        const int spilled = *slot >= DT__TABLE_SPILLED;
        memcpy(copy, record, spilled ? s->t->record_bytes : notes);
        if (!spilled) memcpy(copy + notes, dt__table_values(s->t, *slot), row);
        if (!spilled) memcpy(copy + notes + row, dt__table_state(s->t, *slot), s->t->state_bytes);
        h = dt__digest(h, copy, s->t->record_bytes);
    }
    return h;
}

/* Loads from a disk. Returns the digest. */
static uint64_t loaded(disk *d, dt_host *host, int64_t *clock) {
    disk_seat seat = { d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    scene s = open_scene(&io, host);
    *clock = dt_table_load(s.t, "d", (dt_table_load_desc){ 0 });
    uint64_t h = digest(&s);
    CHECK_MSG(dt_error(s.ctx) == DT_OK, "%s", dt_error_text(s.ctx));
    dt_ctx_free(s.ctx);
    return h;
}

static void test_failing_saves(void) {
    enum { STEPS = 12 };
    dt_host host = *dt_host_default();
    host.log = no_log;
    uint64_t want[STEPS + 1] = { 0 };
    long ends[STEPS + 1] = { 0 }, calls = 3000;
    for (long fail_at = 0; fail_at <= calls; fail_at++) {
        disk d, image;
        disk_seat seat = { &d, "", 0, 1, 0 };
        dt_io io = disk_io(&seat);
        disk_make(&d);
        d.fault.how = fail_at ? DISK_FAILS : 0;
        d.fault.at = fail_at;
        d.fault.reason = ENOSPC;
        d.fault.room = -1;
        scene s = open_scene(&io, &host);
        int64_t step = 1, clock;
        for (; step <= STEPS; step++) {
            step_scene(&s, step);
            uint64_t h = digest(&s);
            dt_table_save_desc save = { step % 4 != 1, 2 };
            if (dt_table_save(s.t, "d", save) != DT_OK) break;
            if (fail_at == 0) want[step] = h, ends[step] = d.n_ops;
        }
        if (fail_at == 0) {
            calls = seat.calls;
            CHECK_MSG(step == STEPS + 1, "%s", dt_error_text(s.ctx));
        } else if (step <= STEPS) {
            CHECK_MSG(dt_error(s.ctx) == DT_ERR_IO, "call %ld: %s", fail_at, dt_error_text(s.ctx));
        }
        dt_ctx_free(s.ctx);
        CHECK_MSG(d.open == 0, "call %ld: %d files are open", fail_at, d.open);
        d.fault.how = 0;
        uint64_t h = loaded(&d, &host, &clock);
        int64_t least = step <= STEPS ? step - 1 : STEPS;
        CHECK_MSG((clock == least || clock == step || (clock == -1 && least == 0)) &&
                      (clock < 1 || h == want[clock]),
            "call %ld fails: clock %lld after step %lld", fail_at, (long long)clock,
            (long long)step);
        for (long end = 0; fail_at == 0 && end <= d.n_ops; end++)
            for (uint64_t seed = 0; seed < 3; seed++) {
                disk_cut(&image, &d, end, seed);
                h = loaded(&image, &host, &clock);
                disk_free(&image);
                for (least = STEPS; least > 0 && ends[least] > end;) least--;
                CHECK_MSG((clock >= least || (clock == -1 && least == 0)) && clock <= least + 1 &&
                              (clock < 1 || h == want[clock]),
                    "power cut after change %ld: clock %lld, not %lld", end, (long long)clock,
                    (long long)least);
            }
        disk_free(&d);
    }
    CHECK_MSG(calls > 50 && calls < 3000, "%ld calls", calls);
}

/* A table starts from the values of a parameter with its name. */
static void test_initial_of_parameter(void) {
    enum { ROWS = 9, COLS = 5 };
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .seed = 7 });
    dt_tensor *weight = dt_param(ctx, "users", DT_SHAPE(ROWS, COLS), DT_NORMAL(0.3));
    dt_table *table = dt_table_make(
        ctx, (dt_table_desc){ .name = "users", .width = COLS, .init = DT_NORMAL(0.3) });
    uint64_t keys[ROWS];
    float rows[ROWS * COLS] = { 0 };
    for (uint64_t k = 0; k < ROWS; k++) keys[k] = k;
    const float *values = (const float *)dt_data(weight);
    CHECK(dt_table_pull(table, keys, ROWS, rows) == DT_OK && values && rows[0] != 0 &&
          memcmp(rows, values, sizeof rows) == 0);
    dt_ctx_free(ctx);
}

static void test_keep(void) {
    dt_host host = *dt_host_default();
    disk d;
    disk_seat seat = { &d, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&d);
    scene s = open_scene(&io, &host);
    for (int64_t step = 1; step <= 9; step++) { /* bases 1, 4, 7 */
        step_scene(&s, step);
        dt_table_save(s.t, "d", (dt_table_save_desc){ step % 3 != 1, 2 });
    }
    CHECK_MSG(dt_error(s.ctx) == DT_OK, "%s", dt_error_text(s.ctx));
    CHECK(disk_find(&d, "", "d/step-3") < 0 && disk_find(&d, "", "d/step-1") < 0);
    CHECK(disk_find(&d, "", "d/step-4") >= 0 && disk_find(&d, "", "d/step-9/table.bin") >= 0);
    /* a snapshot before a clock, as servers need whose newest snapshots are not of one clock */
    scene older = open_scene(&io, &host);
    CHECK(dt_table_load(older.t, "d", (dt_table_load_desc){ .before = 7 }) == 6);
    step_scene(&older, 7);
    CHECK(dt_table_save(older.t, "d", (dt_table_save_desc){ 1, 0 }) == DT_OK);
    CHECK(disk_find(&d, "", "d/step-7-2") >= 0);
    dt_ctx_free(older.ctx);
    dt_ctx_free(s.ctx);
    disk_free(&d);
}

/* ---- bad input ---- */

/* Checks that the context has failed with this status and a text that contains `what`; frees it. */
static void check_fails(dt_ctx *ctx, dt_status status, const char *what) {
    CHECK_MSG(dt_error(ctx) == status && strstr(dt_error_text(ctx), what), "%s: %s, not '%s'",
        dt_status_name(dt_error(ctx)), dt_error_text(ctx), what);
    dt_ctx_free(ctx);
}

static void check_desc(dt_host *host, dt_table_desc d, const char *what) {
    dt_ctx *ctx =
        dt_ctx_make((dt_ctx_desc){ .seed = 1, .kernels = dt_kernels_cpu(), .host = host });
    CHECK(dt_table_make(ctx, d) == NULL);
    check_fails(ctx, DT_ERR_ARG, what);
}

static dt_status refuse(const dt_table_update_args *a, void *user) {
    (void)user;
    return a->key == 9 ? DT_ERR_NUMERIC : DT_OK;
}

static void test_bad_input(void) {
    dt_host host = *dt_host_default();
    host.log = no_log;
    disk disk;
    disk_seat seat = { &disk, "", 0, 0, 0 };
    dt_io io = disk_io(&seat);
    disk_make(&disk);
    check_desc(&host, (dt_table_desc){ .name = NULL, .width = 1 }, "name");
    check_desc(&host, (dt_table_desc){ .name = "a\n", .width = 1 }, "control");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 0 }, "width");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 65537 }, "width");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .dtype = DT_I32 }, "dtype");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .optimizer = 6 }, "optimizer");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .optimizer = 5 }, "update");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .beta1 = 1 }, "beta");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .eps = NAN }, "eps");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .admit_count = -1 }, "admit");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .admit_probability = 1 }, "admit");
    check_desc(&host,
        (dt_table_desc){ .name = "t", .width = 1, .admit_count = 2, .admit_probability = 0.5 },
        "both");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .threshold = -1 }, "threshold");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .ttl = -1 }, "ttl");
    check_desc(&host, (dt_table_desc){ .name = "t", .width = 1, .memory_limit = 1 }, "spill");
    uint64_t keys[3] = { 8, ~0ull, 8 };
    for (int i = 0; i < 11; i++) {
        float grads[9] = { 0, 0, 0, 0, 0, 0, 0, 3e38f, 0 }, minus[3] = { 1, -1, 1 };
        scene s = open_scene(&io, &host);
        dt_table_push_desc d = { .lr = 0.1, .clock = 5 };
        for (int n = 0; n < 3; n++) dt_table_push(s.t, keys, 3, grads, d);
        uint64_t before = digest(&s);
        dt_table_save_desc delta = { 1, 0 };
        if (i == 0) grads[5] = NAN;
        if (i == 1) grads[1] = 3e38f;
        if (i == 2) d.shows = minus;
        if (i == 3) d.clock = 4;
        if (i == 4) d.lr = INFINITY;
        if (i < 3) CHECK(dt_table_push(s.t, keys, 3, grads, d) == DT_ERR_NUMERIC);
        if (i == 3 || i == 4) CHECK(dt_table_push(s.t, keys, 3, grads, d) == DT_ERR_ARG);
        if (i == 5) CHECK(dt_table_push(s.t, NULL, 3, grads, d) == DT_ERR_ARG);
        if (i == 6) CHECK(dt_table_pull(s.t, keys, 3, NULL) == DT_ERR_ARG);
        if (i == 7) CHECK(dt_table_shrink(s.t, 4) == -1);
        if (i == 8) CHECK(dt_table_save(s.t, "d", delta) == DT_ERR_ARG);
        if (i == 9) CHECK(dt_table_save(s.t, NULL, delta) == DT_ERR_ARG);
        if (i == 10) CHECK(dt_table_load(s.t, "", (dt_table_load_desc){ 0 }) == -1);
        CHECK_MSG(digest(&s) == before, "case %d changes the table", i);
        static const char *const what[] = {
            "dt_table_push(t): the gradient of key 18446744073709551615, column 2, is nan",
            "dt_table_push(t): the gradient of key 8, column 1, is inf",
            "key 18446744073709551615 has -1 shows", "clock 4 after clock 5", "learning rate inf",
            "3 keys", "rows is NULL", "clock 4", "a delta needs a base", "dir is NULL", "name"
        };
        check_fails(s.ctx, i < 3 ? DT_ERR_NUMERIC : DT_ERR_ARG, what[i]);
    }
    /* of another table, a custom update that fails, no table */
    scene s = open_scene(&io, &host);
    dt_table_save(s.t, "other", (dt_table_save_desc){ 0, 0 });
    dt_table *t = dt_table_make(s.ctx, (dt_table_desc){ .name = "t", .width = 4 });
    CHECK(dt_table_load(t, "other", (dt_table_load_desc){ 0 }) == -1);
    check_fails(s.ctx, DT_ERR_ARG, "other/step-0/table.bin is of another table: width 3");
    s = open_scene(&io, &host);
    t = dt_table_make(
        s.ctx, (dt_table_desc){ .name = "own", .width = 1, .optimizer = 5, .update = refuse });
    uint64_t nine = 9;
    float one = 1;
    dt_table_push(t, &nine, 1, &one, (dt_table_push_desc){ .lr = 1 });
    check_fails(s.ctx, DT_ERR_NUMERIC, "dt_table_push(own): the update of key 9");
    s = open_scene(&io, &host);
    CHECK(dt_table_load(s.t, "nowhere", (dt_table_load_desc){ 0 }) == -1);
    CHECK(dt_error(s.ctx) == DT_OK);
    CHECK(dt_table_pull(NULL, keys, 3, NULL) == DT_ERR_ARG && dt_table_info(NULL).rows == 0);
    dt_ctx_free(s.ctx);
    disk_free(&disk);
}

/* Each allocation fails once: an error, no leak (under ASan) and no crash. */
static void test_memory_limits(void) {
    for (size_t limit = 1 << 12; limit < 8u << 20; limit += limit / 7) {
        dt_host host = *dt_host_default();
        host.log = no_log;
        disk disk;
        disk_seat seat = { &disk, "", 0, 0, 0 };
        dt_io io = disk_io(&seat);
        disk_make(&disk);
        dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){
            .seed = 1, .kernels = dt_kernels_cpu(), .host = &host, .io = &io, .mem_limit = limit });
        dt_table_desc d = { .name = "t", .width = 4, .optimizer = DT_TABLE_ADAM };
        if (limit & 1) d.memory_limit = 4000, d.spill = "s";
        io.make_folder(io.user, "s");
        dt_table *t = dt_table_make(ctx, d);
        for (int64_t step = 0; step < 40; step++) {
            uint64_t keys[200];
            static float grads[800];
            for (int i = 0; i < 200; i++) keys[i] = (uint64_t)(step * 150 + i % 190);
            dt_table_push(t, keys, 200, grads, (dt_table_push_desc){ .lr = 1, .clock = step });
            if (step % 10 == 9) dt_table_save(t, "d", (dt_table_save_desc){ step > 10, 0 });
        }
        dt_table_load(t, "d", (dt_table_load_desc){ 0 });
        CHECK(dt_error(ctx) == DT_OK || dt_error(ctx) == DT_ERR_MEM);
        dt_ctx_free(ctx);
        disk_free(&disk);
    }
}

int main(int argc, char **argv) {
    uint64_t from = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 10000;
    for (uint64_t seed = from; seed < from + count; seed++) run_sequence(seed);
    CHECK_MSG(count < 1000 || spilled > (int)count / 20, "%d sequences have spilled rows", spilled);
    test_formulas();
    test_large();
    test_spill_blocks();
    test_failing_saves();
    test_initial_of_parameter();
    test_keep();
    test_bad_input();
    test_memory_limits();
    return check_done("test_table");
}
