/* train_ctr.c - trains a click-through-rate model on a parameter server - public domain or MIT, at
   your choice

       cc -O3 train_ctr.c -o train_ctr -lm -lpthread
       ./train_ctr --data day_0.txt --eval day_1.txt --model deepfm --ranks 4 --servers 2 --mode ssp:2

   Data is text in the format of the Criteo data sets: criteo.h reads it. The models are in ctr.h.
   This file has the command line, the training loop of a worker and the output. Worker w of W takes
   lines w B/W .. (w+1) B/W of each batch of B lines, so a batch is the same for every number of
   workers.

   CONTENTS
     1. Options
     2. Options that snapshots fix
     3. From options to a job
     4. Batches
     5. Output
     6. Training, evaluation, prediction
     7. Restarts, main
*/
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "../dt_zero.h"

#include "ctr.h"

#include <signal.h>
#include <stdarg.h>

// ==== 1. Options =================================================================================

/* options.h explains the columns. */
#define OPTIONS(X) \
    X(DATA, "data", TEXT, BUILT, NULL, 0, 0, "FILE|DIR|-", \
        "lines to train on; a DIR: all files; -: stdin") \
    X(EVAL, "eval", TEXT, BUILT, NULL, 0, 0, "FILE|DIR", "lines to evaluate after each epoch") \
    X(PREDICT, "predict", TEXT, BUILT, NULL, 0, 0, "FILE|DIR", \
        "at the end print the probability of each line; labels may be missing") \
    X(SKIP_BAD, "skip-bad", FLAG, BUILT, NULL, 0, 0, "", \
        "skip and count bad lines instead of failing") \
    X(MODEL, "model", WORD, BUILT, "deepfm", 0, 0, "lr|fm|wide-deep|deepfm", "see ctr.h") \
    X(WIDTH, "width", INT, BUILT, "16", 1, 65536, "K", "embedding dimension") \
    X(HIDDEN, "hidden", TEXT, BUILT, "256,128", 0, 0, "N,N,..", \
        "widths of the MLP's hidden layers") \
    X(BATCH, "batch", INT, BUILT, "512", 1, 1e7, "B", "samples of a step, over all workers") \
    X(LR, "lr", REAL, BUILT, "0.05", 0, 1e3, "X", "learning rate; adam needs about 0.001") \
    X(RULE, "rule", WORD, BUILT, "row-adagrad", 0, 0, "adagrad|row-adagrad|adam|ftrl|sgd", \
        "optimizer; ftrl: of the wide part, the rest adagrad") \
    X(EPOCHS, "epochs", INT, BUILT, "1", 0, 1e6, "N", "passes over --data; 0: none") \
    X(SEED, "seed", INT, BUILT, "1", 1, 9e15, "S", "of the initial values") \
    X(RANKS, "ranks", INT, BUILT, NULL, 1, 1024, "N", "[servers + 1]") \
    X(SERVERS, "servers", INT, BUILT, "0", 0, 1023, "S", \
        "the last S ranks serve; 0: every rank works and owns keys") \
    X(MODE, "mode", TEXT, BUILT, "sync", 0, 0, "sync|async|ssp:S|geo:K", \
        "ssp: pulls lack at most S steps of the slowest worker; geo: replicas exchange every K " \
        "steps") \
    X(BACKEND, "backend", WORD, BUILT, "threads", 0, 0, "threads|procs|tcp;mpi", "how ranks run") \
    X(RANK, "rank", INT, BUILT, NULL, 0, 1023, "R", \
        "of this process, with tcp [from the launcher]") \
    X(RENDEZVOUS, "rendezvous", TEXT, BUILT, NULL, 0, 0, "HOST:PORT", "of rank 0, with tcp") \
    X(TIMEOUT, "timeout", REAL, BUILT, "120", 0.001, 1e6, "S", \
        "seconds that a rank waits for others") \
    X(SAVE, "save", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "write snapshot DIR/step-N at the start and at the end") \
    X(SAVE_EVERY, "save-every", INT, BUILT, NULL, 1, 1e12, "N", "... and after every N steps") \
    X(RESUME, "resume", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "continue from DIR's newest snapshot, with its model, rule, seed and batch") \
    X(MAX_RESTARTS, "max-restarts", INT, BUILT, "0", 0, 1e6, "N", \
        "after a failure restart from the newest snapshot of --save") \
    X(STOP_AT, "stop-at", INT, BUILT, NULL, 1, 1e12, "N", "end after step N, as if interrupted") \
    X(LOG_EVERY, "log-every", INT, BUILT, "100", 1, 1e9, "N", "steps between progress lines") \
    X(LOG_CSV, "log-csv", TEXT, BUILT, NULL, 0, 0, "FILE", "a row for each progress line") \
    X(QUIET, "quiet", FLAG, BUILT, NULL, 0, 0, "", "print nothing but errors and predictions") \
    X(HELP, "help", FLAG, BUILT, NULL, 0, 0, "", "print this help and exit")
#include "options.h"

/* Refuses a run that cannot start. */
static void refuse(const char *fmt, ...) {
    char text[8192];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < ' ') *c = '?'; /* one line, whatever a path contains */
    fprintf(stderr, "error: %s\n", text);
    exit(2);
}

static const char *notation(int id) {
    int mpi = id == O_BACKEND && dt_backend_is_built(DT_BACKEND_MPI);
    return mpi ? "threads|procs|tcp|mpi" : table[id].arg;
}

static const char *word_of(int id, const char *text) {
    (void)id;
    return text;
}

static void print_help(void) {
    printf("train_ctr: trains a click-through-rate model on a parameter server. Options, with "
           "their defaults in brackets:\n\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const char *arg = notation(i);
        char left[96];
        snprintf(left, sizeof left, "--%s %.*s", table[i].name, (int)strcspn(arg, ";"), arg);
        printf("  %-40s %s", left, table[i].help);
        if (table[i].default_text) printf(" [%s]", table[i].default_text);
        printf("\n");
    }
    printf(
        "\nsamples are those of the whole run; keys and bytes are totals since the start, the "
        "resume or the restart. A row\nof the log after a resume has the samples since the "
        "snapshot. With geo each worker evaluates its own replica,\nwhich lacks what other workers "
        "did since the last exchange. To evaluate what the servers hold: --save, then\n--resume "
        "with --epochs 0. Optimizer state stays on the workers, so training cannot go on from such "
        "a snapshot.\n"
        "\nA line of data has 40 fields separated by tabs: label 0 or 1, 13 numbers, 26 "
        "categories. Fields other than\nthe label may be empty. A number v is read as ln(1 + v), "
        "below 0 as -ln(1 - v); a category as a hash of its\ntext and column.\n\n"
        "logloss and auc are of the samples since the line before, each predicted before the step "
        "that trains on it;\nwith sync of all workers, else of worker 0. The AUC is counted in "
        "32,768 bins of the logit.\nWith --predict, everything else is printed on standard error.\n"
        "\nExit status: 0 done, 1 the run failed, 2 the command line asks for something "
        "impossible.\n");
}

// ==== 2. Options that snapshots fix ==============================================================

/* The file DIR/train_ctr.txt has the options that DIR's snapshots fix: they choose the tables and
   their initial values, and the batch says how many lines a step has taken. With geo the servers
   have no optimizer state: such snapshots are for geo only. A resumed run takes these options from
   the file, and is refused if it gives another value. */
static const int fixed_options[] = { O_MODEL, O_WIDTH, O_HIDDEN, O_RULE, O_SEED, O_BATCH, O_MODE };
enum { FIXED_OPTIONS = sizeof fixed_options / sizeof fixed_options[0], PATH_BYTES = 4096 };

static int is_fixed(int id) {
    int found = 0;
    for (int i = 0; i < FIXED_OPTIONS; i++) found |= fixed_options[i] == id;
    return found;
}

/* Writes the file. A crash leaves none or all of it. */
static void write_fixed(dt_ctx *ctx, const value *v) {
    char path[PATH_BYTES], temporary[PATH_BYTES];
    snprintf(path, sizeof path, "%s/train_ctr.txt", v[O_SAVE].text);
    snprintf(temporary, sizeof temporary, "%s/train_ctr.txt.tmp", v[O_SAVE].text);
    FILE *f = fopen(temporary, "w");
    int ok = f != NULL;
    for (int i = 0; i < FIXED_OPTIONS && ok; i++)
        ok = fprintf(f, "--%s %s\n", table[fixed_options[i]].name, v[fixed_options[i]].text) > 0;
    ok = ok && fflush(f) == 0 && fsync(fileno(f)) == 0;
    if (f && fclose(f) != 0) ok = 0;
    if (!ok || rename(temporary, path) != 0)
        dt_fail(ctx, DT_ERR_IO, "%s: %s", path, strerror(errno));
}

static int is_geo(const value *v) { return strncmp(v->text, "geo:", 4) == 0; }

/* Returns 1 if the option's value suits snapshots that were saved with the value *saved. */
static int suits(const value *v, int id, const value *saved) {
    if (id == O_MODE) return is_geo(&v[id]) == is_geo(saved);
    int only_reads = v[O_EPOCHS].number == 0 && !v[O_SAVE].text;
    if (id == O_BATCH && v[id].from >= GIVEN && only_reads) return 1;
    return table[id].kind == TEXT ? strcmp(saved->text, v[id].text) == 0
                                  : saved->number == v[id].number;
}

/* Reads the file of --resume, if there is one. */
static void read_fixed(value *v) {
    char path[PATH_BYTES], line[1024], name[32], text[512];
    snprintf(path, sizeof path, "%s/train_ctr.txt", v[O_RESUME].text);
    FILE *f = fopen(path, "r");
    for (int n = 1; f && fgets(line, sizeof line, f); n++) {
        int given = sscanf(line, "--%31s %511[^\n]", name, text);
        int id = given == 2 ? find_option(name, strlen(name)) : N_OPTIONS;
        value saved = { 0 };
        if (id == N_OPTIONS || !is_fixed(id))
            refuse("--resume %s: line %d of train_ctr.txt is not an option of a snapshot",
                v[O_RESUME].text, n);
        set(&saved, id, text, COMPUTED);
        if (suits(v, id, &saved)) continue;
        if (v[id].from >= GIVEN)
            refuse("--%s %s: the snapshots of --resume %s have --%s %s", table[id].name, v[id].text,
                v[O_RESUME].text, table[id].name, text);
        set(&v[id], id, strdup(text), COMPUTED);
    }
    if (f) fclose(f);
}

// ==== 3. From options to a job ===================================================================

typedef struct job {
    const value *v;
    ctr_config model;
    int ranks, servers, workers, mode, staleness, geo_steps, rank;
    FILE *csv;     /* of --log-csv; NULL: none */
    int csv_keeps; /* 1: --log-csv is a regular file, so a resumed run keeps its earlier rows */
    FILE *out;     /* progress: standard output, or standard error with --predict */
    int attempt;   /* number of restarts before this attempt */
    /* 1: the run has completed a step since its start or its last restart; it has printed a
       prediction */
    int *made_step, *predicted;
} job;

static const char csv_header[] = "step,samples,logloss,auc,samples_per_s,keys,bytes,staleness_max,"
                                 "eval_auc,eval_logloss\n";

/* Refuses the path of a folder that is something else. */
static void check_folder(const value *v, int id) {
    struct stat st;
    if (v[id].text && stat(v[id].text, &st) == 0 && !S_ISDIR(st.st_mode))
        refuse("--%s %s: not a directory", table[id].name, v[id].text);
}

/* Refuses a path that does not exist or has no data. */
static void check_data(const value *v, int id) {
    const char *path = v[id].text;
    struct stat st;
    if (!path || strcmp(path, "-") == 0) return;
    if (stat(path, &st) != 0) refuse("--%s %s: %s", table[id].name, path, strerror(errno));
    if (S_ISREG(st.st_mode) && st.st_size == 0)
        refuse("--%s %s: the file is empty", table[id].name, path);
    if (access(path, R_OK) != 0) refuse("--%s %s: %s", table[id].name, path, strerror(errno));
}

static void resolve_hidden(const char *text, ctr_config *c) {
    for (const char *at = text; *at; c->layers++) {
        char *end;
        long n = strtol(at, &end, 10);
        if (end == at || (*end && (*end != ',' || !end[1])) || n < 1 || n > 65536 ||
            c->layers == CTR_HIDDEN)
            refuse("--hidden %s: not 1 to %d widths from 1 to 65536, such as 256,128", text,
                CTR_HIDDEN);
        c->hidden[c->layers] = (int)n;
        at = end + (*end == ',');
    }
}

static void resolve_mode(job *j) {
    const char *text = j->v[O_MODE].text;
    char *end = NULL;
    if (strcmp(text, "async") == 0)
        j->mode = DT_PS_ASYNC;
    else if (strncmp(text, "ssp:", 4) == 0 && text[4] >= '0' && text[4] <= '9') {
        j->mode = DT_PS_SSP;
        j->staleness = (int)strtol(text + 4, &end, 10);
    } else if (strncmp(text, "geo:", 4) == 0 && text[4] >= '0' && text[4] <= '9') {
        j->mode = DT_PS_GEO;
        j->geo_steps = (int)strtol(text + 4, &end, 10);
    } else if (strcmp(text, "sync") == 0)
        j->mode = DT_PS_SYNC;
    else
        refuse("--mode %s: the legal values are %s", text, table[O_MODE].arg);
    int too_large = end && end - text > 13; /* more than 9 digits */
    if (end && (*end || too_large))
        refuse("--mode %s: %c is not a whole number below 1e9", text, *text == 'g' ? 'K' : 'S');
    if (j->mode == DT_PS_GEO && j->geo_steps < 1) refuse("--mode %s: K must be 1 or more", text);
    if (j->mode != DT_PS_SYNC && j->servers == 0)
        refuse("--mode %s needs --servers 1 or more", text);
}

/* Finds the number of ranks and, with tcp, the rank of this process. */
static void resolve_ranks(job *j, value *v) {
    dt_launch launch;
    dt_status status = dt_launch_find(&launch);
    if (status == DT_OK && launch.size > 1 && v[O_BACKEND].from < GIVEN)
        set(&v[O_BACKEND], O_BACKEND, "tcp", FROM_ENVIRONMENT);
    int is_tcp = strcmp(v[O_BACKEND].text, "tcp") == 0;
    if (!is_tcp && (v[O_RANK].text || v[O_RENDEZVOUS].text))
        refuse("--%s needs --backend tcp", v[O_RANK].text ? "rank" : "rendezvous");
    if (is_tcp && !v[O_RANK].text && status != DT_OK) refuse("%s", launch.text);
    if (is_tcp && !v[O_RANK].text && launch.size < 2)
        refuse("--backend tcp needs --rank R and --ranks N, or a launcher that sets them");
    j->rank = v[O_RANK].text ? (int)v[O_RANK].number : launch.rank;
    if (is_tcp && !v[O_RENDEZVOUS].text && !v[O_RANK].text && launch.rendezvous[0])
        set(&v[O_RENDEZVOUS], O_RENDEZVOUS, strdup(launch.rendezvous), FROM_ENVIRONMENT);
    j->servers = (int)v[O_SERVERS].number;
    j->ranks = v[O_RANKS].text   ? (int)v[O_RANKS].number
               : launch.size > 1 ? launch.size
                                 : j->servers + 1;
    if (j->servers >= j->ranks)
        refuse("--servers %d of --ranks %d: no rank is left to work; use --ranks %d or more",
            j->servers, j->ranks, j->servers + 1);
    if (is_tcp && j->rank >= j->ranks)
        refuse("--rank %d of --ranks %d: the last rank is %d", j->rank, j->ranks, j->ranks - 1);
    j->workers = j->ranks - j->servers;
    int batch = (int)v[O_BATCH].number, w = j->workers;
    if (batch % w)
        refuse("--batch %d does not divide evenly over %d workers: use --batch %d", batch, w,
            (batch + w - 1) / w * w);
}

/* Opens the log. With --resume, leaves old rows to csv_rewind. */
static void open_csv(job *j, const char *path) {
    struct stat st, data;
    char first[sizeof csv_header + 1] = "";
    int there = stat(path, &st) == 0, keep = j->v[O_RESUME].text != NULL;
    for (int id = O_DATA; id <= O_PREDICT; id++)
        if (there && j->v[id].text && stat(j->v[id].text, &data) == 0 && data.st_dev == st.st_dev &&
            data.st_ino == st.st_ino)
            refuse("--log-csv %s: it is the file of --%s", path, table[id].name);
    j->csv_keeps = !there || S_ISREG(st.st_mode);
    j->csv = fopen(path, !j->csv_keeps ? "w" : keep ? "a+" : "w+");
    if (!j->csv) refuse("--log-csv %s: %s", path, strerror(errno));
    if (j->csv_keeps && keep && fgets(first, sizeof first, j->csv)) {
        if (strcmp(first, csv_header) != 0)
            refuse("--log-csv %s: not a log of this version, and --resume would drop its rows; use "
                   "another name",
                path);
        return;
    }
    fputs(csv_header, j->csv);
    if (fflush(j->csv) != 0) refuse("--log-csv %s: %s", path, strerror(errno));
}

/* Checks the options of snapshots and restarts. */
static void resolve_snapshots(const job *j, const value *v) {
    check_folder(v, O_SAVE);
    check_folder(v, O_RESUME);
    if (v[O_SAVE_EVERY].text && !v[O_SAVE].text) refuse("--save-every needs --save DIR");
    int goes_on = v[O_MAX_RESTARTS].number > 0 || (v[O_RESUME].text && v[O_EPOCHS].number > 0);
    if (j->mode == DT_PS_GEO && goes_on)
        refuse("--mode %s keeps optimizer state on the workers, so training cannot go on from a "
               "snapshot; --resume needs --epochs 0, to evaluate or predict",
            v[O_MODE].text);
    if (v[O_MAX_RESTARTS].number == 0) return;
    const char *n = v[O_MAX_RESTARTS].text;
    int in_process = v[O_BACKEND].number < 2; /* threads, procs */
    if (!in_process)
        refuse("--max-restarts %s is for --backend threads and procs: let the launcher of these "
               "ranks restart them, with --resume",
            n);
    if (!v[O_SAVE].text) refuse("--max-restarts %s needs --save DIR", n);
    if (v[O_DATA].text && strcmp(v[O_DATA].text, "-") == 0)
        refuse("--max-restarts %s with --data -: standard input can be read once", n);
}

static void resolve(job *j, value *v) {
    static const int optimizers[] = { DT_TABLE_ADAGRAD, DT_TABLE_ROWWISE_ADAGRAD, DT_TABLE_ADAM,
        DT_TABLE_FTRL, DT_TABLE_SGD };
    if (v[O_RESUME].text) read_fixed(v);
    resolve_ranks(j, v);
    resolve_mode(j);
    j->model.kind = (int)v[O_MODEL].number;
    j->model.width = (int)v[O_WIDTH].number;
    j->model.optimizer = optimizers[(int)v[O_RULE].number];
    j->model.batch = (int)v[O_BATCH].number;
    resolve_hidden(v[O_HIDDEN].text, &j->model);
    int trains = v[O_EPOCHS].number > 0;
    if (trains && !v[O_DATA].text) refuse("--data is missing; --epochs 0 trains nothing");
    if (!trains && !v[O_EVAL].text && !v[O_PREDICT].text)
        refuse("--epochs 0 without --eval and --predict: there is nothing to do");
    if (trains && strcmp(v[O_DATA].text, "-") == 0 && (j->workers > 1 || v[O_EPOCHS].number > 1))
        refuse("--data -: standard input can be read once, by one worker (%d workers, %s epochs)",
            j->workers, v[O_EPOCHS].text);
    for (int id = O_EVAL; id <= O_PREDICT; id++)
        if (v[id].text && strcmp(v[id].text, "-") == 0)
            refuse("--%s -: only --data reads standard input", table[id].name);
    if (j->mode == DT_PS_GEO && v[O_RULE].number == 3)
        refuse("--rule ftrl with --mode geo: legal rules are adagrad, row-adagrad, adam and sgd");
    resolve_snapshots(j, v);
    if (v[O_RULE].number == 3 && v[O_LR].number == 0) refuse("--rule ftrl needs --lr above 0");
    for (int id = O_DATA; id <= O_PREDICT; id++) check_data(v, id);
    j->out = v[O_PREDICT].text ? stderr : stdout;
    if (v[O_LOG_CSV].text && j->rank == 0) open_csv(j, v[O_LOG_CSV].text);
}

// ==== 4. Batches =================================================================================

/* What a worker has: its model, its position in the data and its counts. */
typedef struct worker {
    const job *job;
    dt_ctx *ctx;
    dt_comm *group; /* of the workers */
    int rank;       /* in the group */
    ctr_model model;
    ctr_metrics *metrics;     /* since the last progress line */
    int64_t step, samples;    /* done so far; samples of this worker or, with sync, of all */
    int64_t reported;         /* step of the last progress line */
    int64_t resumed, saved;   /* steps of the snapshot that was loaded, of the last one saved */
    const char *resumed_from; /* its folder; NULL: none was loaded */
    dt_ps_stats last;         /* at the last progress line */
    double last_time, last_samples;
} worker;

/* Reads this worker's part of the next batch. Returns 0 if the data has ended. A batch may have no
   samples for this worker, if the data ends within it or lines are bad. With probabilities: marks
   in `is_sample` (job.model.batch) the lines that are samples, and sets *lines to their number. */
static int read_batch(
    const worker *w, criteo_reader *r, ctr_batch *b, char *is_sample, int *lines) {
    int size = w->job->model.batch, part = size / w->job->workers, first = w->rank * part;
    int64_t skipped = criteo_skip(r, first), taken = 0;
    criteo_sample s;
    b->n = 0;
    for (; skipped == first && taken < part; taken++) {
        int got = criteo_read(r, is_sample != NULL, &s);
        if (got < 0) break;
        if (got) ctr_batch_add(b, &s);
        if (is_sample) is_sample[first + taken] = (char)got;
    }
    int64_t all = skipped + taken;
    if (taken == part) all += criteo_skip(r, size - first - part);
    if (lines) *lines = (int)all;
    return all > 0 && dt_error(w->ctx) == DT_OK;
}

/* [worker] Predicts a batch, and with `train` adds its gradients. Fills in logits (n). A worker
   without samples takes part in the pulls, which are collective in owned mode. */
static void run_batch(worker *w, const ctr_batch *b, int train, float *logits) {
    dt_ctx *ctx = w->ctx;
    if (b->n == 0) {
        ctr_forward_nothing(&w->model);
        return;
    }
    dt_tensor *y = ctr_forward(&w->model, b);
    if (train) {
        dt_tensor *labels = dt_input(ctx, DT_F32, DT_SHAPE(b->n), b->labels);
        /* geo averages what the workers have learnt, the other modes add up their gradients */
        int geo = w->job->mode == DT_PS_GEO, batch = w->job->model.batch;
        dt_backward(dt_bce_with_logits(y, labels, geo ? batch / w->job->workers : batch));
    }
    if (dt_error(ctx) == DT_OK) dt_read(y, logits);
    dt_reset(ctx);
}

// ==== 5. Output ==================================================================================

static double now(dt_ctx *ctx) { return dt_ctx_host(ctx)->now(dt_ctx_host(ctx)->user); }

/* Adds up what the workers have, with sync at every progress line, else at the end. */
static void sum_over_workers(const worker *w, ctr_metrics *m, double *more, size_t n) {
    if (m) dt_sum_doubles(w->group, (double *)m, sizeof *m / sizeof(double));
    if (more) dt_sum_doubles(w->group, more, n);
}

/* Keeps the rows of the log up to the step from which the run resumes. That step's evaluation goes
   too: if the step ends an epoch, it is repeated. */
static void csv_rewind(const worker *w) {
    const job *j = w->job;
    char row[512] = "";
    long keep = 0;
    if (!j->csv || !j->csv_keeps || w->rank != 0) return;
    rewind(j->csv);
    while (fgets(row, sizeof row, j->csv)) {
        size_t length = strlen(row);
        int64_t step = keep ? strtoll(row, NULL, 10) : 0;
        int evaluates = keep && row[length - 2 + (length < 2)] != ',';
        if (row[length - 1] != '\n' || step + evaluates > w->resumed) break;
        keep += (long)length;
    }
    if (ftruncate(fileno(j->csv), keep) != 0 || fseek(j->csv, 0, SEEK_END) != 0)
        dt_fail(w->ctx, DT_ERR_IO, "--log-csv %s: %s", j->v[O_LOG_CSV].text, strerror(errno));
}

enum { KEYS = DT_PS_HISTOGRAM, BYTES, FIGURES };

/* Prints a progress line and a row of the log. eval: NULL, or the metrics of --eval. */
static void report(worker *w, const ctr_metrics *eval) {
    const job *j = w->job;
    dt_ps_stats stats = dt_ps_info(w->model.ps);
    double figures[FIGURES], time = now(w->ctx);
    int stale = 0;
    if (w->reported == w->step && !eval) return;
    w->reported = w->step;
    for (int i = 0; i < DT_PS_HISTOGRAM; i++)
        figures[i] = (double)(stats.staleness[i] - w->last.staleness[i]);
    figures[KEYS] = (double)stats.pulled;
    figures[BYTES] = (double)stats.bytes;
    if (j->mode == DT_PS_SYNC) sum_over_workers(w, w->metrics, figures, FIGURES);
    for (int i = 0; i < DT_PS_HISTOGRAM; i++)
        if (figures[i] > 0) stale = i;
    w->samples += (int64_t)w->metrics->samples;
    double auc = ctr_auc(w->metrics, NULL), loss = ctr_logloss(w->metrics);
    double rate = w->metrics->samples / (time - w->last_time);
    if (w->rank == 0 && !j->v[O_QUIET].number) {
        fprintf(j->out,
            "step %6lld | samples %lld | logloss %.5f | auc %.4f | %.0f samples/s | keys %.0f | "
            "%.1f MB | stale %d",
            (long long)w->step, (long long)w->samples, loss, auc, rate, figures[KEYS],
            figures[BYTES] / 1e6, stale);
        if (eval)
            fprintf(
                j->out, " | eval auc %.5f logloss %.5f", ctr_auc(eval, NULL), ctr_logloss(eval));
        fprintf(j->out, "\n");
        if (fflush(j->out) != 0) dt_fail(w->ctx, DT_ERR_IO, "standard output: %s", strerror(errno));
    }
    if (j->csv && w->rank == 0) {
        fprintf(j->csv, "%lld,%lld,", (long long)w->step, (long long)w->samples);
        if (w->metrics->samples > 0)
            fprintf(j->csv, "%.17g,%.9f,%.0f", loss, auc, rate);
        else
            fprintf(j->csv, ",,");
        fprintf(j->csv, ",%.0f,%.0f,%d,", figures[KEYS], figures[BYTES], stale);
        if (eval)
            fprintf(j->csv, "%.9f,%.17g", ctr_auc(eval, NULL), ctr_logloss(eval));
        else
            fprintf(j->csv, ",");
        fprintf(j->csv, "\n");
        if (fflush(j->csv) != 0)
            dt_fail(w->ctx, DT_ERR_IO, "--log-csv %s: %s", j->v[O_LOG_CSV].text, strerror(errno));
    }
    memset(w->metrics, 0, sizeof *w->metrics);
    w->last = stats;
    w->last_time = time;
}

/* Adds up the lines that all workers have read, prints the number of bad ones, and fails if all are
   bad. */
static void report_bad(const worker *w, const criteo_reader *r, const char *path) {
    double lines[2] = { r ? (double)r->bad : 0, r ? (double)r->samples : 0 };
    sum_over_workers(w, NULL, lines, 2);
    if (lines[0] > 0 && w->rank == 0)
        fprintf(stderr, "%s: %.0f bad line%s skipped\n", path, lines[0], lines[0] == 1 ? "" : "s");
    if (lines[0] > 0 && lines[1] == 0) dt_fail(w->ctx, DT_ERR_ARG, "%s has no good lines", path);
}

// ==== 6. Training, evaluation, prediction ========================================================

/* [collective: workers] Predicts all lines of a file. Adds to `metrics` if the lines have labels to
   evaluate; else prints a probability for each line, and nan for a bad line. */
static void predict(worker *w, const char *path, ctr_metrics *metrics) {
    const job *j = w->job;
    int size = j->model.batch, part = size / j->workers, lines;
    size_t doubles = (size_t)size * sizeof(double);
    criteo_reader *r = criteo_open(w->ctx, path, j->v[O_SKIP_BAD].number != 0);
    ctr_batch b = ctr_batch_make(w->ctx, part);
    double *p = (double *)dt_alloc(w->ctx, DT_MEM_HOST, doubles, "probabilities");
    float *logits = (float *)dt_alloc(w->ctx, DT_MEM_HOST, (size_t)part * 4, "logits");
    char *is_sample = (char *)dt_alloc(w->ctx, DT_MEM_HOST, (size_t)size, "lines");
    dt_no_grad(w->ctx, 1);
    dt_barrier(w->group); /* the other workers have trained too */
    while (r && dt_error(w->ctx) == DT_OK &&
           read_batch(w, r, &b, metrics ? NULL : is_sample, &lines)) {
        run_batch(w, &b, 0, logits);
        if (metrics) {
            ctr_count(metrics, logits, b.labels, b.n);
            continue;
        }
        memset(p, 0, doubles);
        int at = 0, first = w->rank * part;
        for (int i = first; i < first + part && i < lines; i++)
            p[i] = is_sample[i] ? 1 / (1 + exp(-(double)logits[at++])) : NAN;
        sum_over_workers(w, NULL, p, (size_t)size);
        set_flag(j->predicted, 1);
        for (int i = 0; i < lines && w->rank == 0; i++) printf("%.9g\n", p[i]);
    }
    dt_no_grad(w->ctx, 0);
    if (dt_error(w->ctx) == DT_OK) report_bad(w, r, path);
    if (r && r->lines == 0 && dt_error(w->ctx) == DT_OK)
        dt_fail(w->ctx, DT_ERR_ARG, "%s has no lines", path);
    if (metrics && dt_error(w->ctx) == DT_OK) sum_over_workers(w, metrics, NULL, 0);
    dt_free(w->ctx, DT_MEM_HOST, p, doubles);
    dt_free(w->ctx, DT_MEM_HOST, logits, (size_t)part * 4);
    dt_free(w->ctx, DT_MEM_HOST, is_sample, (size_t)size);
    ctr_batch_free(w->ctx, &b);
    criteo_close(r);
    if (!metrics && fflush(stdout) != 0)
        dt_fail(w->ctx, DT_ERR_IO, "standard output: %s", strerror(errno));
}

/* [collective: workers] Saves a snapshot of the tables, once for each step. */
static void save(worker *w) {
    const char *dir = w->job->v[O_SAVE].text;
    if (!dir || w->step == w->saved || dt_error(w->ctx) != DT_OK) return;
    if (dt_ps_save(w->model.ps, dir, (dt_ps_save_desc){ .delta = 0, .keep = 2 }) == DT_OK &&
        w->saved < 0 && w->rank == 0)
        write_fixed(w->ctx, w->job->v);
    w->saved = w->step;
}

/* One pass over --data. Skips the steps before the snapshot of --resume. Returns 0 if the run must
   end. */
static int train_epoch(worker *w, criteo_reader *r, ctr_batch *batches, float *logits) {
    const job *j = w->job;
    int64_t every = (int64_t)j->v[O_LOG_EVERY].number,
            save_every = (int64_t)j->v[O_SAVE_EVERY].number,
            stop_at = (int64_t)j->v[O_STOP_AT].number;
    int64_t part = j->model.batch / j->workers, lines;
    criteo_rewind(r);
    while (w->step < w->resumed && (lines = criteo_skip(r, j->model.batch)) > 0) {
        w->samples += j->mode == DT_PS_SYNC || lines < part ? lines : part;
        w->step++;
    }
    if (stop_at && w->step >= stop_at) return 0;
    int more = read_batch(w, r, batches, NULL, NULL);
    for (int k = 0; more && dt_error(w->ctx) == DT_OK; k = !k) {
        const ctr_batch *b = &batches[k];
        int ends = stop_at && w->step + 1 >= stop_at;
        more = !ends && read_batch(w, r, &batches[!k], NULL, NULL);
        if (more) ctr_prefetch(&w->model, &batches[!k]); /* comes while this step computes */
        run_batch(w, b, 1, logits);
        dt_ps_step(w->model.ps, j->v[O_LR].number);
        if (dt_error(w->ctx) != DT_OK) return 0;
        set_flag(j->made_step, 1);
        ctr_count(w->metrics, logits, b->labels, b->n);
        if (++w->step % every == 0) report(w, NULL);
        if (save_every && w->step % save_every == 0) save(w);
        if (ends) return 0;
    }
    return dt_error(w->ctx) == DT_OK;
}

static void train(worker *w) {
    const job *j = w->job;
    dt_ctx *ctx = w->ctx;
    int part = j->model.batch / j->workers, epochs = (int)j->v[O_EPOCHS].number;
    criteo_reader *r =
        epochs ? criteo_open(ctx, j->v[O_DATA].text, j->v[O_SKIP_BAD].number != 0) : NULL;
    ctr_batch b[2] = { ctr_batch_make(ctx, part), ctr_batch_make(ctx, part) };
    ctr_metrics *eval = (ctr_metrics *)dt_alloc(ctx, DT_MEM_HOST, sizeof *eval, "metrics");
    float *logits = (float *)dt_alloc(ctx, DT_MEM_HOST, (size_t)part * 4, "logits");
    w->metrics = (ctr_metrics *)dt_alloc(ctx, DT_MEM_HOST, sizeof *w->metrics, "metrics");
    if (dt_error(ctx) == DT_OK) memset(w->metrics, 0, sizeof *w->metrics);
    w->last_time = now(ctx);
    if (epochs == 0) w->step = w->resumed;
    csv_rewind(w);
    /* a folder that cannot be written must fail before the training, not after it */
    if (!w->resumed_from || (j->v[O_SAVE].text && strcmp(w->resumed_from, j->v[O_SAVE].text) != 0))
        save(w);
    w->saved = w->resumed;
    for (int e = 0, more = 1; e < (epochs ? epochs : 1) && more && dt_error(ctx) == DT_OK; e++) {
        if (epochs) more = train_epoch(w, r, b, logits);
        if (epochs && w->step == 0 && dt_error(ctx) == DT_OK)
            dt_fail(ctx, DT_ERR_ARG, "--data %s has no lines", j->v[O_DATA].text);
        /* an epoch that ended before the snapshot was evaluated then */
        if (epochs && w->step < w->resumed) continue;
        /* before an evaluation, which may fail */
        if (epochs && (e + 1 == epochs || !more)) save(w);
        memset(eval, 0, sizeof *eval);
        if (j->v[O_EVAL].text && dt_error(ctx) == DT_OK) predict(w, j->v[O_EVAL].text, eval);
        if (dt_error(ctx) == DT_OK) report(w, j->v[O_EVAL].text ? eval : NULL);
    }
    if (w->step < w->resumed && dt_error(ctx) == DT_OK)
        dt_fail(ctx, DT_ERR_ARG, "--data %s ends at step %lld, before the snapshot's step %lld",
            j->v[O_DATA].text, (long long)w->step, (long long)w->resumed);
    if (r && dt_error(ctx) == DT_OK) report_bad(w, r, j->v[O_DATA].text);
    if (j->v[O_PREDICT].text && dt_error(ctx) == DT_OK) predict(w, j->v[O_PREDICT].text, NULL);
    dt_free(ctx, DT_MEM_HOST, eval, sizeof *eval);
    dt_free(ctx, DT_MEM_HOST, logits, (size_t)part * 4);
    dt_free(ctx, DT_MEM_HOST, w->metrics, sizeof *w->metrics);
    ctr_batch_free(ctx, &b[0]);
    ctr_batch_free(ctx, &b[1]);
    criteo_close(r);
}

/* [collective: world] Loads the newest snapshot: after a restart that of --save, if there is one,
   else that of --resume. At the first start the folder of --save is empty. So if --resume names the
   same folder, it need not contain a snapshot. */
static void load(worker *w) {
    const char *save = w->job->v[O_SAVE].text, *resume = w->job->v[O_RESUME].text;
    const char *from[2] = { w->job->attempt > 0 ? save : NULL, resume };
    for (int i = 0; i < 2 && !w->resumed_from && dt_error(w->ctx) == DT_OK; i++) {
        if (from[i]) w->resumed = dt_ps_load(w->model.ps, from[i]);
        if (w->resumed > 0) w->resumed_from = from[i];
    }
    double stop_at = w->job->v[O_STOP_AT].number;
    if (stop_at > 0 && stop_at < (double)w->resumed)
        dt_fail(w->ctx, DT_ERR_ARG, "--stop-at %.0f is before step %lld of the snapshot in %s",
            stop_at, (long long)w->resumed, w->resumed_from);
    if (resume && !w->resumed_from && !(save && strcmp(save, resume) == 0))
        dt_fail(w->ctx, DT_ERR_IO, "--resume %s: there is no snapshot", resume);
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    int rank = dt_ctx_rank(ctx), serves;
    worker w = { .job = j, .ctx = ctx, .rank = rank, .saved = -1 };
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = j->servers,
                                    .mode = j->mode,
                                    .staleness = j->staleness,
                                    .geo_steps = j->geo_steps,
                                    .credits = CTR_TABLES });
    serves = dt_ps_is_server(ps);
    w.group = dt_comm_split(dt_world(ctx), serves ? -1 : 0, rank, "workers");
    w.model = ctr_model_make(ctx, j->model, ps);
    load(&w);
    if (serves)
        dt_ps_serve(ps);
    else {
        train(&w);
        if (dt_error(ctx) == DT_OK) dt_ps_end(ps);
    }
    /* all owners: rows and bytes of their tables */
    double sums[2] = { 0, 0 };
    for (int t = w.model.wide; t <= w.model.last_table && dt_error(ctx) == DT_OK; t++) {
        dt_table_stats s = dt_table_info(dt_ps_owned(ps, t));
        sums[0] += (double)s.rows;
        sums[1] += (double)s.total_bytes;
    }
    if (dt_error(ctx) == DT_OK) dt_sum_doubles(dt_world(ctx), sums, 2);
    if (dt_error(ctx) == DT_OK && rank == 0 && !j->v[O_QUIET].number)
        fprintf(j->out, "%.0f rows in %.1f MB of tables\n", sums[0], sums[1] / 1e6);
    return dt_error(ctx);
}

// ==== 7. Restarts, main ====================================================================================

/* Errors are printed once, by main. */
static void log_notices(void *user, int level, int rank, const char *text) {
    if (level != DT_LOG_ERROR) dt_host_default()->log(user, level, rank, text);
}

static dt_status run_once(job *j, dt_report *failure, const dt_host *host) {
    static const dt_backend backends[] = { DT_BACKEND_THREADS, DT_BACKEND_PROCS, DT_BACKEND_TCP,
        DT_BACKEND_MPI };
    return dt_run((dt_run_desc){ .ranks = j->ranks,
                      .backend = backends[(int)j->v[O_BACKEND].number],
                      .timeout_s = j->v[O_TIMEOUT].number,
                      .seed = (uint64_t)j->v[O_SEED].number,
                      .host = host,
                      .report = failure,
                      .rank = j->rank,
                      .rendezvous = j->v[O_RENDEZVOUS].text,
                      .read_fault_env = j->attempt == 0 },
        rank_main, j);
}

/* Returns 1 if the ranks should restart after this failure, and prepares the restart. Predictions
   that were printed cannot be printed again. */
static int should_restart(job *j, const dt_report *failure) {
    if (j->attempt >= (int)j->v[O_MAX_RESTARTS].number || failure->left_behind ||
        get_flag(j->predicted) || !restart_may_help(failure, get_flag(j->made_step)))
        return 0;
    set_flag(j->made_step, 0);
    j->attempt++;
    fprintf(stderr, "restart %d of %s, after: %s\n", j->attempt, j->v[O_MAX_RESTARTS].text,
        failure->text);
    return 1;
}

int main(int argc, char **argv) {
    static value v[N_OPTIONS];
    job j = { .v = v };
    dt_report failure = { .status = DT_OK };
    dt_host host = *dt_host_default();
    host.log = log_notices;
    signal(SIGPIPE, SIG_IGN); /* a write then fails, and the error is printed */
    signal(SIGXFSZ, SIG_IGN);
    set_defaults(v);
    parse_options(v, argc, argv);
    if (v[O_HELP].number) {
        print_help();
        return fflush(stdout) != 0;
    }
    resolve(&j, v);
    j.made_step = shared_flags(2);
    j.predicted = j.made_step + 1;
    dt_status status = run_once(&j, &failure, &host);
    while (status != DT_OK && should_restart(&j, &failure)) status = run_once(&j, &failure, &host);
    if (status != DT_OK && (j.rank == 0 || failure.rank == j.rank))
        fprintf(stderr, "error: %s\n", failure.text);
    if (failure.left_behind) _exit(1); /* a rank's thread did not end and still uses j */
    return status != DT_OK;
}
