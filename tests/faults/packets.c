/* packets.c - jobs over a network with loss, delay, reordering, duplication, corruption, partitions
   (wire.h)

       packets                       100 jobs
       packets FIRST COUNT           jobs FIRST .. FIRST + COUNT - 1; job 37 is always the same
       packets FIRST COUNT WORKERS   this many at a time (default 8)

   A job is a function of its number: 2 to 5 ranks on two hosts, a timeout, and the network's faults
   and their times. In each step its ranks sum and exchange values and compare the results with the
   expected ones. There are three classes:

       right   faults that TCP can recover from: loss, delay, reordering, duplicates, corruption,
               slow links, partitions shorter than the timeout by 1.4 s (before Linux 6.15: half of
               the timeout), idle connections under loss. Every rank must succeed, and every value
               must be correct.
       named   a lasting partition, one-way or two-way. Every rank must fail within timeout + 1 s of
               the cut, with a text that names a rank on each side of it, and that reports no lost
               connection to a rank on the reporting rank's own side. (At the rendezvous one rank's
               text is enough: another rank may wait in an operation for a rank of its own side that
               still tries to connect to the other side.)
       either  nearly every packet is lost, or the cut heals after the timeout. Either outcome, but
               the same on all ranks.

   In no class may a rank hang or a value be wrong. Limits grow by the longest delay with which this
   machine woke a rank or the network from a sleep. If that delay is long, a job may fail by name.

   Needs Linux, network namespaces and /dev/net/tun, so mostly root; else it is skipped. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/support/check.h"
#include "tests/faults/wire.h"

#include <signal.h>

enum { MOST_RANKS = 5, MOST_COUNT = 60000, WORKERS = 8, DEADLINE_S = 300 };
/* a longer wake-up delay may break a job that TCP would otherwise save, */
static const double held_up_s = 0.15;
/* and with this delay a rank may look gone even to ranks on its own side */
static const double starved_s = 0.5;

typedef enum outcome { RIGHT, NAMED, EITHER } outcome;
typedef enum fault {
    LOSS,
    DELAY,
    COPIES,
    SPOILT,
    SLOW,
    ALL_OF_IT,
    SHORT_CUT,
    SHORT_ONE_WAY,
    LOSS_AT_START,
    CUT,
    ONE_WAY,
    LONG_CUT,
    STORM,
    CUT_AT_START,
    ONE_WAY_AT_START,
    FAULTS
} fault;
static const struct {
    const char *name;
    outcome outcome;
    int at_start;
} faults[FAULTS] = {
    [LOSS] = { "loss", RIGHT, 0 },
    [DELAY] = { "delay and reordering", RIGHT, 0 },
    [COPIES] = { "copies", RIGHT, 0 },
    [SPOILT] = { "corrupted packets", RIGHT, 0 },
    [SLOW] = { "a slow link", RIGHT, 0 },
    [ALL_OF_IT] = { "all faults at once", RIGHT, 0 },
    [SHORT_CUT] = { "a short cut", RIGHT, 0 },
    [SHORT_ONE_WAY] = { "a short one-way cut", RIGHT, 0 },
    [LOSS_AT_START] = { "loss from the start", RIGHT, 1 },
    [CUT] = { "a cut", NAMED, 0 },
    [ONE_WAY] = { "a one-way cut", NAMED, 0 },
    [LONG_CUT] = { "a long cut", EITHER, 0 },
    [STORM] = { "nearly all lost", EITHER, 0 },
    [CUT_AT_START] = { "a cut at the rendezvous", NAMED, 1 },
    [ONE_WAY_AT_START] = { "a one-way cut at the rendezvous", NAMED, 1 },
};

typedef struct plan {
    int number, ranks, side[MOST_RANKS];
    fault fault;
    double timeout_s, length_s;    /* length_s: duration of the steps in a job without failure */
    conditions base[2], during[2]; /* conditions before and after the fault; during the fault */
    /* begin and end of the fault, after the job was formed (at_start: after the ranks were
       started) */
    double from_s, until_s;
    int pause; /* the step in which all ranks only compute */
    double pause_s;
} plan;

typedef struct result { /* a rank's results, written by the rank */
    double begun, formed, named, ended, late;
    long steps, wrong;
    dt_status status;
    dt_report report;
} result;

typedef struct shared { /* memory shared by a job's ranks and their starter */
    plan plan;
    result rank[MOST_RANKS];
    double onset; /* begin of the fault; 0: not yet */
} shared;

/* ---- the plan of a job ---- */

/* TCP's pauses before a retransmission double, up to the length of the cut, unless the system
   limits them. */
static double longest_cut(double timeout_s) {
    int pause_ms = 1000, fd = socket(AF_INET, SOCK_STREAM, 0);
    int limited =
        setsockopt(fd, IPPROTO_TCP, 44 /* TCP_RTO_MAX_MS */, &pause_ms, sizeof pause_ms) == 0;
    close(fd);
    return limited ? timeout_s - 1.4 : timeout_s / 2 - 0.3;
}

static void plan_conditions(plan *p, uint64_t *chance) {
    double cut_s = next_between(chance, 0.3, longest_cut(p->timeout_s));
    int way = next_below(chance, 2);
    for (int i = 0; i < 2; i++) {
        conditions *c = &p->during[i];
        c->most = 2;
        switch (p->fault) {
        case LOSS: c->loss = next_between(chance, 0.01, 0.1); break;
        case LOSS_AT_START: c->loss = next_between(chance, 0.01, 0.1), c->most = 1; break;
        case DELAY:
            c->delay_s = next_between(chance, 1e-3, 2e-2),
            c->jitter_s = next_between(chance, 1e-3, 2e-2);
            break;
        case COPIES: c->twice = next_between(chance, 0.01, 0.2), c->jitter_s = 5e-3; break;
        case SPOILT: c->spoil = next_between(chance, 0.01, 0.05); break;
        case SLOW: c->bytes_per_s = next_between(chance, 2e6, 1e7), c->queue_bytes = 200000; break;
        case ALL_OF_IT:
            c->loss = c->spoil = c->twice = 0.02;
            c->delay_s = c->jitter_s = 2e-3;
            c->bytes_per_s = 5e6, c->queue_bytes = 300000;
            break;
        case SHORT_CUT: c->cut = 1, p->until_s = cut_s; break;
        case SHORT_ONE_WAY: c->cut = i == way, p->until_s = cut_s; break;
        case CUT:
        case CUT_AT_START: c->cut = 1; break;
        case ONE_WAY:
        case ONE_WAY_AT_START: c->cut = i == way; break;
        case LONG_CUT:
            c->cut = 1, p->until_s = p->timeout_s * next_between(chance, 1.2, 1.5);
            break;
        case STORM: c->loss = next_between(chance, 0.9, 1), c->most = 0; break;
        case FAULTS: break;
        }
        if (!faults[p->fault].at_start) p->base[i].delay_s = 1e-4;
    }
}

static plan plan_make(int number) {
    plan p;
    uint64_t chance = (uint64_t)number * 1000003;
    memset(&p, 0, sizeof p);
    p.number = number;
    p.fault = (fault)(number % FAULTS);
    p.ranks = 2 + next_below(&chance, MOST_RANKS - 1);
    p.timeout_s = next_between(&chance, 2.5, 4);
    if (p.fault == LOSS_AT_START) p.timeout_s = 4;
    for (int rank = 0; rank < p.ranks; rank++) p.side[rank] = next_below(&chance, 2);
    p.side[1 + next_below(&chance, p.ranks - 1)] = 1 - p.side[0];
    p.until_s = 1e9;
    p.length_s = faults[p.fault].outcome == RIGHT ? 1 : 20;
    p.pause = next_below(&chance, 2) ? 5 : -1;
    p.pause_s = next_between(&chance, 1.2, 2.4);
    plan_conditions(&p, &chance);
    p.from_s = next_between(&chance, 0, faults[p.fault].at_start ? 0.03 : 0.5);
    if (p.fault == LOSS_AT_START) p.from_s = 0;
    if (p.until_s < 1e9) p.until_s += p.from_s;
    if (faults[p.fault].outcome == RIGHT && p.until_s < 1e9) p.length_s = p.until_s + 0.5;
    return p;
}

/* ---- the steps of a rank ---- */

/* Rank r's value for element i in a step: small integers, so that sums are exact. */
static float number_of(int step, int rank, size_t i) {
    return (float)((uint32_t)(step * 7919 + rank * 104729 + (int)(i % 65536) * 31) % 1009);
}

typedef struct arrays {
    float a[MOST_COUNT], b[MOST_COUNT];
} arrays;

static void rank_nap(result *r, double seconds) {
    double from = wire_now();
    dt_host_default()->sleep(NULL, seconds);
    double late = wire_now() - from - seconds;
    if (late > r->late) r->late = late;
}

static long all_reduce_step(dt_comm *world, arrays *x, int step, size_t n) {
    int ranks = dt_comm_size(world), rank = dt_comm_rank(world);
    long wrong = 0;
    for (size_t i = 0; i < n; i++) x->a[i] = number_of(step, rank, i);
    if (dt_all_reduce(world, x->a, x->b, n, DT_F32, DT_SUM) != DT_OK) return 0;
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < ranks; r++) sum += number_of(step, r, i);
        wrong += x->b[i] != sum;
    }
    return wrong;
}

static long all_to_all_step(dt_comm *world, arrays *x, int step, size_t n) {
    int ranks = dt_comm_size(world), rank = dt_comm_rank(world);
    size_t each = n / (size_t)ranks;
    long wrong = 0;
    for (size_t i = 0; i < each * (size_t)ranks; i++) x->a[i] = number_of(step, rank, i);
    if (dt_all_to_all(world, x->a, x->b, each, DT_F32) != DT_OK) return 0;
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < each; i++)
            wrong += x->b[(size_t)r * each + i] != number_of(step, r, (size_t)rank * each + i);
    return wrong;
}

/* One message to each other rank, and one from each. */
static long messages_step(dt_comm *world, arrays *x, int step, size_t n) {
    int ranks = dt_comm_size(world), rank = dt_comm_rank(world), k = 0;
    dt_transfer transfers[2 * MOST_RANKS];
    size_t each = n / (size_t)ranks;
    long wrong = 0;
    memset(transfers, 0, sizeof transfers);
    for (size_t i = 0; i < each; i++) x->a[i] = number_of(step, rank, i);
    for (int r = 0; r < ranks; r++) {
        if (r == rank) continue;
        for (int sends = 0; sends < 2; sends++, k++) {
            if (sends)
                transfers[k].send = x->a;
            else
                transfers[k].recv = x->b + (size_t)r * each;
            transfers[k].count = each;
            transfers[k].dtype = DT_F32;
            transfers[k].peer = r;
            transfers[k].tag = step % 100;
        }
    }
    if (dt_exchange(world, transfers, k) != DT_OK) return 0;
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < each && r != rank; i++)
            wrong += x->b[(size_t)r * each + i] != number_of(step, r, i);
    return wrong;
}

/* Rank 0 decides when the steps end, so that all ranks make equally many. */
static int another_step(dt_comm *world, const shared *s, double formed, int step, long *wrong) {
    float word[2] = { 0, 0 };
    if (dt_comm_rank(world) == 0) {
        word[0] = (float)step;
        word[1] = (float)(wire_now() < formed + s->plan.length_s || step < 12);
    }
    if (dt_broadcast(world, word, 2, DT_F32, 0) != DT_OK) return 0;
    *wrong += word[0] != (float)step;
    return word[1] != 0;
}

static dt_status rank_steps(dt_ctx *ctx, void *user) {
    static const size_t counts[6] = { 1, 10, 500, 5000, 20000, MOST_COUNT };
    static arrays x;
    shared *s = (shared *)user;
    dt_comm *world = dt_world(ctx);
    result *r = &s->rank[dt_comm_rank(world)];
    uint64_t chance = (uint64_t)s->plan.number; /* all ranks make the same choices */
    r->formed = wire_now();
    for (int step = 0; another_step(world, s, r->formed, step, &r->wrong); step++) {
        size_t n = counts[next_below(&chance, 6)];
        long (*const steps[3])(
            dt_comm *, arrays *, int, size_t) = { all_reduce_step, all_to_all_step, messages_step };
        r->wrong += steps[next_below(&chance, 3)](world, &x, step, n);
        rank_nap(r, 2e-3);
        if (step == s->plan.pause && faults[s->plan.fault].outcome == RIGHT)
            dt_host_default()->sleep(NULL, s->plan.pause_s);
        r->steps += dt_error(ctx) == DT_OK;
    }
    if (dt_error(ctx)) r->named = wire_now();
    return dt_error(ctx);
}

static void rank_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text; /* the report has the same text */
}

static void rank_process(shared *s, int rank, const wire *w) {
    result *r = &s->rank[rank];
    int side = s->plan.side[rank];
    char rendezvous[64];
    dt_host host = *dt_host_default();
    dt_run_desc desc;
    alarm(DEADLINE_S);
    if (setns(w->host[side], CLONE_NEWNET) != 0 || unshare(CLONE_NEWUTS) != 0) _exit(3);
    if (sethostname(side ? "host1" : "host0", 5) != 0) _exit(3);
    for (int i = 0; i < 2; i++) close(w->device[i]), close(w->host[i]);
    snprintf(rendezvous, sizeof rendezvous, "10.77.4.%d:%d", 1 + s->plan.side[0],
        20000 + s->plan.number % 10000);
    memset(&desc, 0, sizeof desc);
    host.log = rank_log;
    desc.host = &host;
    desc.ranks = s->plan.ranks;
    desc.backend = DT_BACKEND_TCP;
    desc.timeout_s = s->plan.timeout_s;
    desc.rank = rank;
    desc.rendezvous = rendezvous;
    desc.token = "no stranger is here";
    desc.report = &r->report;
    r->begun = wire_now();
    r->status = dt_run(desc, rank_steps, s);
    r->ended = wire_now();
    if (r->named == 0) r->named = r->ended; /* the failure was at the rendezvous */
    _exit(0);
}

/* ---- checking a job ---- */

/* Bit mask of the sides of the ranks that a text names as "rank 3" or "ranks 1, 2". */
static int sides_named(const plan *p, const char *text) {
    int sides = 0;
    for (const char *at = strstr(text, "rank"); at; at = strstr(at, "rank")) {
        at += strspn(at, "ranks");
        while (*at == ' ' && at[1] >= '0' && at[1] <= '9') {
            int rank = atoi(at + 1);
            if (rank < p->ranks) sides |= 1 << p->side[rank];
            at += 1 + strspn(at + 1, "0123456789");
            if (*at != ',') break;
            at++;
        }
    }
    return sides;
}

/* 1 if a rank reports that it lost a rank on the same side. */
static int blames_own_side(const plan *p, const dt_report *report) {
    for (const char *at = strstr(report->text, "connection to rank "); at;
         at = strstr(at + 1, "connection to rank ")) {
        int rank = atoi(at + strlen("connection to rank "));
        if (report->rank >= 0 && rank < p->ranks && p->side[rank] == p->side[report->rank])
            return 1;
    }
    return 0;
}

/* A check whose text names the job. */
#define JOB_CHECK(s, cond, fmt, ...) \
    CHECK_MSG(cond, "job %d (%s, %d ranks, timeout %.1f s): " fmt, (s)->plan.number, \
        faults[(s)->plan.fault].name, (s)->plan.ranks, (s)->plan.timeout_s, __VA_ARGS__)

/* 1 if any rank's text names both sides. */
static int both_named(const shared *s) {
    int both = 0;
    for (int i = 0; i < s->plan.ranks; i++)
        both |= sides_named(&s->plan, s->rank[i].report.text) == 3;
    return both;
}

static void check_named(const shared *s, int rank, double limit, double late) {
    const result *r = &s->rank[rank];
    const char *text = r->report.text;
    double begin = s->onset; /* a rank that starts later has the same time limit */
    for (int i = 0; i < s->plan.ranks; i++) begin = fmax(begin, s->rank[i].begun);
    int well = sides_named(&s->plan, text) == 3 ||
               (faults[s->plan.fault].at_start && text[0] && both_named(s));
    int starved = late > starved_s;
    JOB_CHECK(s, well || starved, "rank %d names no rank on each side: %s", rank, text);
    JOB_CHECK(s, !blames_own_side(&s->plan, &r->report) || starved,
        "rank %d reports a loss on its own side: %s", rank, text);
    if (limit > 0)
        JOB_CHECK(s, r->ended - begin < limit,
            "rank %d ends %.2f s after the cut (it knew after %.2f s; naps took %.2f s "
            "too long): %s",
            rank, r->ended - begin, r->named - begin, late, text);
}

static void check_job(const shared *s, double late) {
    const plan *p = &s->plan;
    outcome want = faults[p->fault].outcome;
    int well = 0, ended = 0;
    long steps = 0;
    for (int rank = 0; rank < p->ranks; rank++) {
        const result *r = &s->rank[rank];
        ended += JOB_CHECK(s, r->ended > 0, "rank %d did not end after %ld steps", rank, r->steps);
        JOB_CHECK(
            s, r->wrong == 0, "rank %d: %ld wrong values in %ld steps", rank, r->wrong, r->steps);
        well += r->ended > 0 && r->status == DT_OK;
        steps += r->steps;
    }
    if (ended < p->ranks) return;
    if (want == EITHER && (well == 0 || well == p->ranks)) want = well ? RIGHT : NAMED;
    if (want == RIGHT && well < p->ranks && late > held_up_s) {
        printf("job %d was delayed by %.2f s: no value was wrong\n", p->number, late);
        return;
    }
    for (int rank = 0; rank < p->ranks; rank++) {
        const result *r = &s->rank[rank];
        if (want == NAMED)
            JOB_CHECK(s, r->status != DT_OK, "rank %d succeeds after %ld steps", rank, r->steps);
        else
            JOB_CHECK(s, r->status == DT_OK && r->steps >= 12,
                "rank %d (%.2f s after the fault; naps took %.2f s too "
                "long): %s",
                rank, r->named - s->onset, late, r->report.text);
        if (want == NAMED && r->status != DT_OK)
            check_named(s, rank, p->fault == STORM ? 0 : p->timeout_s + 1 + 4 * late, late);
    }
    if (getenv("PACKETS_SHOW"))
        for (int rank = 0; rank < p->ranks; rank++)
            printf("  job %d %s: T %.2f rank %d side %d: %ld steps, onset %.2f known %.2f ended "
                   "%.2f: %s\n",
                p->number, faults[p->fault].name, p->timeout_s, rank, p->side[rank],
                s->rank[rank].steps, s->onset - s->rank[rank].begun, s->rank[rank].named - s->onset,
                s->rank[rank].ended - s->onset, s->rank[rank].report.text);
}

/* ---- jobs, one after another ---- */

static int all_formed(const shared *s) {
    for (int rank = 0; rank < s->plan.ranks; rank++)
        if (s->rank[rank].formed == 0) return 0;
    return 1;
}

static void job_run(wire *w, shared *s, int number) {
    pid_t pids[MOST_RANKS];
    double late = 0, zero = wire_now();
    memset(s, 0, sizeof *s);
    s->plan = plan_make(number);
    const plan *p = &s->plan;
    wire_reset(w, (uint64_t)number);
    memcpy(w->now, p->base, sizeof w->now);
    if (!faults[p->fault].at_start) zero = 0;
    fflush(stdout);
    for (int rank = 0; rank < p->ranks; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) rank_process(s, rank, w);
    }
    for (int left = p->ranks; left > 0;) {
        double now = wire_now();
        if (zero == 0 && all_formed(s)) zero = now;
        if (zero > 0 && s->onset == 0 && now >= zero + p->from_s) {
            memcpy(w->now, p->during, sizeof w->now);
            s->onset = now;
        }
        if (s->onset > 0 && now >= zero + p->until_s) memcpy(w->now, p->base, sizeof w->now);
        wire_carry(w, 2e-3);
        for (int rank = 0; rank < p->ranks; rank++) {
            if (pids[rank] <= 0 || waitpid(pids[rank], NULL, WNOHANG) == 0) continue;
            pids[rank] = 0;
            left--;
        }
    }
    for (int rank = 0; rank < p->ranks; rank++) late = fmax(late, s->rank[rank].late);
    check_job(s, fmax(late, w->late));
    if (getenv("PACKETS_SHOW"))
        printf("  job %d wire: %ld passed, %ld lost, %ld twice, %ld spoilt, %ld cut; late %.3f\n",
            number, w->passed, w->dropped, w->repeated, w->spoiled, w->cut, fmax(late, w->late));
    fflush(stdout);
}

typedef struct tally {
    int passed, failed, worker_ended;
} tally;

int main(int argc, char **argv) {
    int first = argc > 1 ? atoi(argv[1]) : 0, count = argc > 2 ? atoi(argv[2]) : 100;
    int workers = argc > 3 ? atoi(argv[3]) : WORKERS;
    size_t bytes = (size_t)workers * sizeof(tally);
    tally *tallies =
        (tally *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    static wire w;
    pid_t probe = fork(); /* in a child, because this process must keep its namespace */
    if (probe == 0) {
        const char *why = wire_make(&w);
        if (why) check_skip(why), fflush(stdout);
        _exit(why ? 77 : 0);
    }
    int status = 0;
    waitpid(probe, &status, 0);
    if (WEXITSTATUS(status) == 77) {
        check_skipped = 1;
        return check_done("packets");
    }
    fflush(NULL);
    for (int i = 0; i < workers; i++) {
        if (fork() != 0) continue;
        shared *s = (shared *)mmap(
            NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        const char *why = wire_make(&w);
        if (!CHECK_MSG(!why, "worker %d: %s", i, why ? why : "")) count = 0;
        for (int job = first + i; job < first + count; job += workers) job_run(&w, s, job);
        tallies[i].passed = check_passed;
        tallies[i].failed = check_failed;
        tallies[i].worker_ended = 1;
        fflush(stdout);
        _exit(0);
    }
    while (wait(&status) > 0) {
    }
    for (int i = 0; i < workers; i++) {
        CHECK_MSG(tallies[i].worker_ended, "worker %d did not end", i);
        check_passed += tallies[i].passed;
        check_failed += tallies[i].failed;
    }
    return check_done("packets");
}
