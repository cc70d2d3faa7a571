/* jitter.h - measures how long this machine suspends a running thread

   A check with a limit on wall-clock time adds a multiple of jitter_s(), measured in the same run,
   to the limit, so that other load on the machine does not fail the check. On an idle machine
   jitter_s() is less than 1 ms. */
#ifndef JITTER_H
#define JITTER_H

#include <time.h>

static double jitter_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The longest time between two readings of the clock, in 0.3 s of a thread that never sleeps. */
static double jitter_s(void) {
    double begin = jitter_clock(), last = begin, longest = 0;
    while (last - begin < 0.3) {
        double now = jitter_clock();
        if (now - last > longest) longest = now - last;
        last = now;
    }
    return longest;
}

#endif
