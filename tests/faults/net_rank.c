/* net_rank.c - started by network.sh on its two hosts: a rank over sockets, or a client that is not
   a rank

       net_rank rank R N PLACE TIMEOUT MODE   rank R of N; MODE steps: sums until one fails, at most
                                              for 20 s; once: one sum; idle: nothing for TIMEOUT + 2
                                              s, and then a sum
       net_rank attack PLACE KIND FROM        an attack of tcp_visitor.h, from another address
       net_rank replay PLACE R N              authenticates as rank R with the token of DT_TOKEN,
                                              and then replays its messages

   A rank prints "formed S", the seconds until its function began, and "ended STATUS EPOCH S: TEXT",
   the time at which its dt_run returned and the duration of the failed operation. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/comm/tcp_visitor.h"

#include <stdlib.h>
#include <time.h>

typedef struct plan {
    const char *mode;
    double begun, timeout_s, in_last;
} plan;

static double now(void) { return dt_host_default()->now(NULL); }

static double epoch(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static dt_status work(dt_ctx *ctx, void *user) {
    enum { MANY = 5000 };
    static float a[MANY], sum[MANY];
    plan *p = (plan *)user;
    printf("formed %.3f\n", now() - p->begun);
    fflush(stdout);
    if (strcmp(p->mode, "idle") == 0) dt_host_default()->sleep(NULL, p->timeout_s + 2);
    for (double until = now() + 20; now() < until && dt_error(ctx) == DT_OK;
         dt_host_default()->sleep(NULL, 2e-3)) {
        double from = now();
        dt_all_reduce(dt_world(ctx), a, sum, MANY, DT_F32, DT_SUM);
        p->in_last = now() - from;
        if (strcmp(p->mode, "once") == 0) break;
    }
    return dt_error(ctx);
}

static int rank_main(char **argv) {
    plan p = { argv[6], now(), atof(argv[5]), 0 };
    dt_report report;
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.ranks = atoi(argv[3]);
    desc.backend = DT_BACKEND_TCP;
    desc.timeout_s = p.timeout_s;
    desc.rank = atoi(argv[2]);
    desc.rendezvous = argv[4];
    desc.report = &report;
    dt_status status = dt_run(desc, work, &p);
    printf("ended %s %.3f %.3f: %s\n", dt_status_name(status), epoch(), p.in_last, report.text);
    return status != DT_OK;
}

static int replay_main(char **argv) {
    dt__tcp_address place;
    if (!dt__tcp_address_parse(argv[2], &place) || !getenv("DT_TOKEN")) return 2;
    visit v = visit_make(place, atoi(argv[3]), atoi(argv[4]), getenv("DT_TOKEN"));
    int well = shake_hands(&v, 0) && is_accepted(&v);
    printf("first: %s\n", well ? "welcome" : "refused");
    close(v.fd);
    dt_host_default()->sleep(NULL, 0.1);
    int answered = shake_hands(&v, 1);
    printf("again: %s\n", !answered ? "no answer"
                          : v.answer.kind == DT__TCP_WELCOME
                              ? "welcome"
                              : dt__tcp_reason(&v.ours, &v.answer).s);
    close(v.fd);
    return 0;
}

int main(int argc, char **argv) {
    dt__tcp_address place, from;
    alarm(60); /* ends even if network.sh is killed */
    if (argc == 7 && strcmp(argv[1], "rank") == 0) return rank_main(argv);
    if (argc == 5 && strcmp(argv[1], "replay") == 0) return replay_main(argv);
    if (argc != 5 || strcmp(argv[1], "attack") != 0 || !dt__tcp_address_parse(argv[2], &place) ||
        !dt__tcp_address_parse(argv[4], &from))
        return 2;
    from.port = 0;
    attack(place, atoi(argv[3]), from);
    return 0;
}
