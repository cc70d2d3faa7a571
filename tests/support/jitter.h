/* jitter.h - how long this machine keeps a running thread from its processor right now

   A check with a limit on wall-clock time adds a multiple of jitter_s() to the limit, measured in
   the same run, so that it judges dt and not what else the machine is doing. On an idle machine
   the probe reads less than 1 ms. */
#ifndef JITTER_H
#define JITTER_H

#include <time.h>

static double jitter_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The longest gap between two looks at the clock, in 0.3 s of a thread that never sleeps. */
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
