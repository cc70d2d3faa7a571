/* jitter.h - limits on wall-clock time that allow for other load on the machine

   A check of a duration uses in_time(), so that other load does not fail it: a limit that was
   exceeded grows by the factor by which this machine slows a thread, measured at that moment. On an
   idle machine the factor is less than 2. Checks that compare durations with each other repeat and
   take the fastest; jitter_s() is the unit of what they allow on top. */
#ifndef JITTER_H
#define JITTER_H

#include <time.h>

static inline double jitter_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The longest time between two readings of the clock, in 0.3 s of a thread that never sleeps. */
static inline double jitter_s(void) {
    double begin = jitter_clock(), last = begin, longest = 0;
    while (last - begin < 0.3) {
        double now = jitter_clock();
        if (now - last > longest) longest = now - last;
        last = now;
    }
    return longest;
}

/* How much longer than alone a thread takes: the scheduler suspends it for jitter_s() after each
   1.5 ms, the time slice of Linux on two cores. Never less than an earlier result of this process,
   because the load may have ended since. */
static inline double slowdown(void) {
    static double most = 1;
    double now = 1 + jitter_s() / 1.5e-3, before;
    __atomic_load(&most, &before, __ATOMIC_SEQ_CST);
    if (now < before) return before;
    __atomic_store(&most, &now, __ATOMIC_SEQ_CST);
    return now;
}

static inline int in_time(double took_s, double limit_s) {
    return took_s <= limit_s || took_s <= limit_s * slowdown();
}

#endif
