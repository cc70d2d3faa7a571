/* bench_comm.c - dt's collectives compared with Open MPI on the same machine
   Public domain or MIT, at your choice; see LICENSE.

       make build/bench_comm && build/bench_comm [--quick] [--ops LIST] [--ranks LIST] [--backends
       LIST]
                                                 [--buffers LIST] [--sizes LIST] [--rounds N]
                                                 [--seconds X] [--mpi DIR]

   f32, sums, separate send and receive buffers, checks on. `bytes` is the size of the full buffer:
   the receive buffer of all-gather, the send buffer of reduce-scatter and all-to-all; at least one
   element a block. A run calls every size for 20 ms or more, in bursts of a millisecond or one
   call. The result is the time of the best burst, from the first rank's start to the last rank's
   end, divided by its calls; for send-recv (ping-pong of ranks 2i and 2i+1, all pairs at once) half
   of that. dt and Open MPI run in turns, each in its own processes, measured by the same loop; the
   best round of each counts.

   buffers      of forked ranks: `range` from dt_alloc(DT_MEM_COMM), which others can reach, or
                `malloc`, which they cannot. To ranks that are threads, all memory is `range`.
   bound_us     the machine's bound, of the same ranks over the same buffers in the same run, above
                1 MiB: what the operation has to read and write, copied without sums or any wait.
                For all-reduce each rank copies its N-th of all N buffers to all N, which is N*S
                read and N*S written. nan for reduce-scatter, which writes less than it reads, and
                for buffers that cannot be reached. bound_share = bound_us / us.
   peer         peers/mpi_comm.c, compiled by mpicc and run by mpirun, of --mpi or the path, where
                both are Open MPI's; in each of its settings (see `settings`), of which the fastest
                counts, size by size.
   summary      OP_geomean, _geomean_2_ranks, _min (above 64 B), _min_64 (up to 64 B) of ratio, and
                _bound_share_min: forked ranks, buffers in the range; the same with malloc buffers;
                the same with threads.

   CONTENTS
     1. Settings
     2. dt's side
     3. Open MPI
     4. Rows
     5. main */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/bench/bench.h"

// ==== 1. Settings ===============================================================================

enum {
    OPS = 5,
    MOST_LISTED = 16,
    MOST_RANKS = 64,
    BURSTS = 20,
    LEAST_BURSTS = 4,
    BOUND_ABOVE = 1 << 20,
    SMALL = 64
};
typedef enum op { ALL_REDUCE = 0, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND_RECV } op;
static const char *const op_names[OPS] = { "all-reduce", "all-gather", "reduce-scatter",
    "all-to-all", "send-recv" };

/* dt's variants. A choice of them is a set of bits. */
enum { PROCS_RANGE = 0, PROCS_MALLOC, THREADS, WAYS };
static const char *const way_backends[WAYS] = { "procs", "procs", "threads" };
static const char *const way_buffers[WAYS] = { "range", "malloc", "range" };
static const char *const way_suffix[WAYS] = { "", "_malloc", "_threads" };

typedef struct options {
    int quick, rounds, ways, ops;
    int ranks[MOST_LISTED], n_ranks;
    size_t sizes[MOST_LISTED];
    int n_sizes;
    double seconds;  /* minimum time of all bursts of a size */
    const char *mpi; /* folder of mpicc and mpirun; NULL: search PATH */
} options;

/* 1 if `name` is in the list "a,b,c". */
static int listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *p = list; (p = strstr(p, name)) != NULL; p += length)
        if ((p == list || p[-1] == ',') && (p[length] == 0 || p[length] == ',')) return 1;
    return 0;
}

/* The set of names in the list; 0 if the list has an unknown name. */
static int choose(const char *list, const char *const *names, int n) {
    int set = 0;
    size_t words = 1, found = 0;
    for (const char *p = list; *p; p++) words += *p == ',';
    for (int i = 0; i < n; i++) {
        if (!listed(list, names[i])) continue;
        set |= 1 << i;
        int again = 0;
        for (int j = 0; j < i; j++) again |= strcmp(names[i], names[j]) == 0;
        found += !again;
    }
    return found == words ? set : 0;
}

/* Parses a list of numbers. 0 if one is outside least .. most or no multiple of `unit`. */
static int numbers(const char *list, size_t *out, size_t least, size_t most, size_t unit) {
    int n = 0;
    for (const char *p = list; n < MOST_LISTED; p++) {
        char *end;
        size_t x = (size_t)strtoull(p, &end, 10);
        if (end == p || x < least || x > most || x % unit != 0) return 0;
        out[n++] = x;
        if (*end == 0) return n;
        if (*(p = end) != ',') return 0;
    }
    return 0;
}

static options parse(int argc, char **argv) {
    options o = { 0, 5, 7, 31, { 2, 4, 8 }, 3,
        { 8, 64, 512, 4096, 32768, 262144, 2097152, 16777216 }, 8, 0.02, NULL };
    int backends = 7, buffers = 7;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0)
            o = (options){ 1, 1, 7, 31, { 2 }, 1, { 8, 32768, 2097152 }, 3, 0.001, NULL };
    for (int i = 1; i < argc; i++) {
        const char *v;
        size_t list[MOST_LISTED];
        int good = 1;
        /* read above, because other options override its settings */
        if (strcmp(argv[i], "--quick") == 0)
            continue;
        else if ((v = bench_option(argc, argv, &i, "--ops")))
            good = (o.ops = choose(v, op_names, OPS)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--backends")))
            good = (backends = choose(v, way_backends, WAYS)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--buffers")))
            good = (buffers = choose(v, way_buffers, WAYS)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--rounds")))
            good = (o.rounds = atoi(v)) > 0 && o.rounds <= 1000;
        else if ((v = bench_option(argc, argv, &i, "--seconds")))
            good = (o.seconds = atof(v)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--mpi")))
            o.mpi = v;
        else if ((v = bench_option(argc, argv, &i, "--sizes")))
            good = (o.n_sizes = numbers(v, o.sizes, 4, (size_t)1 << 30, 4)) > 0;
        else if ((v = bench_option(argc, argv, &i, "--ranks"))) {
            /* even numbers, because send-recv has pairs */
            good = (o.n_ranks = numbers(v, list, 2, MOST_RANKS, 2)) > 0;
            for (int r = 0; r < o.n_ranks; r++) o.ranks[r] = (int)list[r];
        } else
            good = 0;
        o.ways = backends & buffers;
        if (!good || !o.ways)
            bench_refuse(argc, argv, i,
                "--quick --ops LIST --ranks LIST --backends procs,threads --buffers range,malloc "
                "--sizes LIST --rounds N --seconds X --mpi DIR");
    }
    return o;
}

/* `bytes` rounded so that the blocks of all ranks are equal and not empty. */
static size_t bytes_of(size_t bytes, op kind, int ranks) {
    size_t n = kind == ALL_REDUCE || kind == SEND_RECV ? 1 : (size_t)ranks, share = bytes / 4 / n;
    return 4 * n * (share ? share : 1);
}

// ==== 2. dt's side ==============================================================================

/* One run, in memory that forked ranks share. */
typedef struct job {
    op kind;
    int way, check, n_sizes;
    size_t bytes[MOST_LISTED];
    double seconds, start[MOST_RANKS], end[MOST_RANKS];
    float *send[MOST_RANKS], *recv[MOST_RANKS];
    double us[MOST_LISTED], bound_us[MOST_LISTED]; /* the results */
} job;

typedef struct rank {
    job *job;
    dt_comm *world;
    int me, n;
    size_t count, share; /* of the size being measured */
} rank;

static void once_dt(const rank *r) {
    const float *send = r->job->send[r->me];
    float *recv = r->job->recv[r->me];
    int first = r->me % 2 == 0;
    switch (r->job->kind) {
    case ALL_REDUCE: dt_all_reduce(r->world, send, recv, r->count, DT_F32, DT_SUM); break;
    case ALL_GATHER: dt_all_gather(r->world, send, recv, r->share, DT_F32); break;
    case REDUCE_SCATTER: dt_reduce_scatter(r->world, send, recv, r->share, DT_F32, DT_SUM); break;
    case ALL_TO_ALL: dt_all_to_all(r->world, send, recv, r->share, DT_F32); break;
    case SEND_RECV:
        if (first) dt_send(r->world, send, r->count, DT_F32, r->me + 1, 0);
        dt_recv(r->world, recv, r->count, DT_F32, first ? r->me + 1 : r->me - 1, 0);
        if (!first) dt_send(r->world, send, r->count, DT_F32, r->me - 1, 0);
        break;
    }
}

static void stream(float *restrict to, const float *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = from[i];
}

/* Only the least copies that the operation needs, without sums and waits. */
static void once_bound(const rank *r) {
    job *j = r->job;
    size_t each = r->count / (size_t)r->n, mine = (size_t)r->me * each;
    for (int step = 0; step < r->n; step++) {
        int from = (r->me + step) % r->n;
        size_t its = (size_t)from * r->share;
        if (j->kind == ALL_REDUCE) stream(j->recv[from] + mine, j->send[from] + mine, each);
        if (j->kind == ALL_GATHER) stream(j->recv[r->me] + its, j->send[from], r->share);
        if (j->kind == ALL_TO_ALL)
            stream(j->recv[r->me] + its, j->send[from] + (size_t)r->me * r->share, r->share);
    }
    /* ping-pong: two copies, one after the other */
    if (j->kind == SEND_RECV && r->me % 2 == 0)
        for (int way = 0; way < 2; way++)
            stream(j->recv[r->me + way], j->send[r->me + 1 - way], r->count);
}

/* Seconds of one call in the best burst, from the start of the first rank to the end of the last.
   All ranks compute it from the same times, so they get the same result. */
static double measure(const rank *r, void (*once)(const rank *r)) {
    double total = 0, best = INFINITY, burst = r->job->seconds / BURSTS;
    int bursts = 0;
    once(r); /* the first call touches the pages for the first time */
    for (int64_t calls = 1; total < r->job->seconds || bursts < LEAST_BURSTS;) {
        double first = INFINITY, last = 0;
        dt_barrier(r->world);
        r->job->start[r->me] = bench_now();
        for (int64_t i = 0; i < calls; i++) once(r);
        r->job->end[r->me] = bench_now();
        if (dt_barrier(r->world) != DT_OK) return NAN;
        for (int i = 0; i < r->n; i++)
            first = fmin(first, r->job->start[i]), last = fmax(last, r->job->end[i]);
        if (last - first < burst) {
            calls = (int64_t)((double)calls * fmin(8, 1.2 * burst / fmax(last - first, 1e-9))) + 1;
            continue;
        }
        total += last - first;
        bursts++;
        best = fmin(best, (last - first) / (double)calls);
    }
    return best / (r->job->kind == SEND_RECV ? 2 : 1);
}

/* Small integers, whose sums are exact. */
static float value(int rank, size_t i) { return (float)((i * 3 + (size_t)rank) % 8); }

static float expected(const rank *r, size_t i) {
    op kind = r->job->kind;
    float sum = 0;
    int from = (int)(i / r->share);
    if (kind == ALL_GATHER) return value(from, i % r->share);
    if (kind == ALL_TO_ALL) return value(from, i % r->share + (size_t)r->me * r->share);
    if (kind == SEND_RECV) return value(r->me ^ 1, i);
    for (int rank = 0; rank < r->n; rank++)
        sum += value(rank, kind == ALL_REDUCE ? i : i + (size_t)r->me * r->share);
    return sum;
}

/* Makes one call and checks its result before it is timed. */
static void check(dt_ctx *ctx, const rank *r) {
    const float *recv = r->job->recv[r->me];
    size_t count = r->job->kind == REDUCE_SCATTER ? r->share : r->count;
    memset(r->job->recv[r->me], 0, count * sizeof *recv);
    once_dt(r);
    for (size_t i = 0; i < count && dt_error(ctx) == DT_OK; i++)
        if (recv[i] != expected(r, i))
            dt_fail(ctx, DT_ERR_COMM, "%s of %zu bytes: element %zu is %g and should be %g",
                op_names[r->job->kind], 4 * r->count, i, recv[i], expected(r, i));
    dt_barrier(r->world);
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    rank r = { j, dt_world(ctx), dt_ctx_rank(ctx), dt_comm_size(dt_world(ctx)), 0, 1 };
    size_t most = 0;
    for (int i = 0; i < j->n_sizes; i++) most = j->bytes[i] > most ? j->bytes[i] : most;
    size_t room = (most + 4095) / 4096 * 4096;
    float *buffer =
        (float *)(j->way == PROCS_MALLOC ? aligned_alloc(4096, 2 * room)
                                         : dt_alloc(ctx, DT_MEM_COMM, 2 * room, "buffers"));
    if (!buffer) return dt_fail(ctx, DT_ERR_MEM, "no memory for buffers of %zu bytes", room);
    j->send[r.me] = buffer;
    j->recv[r.me] = buffer + room / sizeof *buffer;
    for (size_t i = 0; i < most / sizeof *buffer; i++)
        j->send[r.me][i] = value(r.me, i), j->recv[r.me][i] = 0;
    for (int i = 0; i < j->n_sizes && dt_error(ctx) == DT_OK; i++) {
        r.count = j->bytes[i] / sizeof *buffer;
        r.share = j->kind == ALL_REDUCE || j->kind == SEND_RECV ? r.count : r.count / (size_t)r.n;
        if (j->check) check(ctx, &r);
        double us = 1e6 * measure(&r, once_dt), bound = NAN;
        if (j->bytes[i] > BOUND_ABOVE && j->way != PROCS_MALLOC && j->kind != REDUCE_SCATTER)
            bound = 1e6 * measure(&r, once_bound);
        if (r.me == 0) j->us[i] = us, j->bound_us[i] = bound;
        dt_barrier(r.world);
    }
    if (j->way == PROCS_MALLOC)
        free(buffer);
    else
        dt_free(ctx, DT_MEM_COMM, buffer, 2 * room);
    return dt_error(ctx);
}

// ==== 3. Open MPI ===============================================================================

/* Open MPI's defaults (it yields by itself when ranks outnumber cores), and settings that its
   documentation offers for shared machines: no binding to cores; copies through shared memory,
   where the system call for a single copy (CMA) costs more. Its collectives in shared memory
   (coll_sm_priority) were never the fastest. */
typedef struct setting {
    const char *name, *words;
} setting;
static const setting settings[] = {
    { "", "" },
    { "+unbound", "--bind-to none" },
    { "+copy-in-out", "--bind-to none --mca btl_vader_single_copy_mechanism none" },
};
enum { SETTINGS = sizeof settings / sizeof *settings };

typedef struct mpi {
    char run[512], program[512]; /* mpirun; what is run, "" without Open MPI */
    char name[64];
} mpi;

/* Finds the first line of a command's output that begins with `begin`; `rest` gets the remainder of
   the line. 0 if there is none. */
static int output_line(const char *command, const char *begin, char *rest, size_t room) {
    char line[512];
    int found = 0;
    FILE *f = popen(command, "r");
    while (f && fgets(line, sizeof line, f)) {
        if (found || strncmp(line, begin, strlen(begin)) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(rest, room, "%.*s", (int)room - 1, line + strlen(begin));
        found = 1;
    }
    if (f) pclose(f);
    return found;
}

/* Looks for mpirun and mpicc and compiles the MPI program next to this one. Names that end in
   .openmpi come first, because mpirun may belong to another MPI. */
static mpi mpi_find(const options *o) {
    static const char *const suffixes[] = { ".openmpi", "" };
    mpi m = { "", "", "" };
    char self[256] = "", command[1536], version[32], word[32];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length > 0) self[length] = 0, *strrchr(self, '/') = 0;
    for (int i = 0; i < 2 && !*m.program; i++) {
        const char *folder = o->mpi ? o->mpi : "", *slash = o->mpi ? "/" : "",
                   *suffix = suffixes[i];
        const char *source = "tests/bench/peers/mpi_comm.c";
        snprintf(m.run, sizeof m.run, "%s%smpirun%s", folder, slash, suffix);
        snprintf(command, sizeof command, "timeout 20 %s --version 2>/dev/null", m.run);
        if (!output_line(command, "mpirun (Open MPI) ", version, sizeof version)) continue;
        snprintf(command, sizeof command,
            "s=%s; [ -e $s ] || s='%s/../%s'; "
            "timeout 60 %s%smpicc%s -O3 \"$s\" -o '%s/mpi_comm' 2>/dev/null && echo compiled",
            source, self, source, folder, slash, suffix, self);
        if (!output_line(command, "compiled", word, sizeof word)) continue;
        snprintf(m.program, sizeof m.program, "%s/mpi_comm", self);
        snprintf(m.name, sizeof m.name, "openmpi-%s", version);
    }
    if (!*m.program) {
        printf("# peer: Open MPI (mpicc and mpirun) is not installed%s%s; on Debian: apt-get "
               "install libopenmpi-dev "
               "openmpi-bin, elsewhere give --mpi DIR\n",
            o->mpi ? " at " : "", o->mpi ? o->mpi : "");
        return m;
    }
    printf("# peer: %s, the fastest of its settings:", m.name);
    for (int i = 0; i < SETTINGS; i++)
        printf("%s %s%s (%s)", i ? "," : "", m.name, settings[i].name,
            i ? settings[i].words : "defaults");
    printf("\n");
    return m;
}

/* One run of Open MPI: us[i] is the time of size i, if the run got to it. */
static void mpi_run(const mpi *m, const setting *s, const job *j, int ranks, double *us) {
    char command[2048], line[256];
    size_t at = (size_t)snprintf(command, sizeof command,
        "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
        "timeout 120 %s --oversubscribe %s -n %d '%s' %s %g",
        m->run, s->words, ranks, m->program, op_names[j->kind], j->seconds);
    for (int i = 0; i < j->n_sizes; i++)
        at += (size_t)snprintf(command + at, sizeof command - at, " %zu", j->bytes[i]);
    snprintf(command + at, sizeof command - at, " 2>/dev/null </dev/null");
    FILE *f = popen(command, "r");
    for (int i = 0; f && i < j->n_sizes && fgets(line, sizeof line, f);) {
        size_t bytes;
        double t;
        if (sscanf(line, "%zu,%lf", &bytes, &t) != 2 || bytes != j->bytes[i]) continue;
        us[i++] = t;
    }
    if (f) pclose(f);
}

// ==== 4. Rows ===================================================================================

typedef struct best {
    double us[MOST_LISTED], bound_us[MOST_LISTED];
} best;

/* The sums of a part of the summary. */
typedef struct sums {
    double log_all, log_two, least, least_small, least_share;
    int all, two;
} sums;

static double smaller(double a, double b) { return isnan(a) || b < a ? b : a; }

static void count_row(sums *s, size_t bytes, int ranks, double ratio, double share) {
    s->least_share = isnan(share) ? s->least_share : smaller(s->least_share, share);
    if (isnan(ratio)) return;
    s->log_all += log(ratio), s->all++;
    if (ranks == 2) s->log_two += log(ratio), s->two++;
    if (bytes > SMALL)
        s->least = smaller(s->least, ratio);
    else
        s->least_small = smaller(s->least_small, ratio);
}

/* Bus bandwidth in GB/s, as NCCL's tests define it, comparable between operations and numbers of
   ranks. */
static double bus_rate(op kind, int ranks, size_t bytes, double us) {
    double n = ranks, share = kind == ALL_REDUCE  ? 2 * (n - 1) / n
                              : kind == SEND_RECV ? 1
                                                  : (n - 1) / n;
    return share * (double)bytes / us * 1e-3;
}

/* Measures dt and Open MPI in turns for one operation and number of ranks, then prints the rows. 1
   if dt failed. */
static int run_case(const options *o, const mpi *m, op kind, int ranks, sums sum[WAYS]) {
    best dt[WAYS], peer[SETTINGS];
    job j = { .kind = kind, .n_sizes = o->n_sizes, .seconds = o->seconds };
    char text[6][32], name[96];
    for (int i = 0; i < j.n_sizes; i++) j.bytes[i] = bytes_of(o->sizes[i], kind, ranks);
    for (int i = 0; i < MOST_LISTED; i++) {
        for (int w = 0; w < WAYS; w++) dt[w].us[i] = dt[w].bound_us[i] = NAN;
        for (int s = 0; s < SETTINGS; s++) peer[s].us[i] = NAN;
    }
    for (int round = 0; round < o->rounds; round++) {
        for (int w = 0; w < WAYS; w++) {
            if (!(o->ways >> w & 1)) continue;
            j.way = w;
            j.check = round == 0;
            dt_backend backend = w == THREADS ? DT_BACKEND_THREADS : DT_BACKEND_PROCS;
            if (dt_run((dt_run_desc){ .ranks = ranks, .backend = backend, .user_bytes = sizeof j },
                    rank_main, &j))
                return 1;
            for (int i = 0; i < j.n_sizes; i++) {
                dt[w].us[i] = smaller(dt[w].us[i], j.us[i]);
                dt[w].bound_us[i] = smaller(dt[w].bound_us[i], j.bound_us[i]);
            }
        }
        for (int s = 0; *m->program && s < (o->quick ? 1 : SETTINGS); s++) {
            double us[MOST_LISTED];
            for (int i = 0; i < MOST_LISTED; i++) us[i] = NAN;
            mpi_run(m, &settings[s], &j, ranks, us);
            for (int i = 0; i < j.n_sizes; i++) peer[s].us[i] = smaller(peer[s].us[i], us[i]);
        }
    }
    for (int w = 0; w < WAYS; w++)
        for (int i = 0; o->ways >> w & 1 && i < j.n_sizes; i++) {
            int fastest = 0;
            for (int s = 1; s < SETTINGS; s++)
                if (!(peer[s].us[i] >= peer[fastest].us[i]) && !isnan(peer[s].us[i])) fastest = s;
            double us = dt[w].us[i], ratio = peer[fastest].us[i] / us,
                   share = dt[w].bound_us[i] / us;
            snprintf(name, sizeof name, "%s%s", m->name, settings[fastest].name);
            printf("%s,%s,%d,%zu,%s,%s,%s,%s,%s,%s,%s,%s\n", op_names[kind], way_backends[w], ranks,
                j.bytes[i], bench_number(text[0], sizeof text[0], us, "%.3f"),
                bench_number(
                    text[1], sizeof text[1], bus_rate(kind, ranks, j.bytes[i], us), "%.4g"),
                isnan(ratio) ? "none" : name,
                bench_number(text[2], sizeof text[2], peer[fastest].us[i], "%.3f"),
                bench_number(text[3], sizeof text[3], ratio, "%.3f"), way_buffers[w],
                bench_number(text[4], sizeof text[4], dt[w].bound_us[i], "%.3f"),
                bench_number(text[5], sizeof text[5], share, "%.3f"));
            count_row(&sum[w], j.bytes[i], ranks, ratio, share);
        }
    fflush(stdout);
    return 0;
}

/* "all_reduce_geomean_malloc" */
static void print_figure(op kind, const char *figure, int way, double x) {
    char name[96], text[32];
    snprintf(name, sizeof name, "%s_%s%s", op_names[kind], figure, way_suffix[way]);
    for (char *p = name; *p; p++) *p = *p == '-' ? '_' : *p;
    printf("summary,%s,%s\n", name, bench_number(text, sizeof text, x, "%.3f"));
}

// ==== 5. main ===================================================================================

int main(int argc, char **argv) {
    static sums sum[OPS][WAYS];
    options o = parse(argc, argv);
    bench_print_machine();
    mpi m = mpi_find(&o);
    printf("# best burst of %d rounds of %g ms\n", o.rounds, 1e3 * o.seconds);
    printf("op,backend,ranks,bytes,us,busbw_gbs,peer,peer_us,ratio,buffers,bound_us,bound_share\n");
    fflush(stdout);
    for (int k = 0; k < OPS; k++) {
        for (int w = 0; w < WAYS; w++) sum[k][w] = (sums){ 0, 0, NAN, NAN, NAN, 0, 0 };
        for (int r = 0; o.ops >> k & 1 && r < o.n_ranks; r++)
            if (run_case(&o, &m, (op)k, o.ranks[r], sum[k])) return 1;
    }
    for (int w = 0; w < WAYS; w++)
        for (int k = 0; k < OPS; k++) {
            const sums *s = &sum[k][w];
            if (!(o.ops >> k & 1) || !(o.ways >> w & 1)) continue;
            print_figure((op)k, "geomean", w, s->all ? exp(s->log_all / s->all) : NAN);
            print_figure((op)k, "geomean_2_ranks", w, s->two ? exp(s->log_two / s->two) : NAN);
            print_figure((op)k, "min", w, s->least);
            print_figure((op)k, "min_64", w, s->least_small);
            if (k != REDUCE_SCATTER && w != PROCS_MALLOC)
                print_figure((op)k, "bound_share_min", w, s->least_share);
        }
    return 0;
}
