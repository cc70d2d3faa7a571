/* deadlocks.h - a part of test_faults.c: ranks that wait for each other in a cycle, and slow ranks
   that only look like it. */
#ifndef DEADLOCKS_H
#define DEADLOCKS_H

enum { BY_SENDS, BY_RECEIVES, BY_GROUPS, BY_ALL, ONE_MORE, SHAPES };
static const char *const shape_names[SHAPES] = { "sends", "receives", "crossed groups", "a mixture",
    "a rank outside the cycle that waits" };

typedef struct tangle {
    page *p;
    int shape, cycle; /* cycle: number of ranks in it; these are ranks 0, 1, .. */
    int delay;
} tangle;

/* Rank r of the cycle waits for rank r + 1, in a way that depends on the shape. */
static void tangle_wait(const tangle *t, dt_comm *world, dt_comm *const *pairs, float *a, int me) {
    int next = (me + 1) % t->cycle, way = me % 3;
    if (t->shape == BY_SENDS || t->shape == ONE_MORE) way = 0;
    if (t->shape == BY_RECEIVES) way = 1;
    if (t->shape == BY_GROUPS || (t->cycle == 2 && me == 1 && t->shape == BY_ALL)) way = 2;
    t->p->entered[me] = mono();
    if (way == 0) dt_send(world, a, MANY, DT_F32, next, 1);
    if (way == 1) dt_recv(world, a, MANY, DT_F32, next, 1);
    if (way == 2) dt_barrier(pairs[me]);
}

static dt_status tangle_rank(dt_ctx *ctx, void *user) {
    const tangle *t = (const tangle *)user;
    dt_comm *world = dt_world(ctx), *pairs[MOST];
    int me = dt_comm_rank(world), n = dt_comm_size(world);
    float *a = (float *)calloc(2 * MANY, sizeof *a);
    char name[16];
    for (int i = 0; i < t->cycle; i++) { /* group i: ranks i and i + 1 */
        snprintf(name, sizeof name, "g%d", i);
        pairs[i] = dt_comm_split(world, me == i || me == (i + 1) % t->cycle ? 0 : -1, 0, name);
    }
    dt_all_reduce(world, a, a + MANY, 100, DT_F32, DT_SUM);
    if (me == t->delay % n) nap(3e-3);
    if (me < t->cycle)
        tangle_wait(t, world, pairs, a, me);
    else
        t->p->entered[me] = mono();
    dt_barrier(world);
    page_note(t->p, ctx, me);
    free(a);
    return DT_OK;
}

/* 1 if the text is "deadlock: rank 0 waits in ... for rank 1, rank 1 waits in ... for rank 0" with
   all members of the cycle, each waiting for the next and the last for the first. A long cycle is
   shown by its first four members and its length. */
static int names_cycle(const char *text, int members) {
    char size[32];
    int first = -1, last = -1, found = 0;
    const char *p = strstr(text, "deadlock: ");
    while (p && (p = strstr(p, "rank "))) {
        int who, whom, at = 0;
        if (sscanf(p, "rank %d waits in %n", &who, &at) != 1 || at == 0) return 0;
        const char *end = strstr(p, " for rank ");
        if (!end || sscanf(end, " for rank %d", &whom) != 1) return 0;
        if (first < 0)
            first = who;
        else if (who != last)
            return 0;
        if (whom != (who + 1) % members) return 0;
        last = whom;
        found++;
        p = end + 10;
    }
    snprintf(size, sizeof size, "circle of %d ranks", members);
    return first == 0 && (members <= 4 ? found == members && last == 0
                                       : found == 4 && strstr(text, size) != NULL);
}

static double tangle_once(dt_backend backend, int shape, int cycle, int delay, page *p) {
    dt_run_desc desc;
    dt_host host = page_host(p);
    tangle t;
    int ranks = cycle + (shape == ONE_MORE);
    double entered = 0, failed = 0;
    memset(p, 0, sizeof *p);
    memset(&desc, 0, sizeof desc);
    t.p = p;
    t.shape = shape;
    t.cycle = cycle;
    t.delay = delay;
    desc.ranks = ranks;
    desc.backend = backend;
    desc.timeout_s = 5;
    desc.host = &host;
    desc.report = &p->report;
    p->status = dt_run(desc, tangle_rank, &t);
    for (int r = 0; r < ranks; r++) {
        if (p->entered[r] > entered) entered = p->entered[r];
        if (p->failed[r] > failed) failed = p->failed[r];
        CHECK_MSG(p->failed[r] > 0, "deadlock of %d by %s: rank %d does not fail", cycle,
            shape_names[shape], r);
    }
    return failed - entered;
}

static void deadlocks(int full) {
    static const int cycles[] = { 2, 3, 8, 7, 4 };
    page *p = page_make();
    for (int i = 0; i < (full ? 600 : 120); i++) {
        int shape = i % SHAPES, cycle = cycles[i / 2 % 5];
        dt_backend backend = i % 2 ? DT_BACKEND_PROCS : DT_BACKEND_THREADS;
        if (shape == ONE_MORE && cycle == MOST) cycle--;
        double late = tangle_once(backend, shape, cycle, i, p);
        CHECK_MSG(p->status == DT_ERR_COMM && names_cycle(p->report.text, cycle),
            "deadlock of %d by %s on %s: %s: %s", cycle, shape_names[shape],
            i % 2 ? "procs" : "threads", dt_status_name(p->status), p->report.text);
        for (int r = 0; r < cycle; r++)
            CHECK_MSG(strcmp(without_prefix(p->text[r]), without_prefix(p->report.text)) == 0,
                "rank %d has '%s'", r, p->text[r]);
        for (int again = 0; again < 2 && late > 0.1; again++) {
            double s = tangle_once(backend, shape, cycle, i, p);
            if (s < late) late = s;
        }
        /* if a rank gets no processor time, the deadlock is found at a later check */
        CHECK_MSG(in_time(late, 0.1), "deadlock of %d by %s: found after %.0f ms", cycle,
            shape_names[shape], 1e3 * late);
        figure_add(&sums->other, late);
    }
    lateness_print(&sums->other, "deadlocks");
    munmap(p, sizeof *p);
}

/* The late rank receives from both other ranks; the second of them sends only after the first one's
   send is complete. */
static void patient_relay(
    dt_comm *world, float *a, float *b, size_t count, int me, int late, int next, int last) {
    dt_transfer t[2];
    memset(t, 0, sizeof t);
    for (int i = 0; i < 2; i++) {
        t[i].recv = b + (size_t)i * count / 2;
        t[i].count = count / 2;
        t[i].dtype = DT_F32;
        t[i].peer = i ? last : next;
        t[i].tag = 2;
    }
    if (me == late) dt_exchange(world, t, 2);
    if (me == next) dt_send(world, a, count / 2, DT_F32, late, 2);
    if (me == next) dt_send(world, a, count / 2, DT_F32, last, 2);
    if (me == last) dt_recv(world, b, count / 2, DT_F32, next, 2);
    if (me == last) dt_send(world, a, count / 2, DT_F32, late, 2);
}

/* One rank is so late that the others sleep a millisecond at a time, and then it takes long to
   begin the operation that they wait for. A check that misses some of this activity would report a
   deadlock. */
static dt_status patient_rank(dt_ctx *ctx, void *user) {
    enum { HUGE_COUNT = 1 << 20 };
    page *p = (page *)user;
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world);
    float *a = (float *)calloc(2 * HUGE_COUNT, sizeof *a), *b = a + HUGE_COUNT;
    for (int round = 0; round < 36 && !dt_error(ctx); round++) {
        int late = round % n, way = round / n % 6, next = (late + 1) % n, last = (late + 2) % n;
        size_t count = round % 2 ? HUGE_COUNT : 1000;
        if (me == late) nap(20e-3);
        if (way == 0 && me == late)
            for (int r = 0; r < n; r++)
                if (r != me) dt_send(world, a, count, DT_F32, r, 1);
        if (way == 0 && me != late) dt_recv(world, b, count, DT_F32, late, 1);
        if (way == 1 && me == late)
            for (int r = 1; r < n; r++) dt_recv_any(world, b, count, DT_F32, 1, NULL);
        if (way == 1 && me != late) dt_send(world, a, count, DT_F32, late, 1);
        if (way == 2) dt_broadcast(world, a, count, DT_F32, late);
        if (way == 3) dt_all_reduce(world, a, b, count, DT_F32, DT_SUM);
        if (way == 5 && n > 2) patient_relay(world, a, b, count, me, late, next, last);
        if (way == 4) dt_reduce_scatter(world, a, b, count / (size_t)n, DT_F32, DT_MAX);
    }
    free(a);
    return page_note(p, ctx, me);
}

static void patience(page *p, int runs) {
    for (int i = 0; i < runs; i++) {
        job j;
        job_init(&j, p, i % 2 ? DT_BACKEND_THREADS : DT_BACKEND_PROCS, 2 + i / 2 % 2, 20);
        dt_host host = page_host(p);
        j.desc.host = &host;
        CHECK_MSG(dt_run(j.desc, patient_rank, p) == DT_OK && p->lines == 0, "late ranks: %s",
            p->report.text);
    }
}

/* Runs correct random programs with 2 to 8 ranks, more than there are cores. */
static void soaks(int full) {
    double until = mono() + (full ? 120 : 10);
    page *p = page_make();
    int runs = 0, failed = 0;
    patience(p, full ? 40 : 4);
    while (mono() < until && failed < 3) {
        dt_run_desc desc;
        soak program;
        memset(p, 0, sizeof *p);
        memset(&desc, 0, sizeof desc);
        memset(&program, 0, sizeof program);
        dt_host host = page_host(p);
        program.seed = (uint64_t)(++runs) * 15485863;
        program.steps = 40;
        program.delay_s = runs % 4 == 0 ? 0 : runs % 4 == 1 ? 3e-3 : 5e-4;
        desc.ranks = 2 + runs / 2 % 7;
        desc.backend = runs % 2 ? DT_BACKEND_THREADS : DT_BACKEND_PROCS;
        desc.timeout_s = 20;
        desc.host = &host;
        desc.report = &p->report;
        dt_status status = dt_run(desc, soak_rank, &program);
        failed +=
            !CHECK_MSG(status == DT_OK && p->lines == 0, "random program %d on %d ranks: %s%s",
                runs, desc.ranks, p->report.text, p->lines > 0 ? p->line[0] : "");
    }
    printf("random programs: %d, %d false alarms\n", runs, failed);
    munmap(p, sizeof *p);
}

#endif
