/* test_attack.c - a hostile user of the same machine: it tries to take a rank's place, plays rank 0,
   and, with the token, floods the ranks that have accepted it

   Run:  test_attack [full]    full: 10,000 attempts instead of 300, of each kind

   The attackers are processes of user 65534, so the test needs root; otherwise the attackers that
   have the token run as this user, and the rest is skipped. No attacker without the secret becomes
   a rank; texts have no control bytes; a job takes at most 64 MiB more than without an attack; and
   each job ends well or names the attacker. */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/support/check.h"
#include "tests/comm/tcp_jobs.h"
#include "tests/comm/tcp_visitor.h"

#include <dirent.h>
#include <grp.h>

enum { NOBODY = 65534, MOST_MORE_KIB = 64 * 1024 };
static const char token[] = "0123456789abcdef";
static int attempts = 300, is_root;
static long quiet_kib; /* the memory of a rank of a job that is not attacked */

/* Becomes another user. */
static void become_nobody(void) {
    if (is_root && (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0)) {
        perror("setuid");
        _exit(3);
    }
}

/* Returns the status with which an attacker has ended. */
static int wait_for(pid_t pid) {
    int status = 1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static void check_memory(const job *j, const char *what) {
    for (int rank = 0; rank < j->ranks; rank++)
        CHECK_MSG(j->result[rank].peak_kib < quiet_kib + MOST_MORE_KIB,
            "%s: rank %d takes %ld KiB, without an attack %ld", what, rank,
            j->result[rank].peak_kib, quiet_kib);
}

/* ---- 1. without the secret ---- */

static dt_status honest_rank(dt_ctx *ctx, void *user) {
    float mine[1000], sum[1000];
    int me = dt_ctx_rank(ctx), wrong = 0;
    (void)user;
    for (int i = 0; i < 1000; i++) mine[i] = (float)(i * (me + 1));
    dt_status status = dt_all_reduce(dt_world(ctx), mine, sum, 1000, DT_F32, DT_SUM);
    for (int i = 0; i < 1000; i++) wrong += sum[i] != (float)(3 * i);
    CHECK_MSG(status != DT_OK || wrong == 0, "%d of 1000 sums are wrong", wrong);
    return status;
}

typedef struct tries {
    long done, keys, seats; /* attempts that ended; keys that were given; attempts that succeeded */
} tries;

/* Asks for the key at the local socket. Returns 1 if it comes. */
static int ask_for_key(dt__tcp_address place, uint8_t key[32]) {
    int fd = dt__tcp_local_socket(place, 0), got;
    if (fd < 0) return 0;
    fcntl(fd, F_SETFL, 0);
    got = recv(fd, key, 32, MSG_WAITALL) == 32;
    close(fd);
    return got;
}

/* Changes a handshake record: one of its bytes, or one of its numbers to an extreme value. */
static void spoil(dt__tcp_handshake *record, long n) {
    static const uint32_t values[] = { 0, 1, 0xffffffff, 0x7fffffff, 0x80000000 };
    size_t at = (size_t)(n / 8) % sizeof *record;
    if (n % 8 < 3)
        ((unsigned char *)record)[at] ^= (unsigned char)(n % 8 == 0 ? 1 : n % 8 == 1 ? 0x80 : 0xff);
    else
        memcpy((char *)record + at / 4 * 4, &values[n % 8 - 3], 4);
}

/* One attempt to become rank 1 of 2 of a job whose secret this process does not have. */
static void try_to_sit(dt__tcp_address place, long n, tries *t) {
    struct timeval limit = { 3, 0 };
    visit v = visit_make(place, 1, 2, "");
    if (n % 3 == 0) memset(v.key, 0, sizeof v.key);
    if (n % 3 == 1) t->keys += ask_for_key(place, v.key);
    v.fd = connect_to(place);
    if (v.fd < 0) return;
    setsockopt(v.fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    dt__tcp_handshake hello = v.ours, proof;
    if (n % 2) spoil(&hello, n / 2);
    int is_early = n % 16 == 2; /* frames at once, as an accepted rank sends them */
    for (int i = 0; i < 20 && is_early; i++) {
        dt__frame frame;
        memset(&frame, 0xff, sizeof frame);
        frame.kind = (uint32_t)i;
        intruder_put(v.fd, &frame, sizeof frame, 0);
    }
    if (!is_early) send(v.fd, &hello, sizeof hello, MSG_NOSIGNAL);
    if (!is_early && receive_message(v.fd, &v.theirs)) {
        dt__tcp_prove(v.key, "caller", &hello, &v.theirs, v.proof.proof);
        proof = v.proof;
        if (n % 4 == 2) spoil(&proof, n / 4);
        send(v.fd, &proof, sizeof proof, MSG_NOSIGNAL);
        t->seats += receive_message(v.fd, &v.answer) && v.answer.kind == DT__TCP_WELCOME;
    } else if (is_early) {
        receive_message(v.fd, &v.answer);
    }
    close(v.fd);
    t->done++;
}

/* Attackers come before rank 1. The job must form, with the true rank 1. */
static void test_without_secret(int has_token) {
    enum { ATTACKERS = 3 };
    pid_t pids[ATTACKERS];
    tries *t = (tries *)mmap(
        NULL, ATTACKERS * sizeof *t, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    job *j = job_make(2, honest_rank, 0);
    j->timeout_s = 60;
    j->absent = 1 << 1;
    if (has_token) j->token[0] = j->token[1] = token;
    job_start(j);
    close(connect_to(loopback(j->port)));
    for (int i = 0; i < ATTACKERS; i++) {
        fflush(NULL);
        if ((pids[i] = fork()) != 0) continue;
        alarm(1800);
        become_nobody();
        for (long n = i; n < attempts && t[i].seats == 0; n += ATTACKERS)
            try_to_sit(loopback(j->port), n, &t[i]);
        _exit(0);
    }
    for (int i = 0; i < ATTACKERS; i++) CHECK(wait_for(pids[i]) == 0);
    j->absent = 1 << 0;
    job_start(j);
    job_wait(j);
    check_well(j);
    check_memory(j, "without the secret");
    for (int i = 1; i < ATTACKERS; i++) {
        t[0].done += t[i].done;
        t[0].keys += t[i].keys;
        t[0].seats += t[i].seats;
    }
    CHECK_MSG(t[0].done >= attempts * 9 / 10 && t[0].seats == 0 && t[0].keys == 0,
        "of %ld attempts %ld got the key and %ld became a rank", t[0].done, t[0].keys, t[0].seats);
    printf("%ld attempts without the secret: %ld became a rank\n", t[0].done, t[0].seats);
    munmap(t, ATTACKERS * sizeof *t);
    job_free(j);
}

/* ---- 2. another user's rank 0 ---- */

/* Listens at the rendezvous, and if `what` is not 2 at the local socket, and acts as rank 0 with a
   key of its own, that of the empty token. */
static void play_rank_0(dt__tcp_address place, int what, int ready) {
    int local = what < 2 ? dt__tcp_local_socket(place, 1) : 0, door = dt__tcp_listen(place, 10);
    visit v = visit_make(place, 0, 2, "");
    dt__tcp_handshake hello, welcome;
    if (local < 0 || door < 0 || write(ready, "x", 1) != 1) _exit(4);
    fcntl(local, F_SETFL, 0);
    fcntl(door, F_SETFL, 0);
    int fd = accept(door, NULL, NULL), asks = what < 2 ? accept(local, NULL, NULL) : -1;
    send(asks, v.key, sizeof v.key, MSG_NOSIGNAL);
    close(asks);
    if (!receive_message(fd, &hello)) _exit(0);
    v.ours.job = 99;
    send(fd, &v.ours, sizeof v.ours, MSG_NOSIGNAL);
    if (!receive_message(fd, &v.proof)) _exit(0);
    welcome = v.ours;
    welcome.kind = DT__TCP_WELCOME;
    dt__tcp_prove(v.key, "host", &hello, &v.ours, welcome.proof);
    send(fd, &welcome, sizeof welcome, MSG_NOSIGNAL);
    dt__tcp_table table = { .magic = DT__TCP_FRAME_MAGIC, .failed = 1 };
    snprintf(table.text, sizeof table.text, "\033]0;it is mine\007");
    send(fd, &table, sizeof table, MSG_NOSIGNAL);
    _exit(0);
}

/* what 0: rank 1 meets another user's rank 0; 1: rank 0 starts where another user waits; 2: as 0,
   without a local socket */
static void test_other_rank_0(int what) {
    static const char *const says[] = { " is that of user 65534, and this rank has user 0",
        ", where ranks of this user get the job's key: another program has it",
        " does not prove that it is rank 0 of this job" };
    char c;
    int ready[2];
    job *j = job_make(2, honest_rank, 0);
    j->timeout_s = 5;
    j->absent = what == 1 ? 1 << 1 : 1 << 0;
    CHECK(pipe(ready) == 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(1800);
        become_nobody();
        play_rank_0(loopback(j->port), what, ready[1]);
    }
    CHECK(read(ready[0], &c, 1) == 1);
    job_start(j);
    job_wait(j);
    kill(pid, SIGKILL);
    wait_for(pid);
    const rank_result *r = &j->result[what != 1];
    CHECK_MSG(r->status == DT_ERR_COMM && strstr(r->report.text, says[what]) && in_time(r->took, 4),
        "expected '%s', got after %.1f s: %s", says[what], r->took, r->report.text);
    close(ready[0]);
    close(ready[1]);
    job_free(j);
}

/* ---- 3. an accepted rank ---- */

enum { CORPUS = -1, HUGE_MESSAGE = -2, ANNOUNCES = -3, SAYS_NOTHING = -4, REPORTS = -5 };
static const char *const flood_names[] = { "", "", "20 GiB announced and 400 MB pushed",
    "2,000,000 announcements", "packets without content", "wait reports" };

/* Rank 0's part. job.what: an operation of intruder.h. */
static dt_status victim_rank(dt_ctx *ctx, void *user) {
    static float a[INTRUDER_FLOATS], b[INTRUDER_FLOATS];
    intruder_operate(dt_world(ctx), ((const job *)user)->what, a, b);
    return dt_error(ctx);
}

/* Becomes rank 1 of 2. Returns the connection. */
static int sit_down(int port) {
    char start[sizeof(dt__tcp_table) + 2 * sizeof(dt__tcp_address)];
    visit v = visit_make(loopback(port), 1, 2, token);
    if (!shake_hands(&v, 0) || !is_accepted(&v) ||
        recv(v.fd, start, sizeof start, MSG_WAITALL) != (ssize_t)sizeof start)
        _exit(5);
    return v.fd;
}

/* Sends packets, or bulk data, until the connection is closed, but at most `n`. */
static void flood(int fd, int how, long n) {
    static char packet[1 << 16];
    char sink[65536];
    dt__frame *frame = (dt__frame *)(void *)packet;
    size_t bytes = sizeof *frame;
    frame->tag = 5;
    frame->count = (uint64_t)5 << 30;
    frame->bytes = frame->count * sizeof(float);
    frame->id = 1;
    frame->kind = DT__ANNOUNCE;
    if (how == HUGE_MESSAGE) { /* with a tag that no receive has; its data follow */
        frame->tag = 9;
        intruder_put(fd, packet, bytes, 0);
        dt__tcp_header bulk = { DT__TCP_FRAME_MAGIC, DT__TCP_BULK, DT__TCP_SEGMENT_BYTES, 1 };
        intruder_put(fd, &bulk, sizeof bulk, 1);
        n = 400000000 / (long)sizeof packet;
    }
    if (how == SAYS_NOTHING) frame->kind = DT__CREDIT;
    if (how == REPORTS) frame->kind = DT__REPORT, bytes += sizeof(dt__wait_report);
    if (how == ANNOUNCES) frame->tag = 9;
    for (long i = 0; i < n; i++) {
        dt__tcp_header header = { DT__TCP_FRAME_MAGIC, DT__TCP_PACKET, bytes, 0 };
        struct iovec pieces[2] = { { &header, sizeof header }, { packet, bytes } };
        if (how == HUGE_MESSAGE && send(fd, packet, sizeof packet, MSG_NOSIGNAL) < 0) return;
        if (how == ANNOUNCES) frame->id++;
        if (how != HUGE_MESSAGE && writev(fd, pieces, 2) < 0) return;
        while (recv(fd, sink, sizeof sink, MSG_DONTWAIT) > 0) {
        }
    }
}

/* Sends an input of the corpus as rank 1, then waits until rank 0 closes the connection. */
static void intrude(int fd, const unsigned char *data, size_t bytes) {
    char sink[4096];
    intruder in = intruder_make(data, bytes, fd);
    intruder_send(&in, 0);
    for (int turn = 0; turn < 200 && intruder_has_more(&in); turn++, nap(1e-3)) {
        while (recv(fd, sink, sizeof sink, MSG_DONTWAIT) > 0) {
        }
        intruder_send(&in, 1);
    }
    while (recv(fd, sink, sizeof sink, 0) > 0) {
    }
}

/* A job with rank 0 and an attacker that has the token as rank 1. */
static void attack_as_rank(int how, const unsigned char *data, size_t bytes, const char *name) {
    intruder in = { NULL, NULL, -1, 0, 1 };
    if (how == CORPUS) in = intruder_make(data, bytes, -1);
    job *j = job_make(2, victim_rank, in.operation);
    j->absent = 1 << 1;
    j->token[0] = token;
    j->timeout_s = 2;
    job_start(j);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(1800);
        signal(SIGPIPE, SIG_IGN);
        become_nobody();
        int fd = sit_down(j->port);
        if (how == CORPUS)
            intrude(fd, data, bytes);
        else
            flood(fd, how, 2000000);
        _exit(0);
    }
    job_wait(j);
    CHECK_MSG(wait_for(pid) == 0, "%s: the attacker was not accepted", name);
    const rank_result *r = &j->result[0];
    CHECK_MSG(r->ended && (intruder_is_named(in.operation, r->report.text) ||
                              strncmp(name, "abort", 5) == 0), /* any rank, as the packet says */
        "%s: %s", name, r->ended ? r->report.text : "rank 0 did not end");
    CHECK_MSG(how == CORPUS || r->status != DT_OK, "%s: rank 0 ends well", name);
    check_memory(j, name);
    if (how != CORPUS)
        printf(
            "%s: %.1f s, %+ld KiB, %s\n", name, r->took, r->peak_kib - quiet_kib, r->report.text);
    job_free(j);
}

/* Inputs of the corpus, each with one byte or number changed. */
static void test_intruders(void) {
    static unsigned char data[100][2048];
    char names[100][64];
    size_t bytes[100];
    int files = 0;
    DIR *folder = opendir("tests/fuzz/corpus/packets");
    for (struct dirent *e = folder ? readdir(folder) : NULL; e; e = readdir(folder)) {
        char path[400];
        snprintf(path, sizeof path, "tests/fuzz/corpus/packets/%s", e->d_name);
        FILE *f = e->d_name[0] != '.' && files < 100 ? fopen(path, "rb") : NULL;
        if (!f) continue;
        bytes[files] = fread(data[files], 1, sizeof data[0], f);
        snprintf(names[files], sizeof names[0], "%.63s", e->d_name);
        files += bytes[files] > 4;
        fclose(f);
    }
    if (folder) closedir(folder);
    CHECK_MSG(files > 30, "%d inputs in tests/fuzz/corpus/packets", files);
    for (int i = 0; i < attempts && files > 0; i++) {
        static const unsigned char values[] = { 0, 0xff, 1, 0x80, 0x1b };
        unsigned char changed[2048];
        int file = i % files;
        char name[100];
        memcpy(changed, data[file], bytes[file]);
        size_t at = 1 + (size_t)(i / files) * 2654435761u % (bytes[file] - 1),
               width = i % 2 ? 1 : 4;
        for (size_t k = at; k < at + width && k < bytes[file] && i >= files; k++)
            changed[k] = values[i % 5];
        changed[0] |= i % 16 ? 0x40 : 0; /* most hang up, because rank 0 waits for the others */
        snprintf(name, sizeof name, "%s, change %d", names[file], i);
        attack_as_rank(CORPUS, changed, bytes[file], name);
    }
    printf("%d intruders\n", attempts);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "full") == 0) attempts = 10000;
    is_root = geteuid() == 0;
    unsetenv("DT_TOKEN");
    unsetenv("DT_TOKEN_FILE");
    job *j = run_job(2, honest_rank, 0);
    check_well(j);
    quiet_kib = j->result[0].peak_kib;
    job_free(j);
    if (is_root) {
        test_without_secret(0);
        test_without_secret(1);
        for (int what = 0; what < 3; what++) test_other_rank_0(what);
    } else {
        check_skip("attackers of another user: needs root");
    }
    for (int how = REPORTS; how < CORPUS; how++) attack_as_rank(how, NULL, 0, flood_names[-how]);
    test_intruders();
    return check_done("test_attack");
}
