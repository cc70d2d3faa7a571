/* words.h - different calls with messages of equal length: the call description inside each message
   must reveal the difference

   Without the comparison of calls (.check = -1), the description in each message is the only
   protection. Large messages use another protocol than small ones, so both are tested. Included
   after dt_comm.h with its implementation. */
#ifndef WORDS_H
#define WORDS_H

enum { WORDS_KINDS = 5, WORDS_CASES = 2 * WORDS_KINDS };

static size_t words_count(int what) { return what < WORDS_KINDS ? 16 : 16000; }

/* Rank 0 makes one call and all other ranks make a different one. */
static dt_status words_rank(dt_ctx *ctx, int what) {
    dt_comm *world = dt_world(ctx);
    int me = dt_comm_rank(world), n = dt_comm_size(world);
    size_t count = words_count(what), each = count * (size_t)n;
    float *a = (float *)calloc(2 * each, sizeof *a), *b = a + each;
    dt_barrier(world);
    switch (what % WORDS_KINDS) {
    case 0: dt_all_reduce(world, a, b, count, DT_F32, me ? DT_MAX : DT_SUM); break;
    case 1: dt_all_reduce(world, a, b, count, me ? DT_I32 : DT_F32, DT_SUM); break;
    case 2:
        if (me)
            dt_all_to_all(world, a, b, count, DT_F32);
        else
            dt_all_gather(world, a, b, count, DT_F32);
        break;
    case 3:
        if (me == 0) dt_recv(world, a, count, DT_F32, 1, 1);
        if (me == 1) dt_send(world, a, count, DT_I32, 0, 1);
        dt_barrier(world);
        break;
    default: dt_broadcast(world, a, count, me ? DT_I32 : DT_F32, 0);
    }
    free(a);
    return dt_error(ctx);
}

/* 1 if the text names both calls. */
static int words_said(int what, const char *text) {
    static const char *const says[WORDS_KINDS][2] = {
        { "all-reduce f32 x %zu max", "all-reduce f32 x %zu sum" },
        { "all-reduce i32 x %zu sum", "all-reduce f32 x %zu sum" },
        { "all-to-all f32 x %zu", "all-gather f32 x %zu" },
        { "sends i32 x %zu", "receives f32 x %zu" },
        { "broadcast i32 x %zu root 0", "broadcast f32 x %zu root 0" },
    };
    char one[64], other[64];
    snprintf(one, sizeof one, says[what % WORDS_KINDS][0], words_count(what));
    snprintf(other, sizeof other, says[what % WORDS_KINDS][1], words_count(what));
    return strstr(text, one) && strstr(text, other);
}

#endif
