/* virtual_clock.h - time that passes only when all ranks wait: a simulation of accelerators and links
   Public domain or MIT, at your choice; see LICENSE.

   Ranks are threads. A rank that waits, on the simulated link or for an operation of its
   accelerator, sleeps on this clock. When all ranks sleep, the clock advances to the time at which
   the first of them wakes up. What ranks compute between takes no time on this clock, so measured
   times do not depend on the machine, its cores or its load.

       dt_host host = clock_host();
       dt_run((dt_run_desc){ .ranks = 4, .host = &host, .kernels = .. }, f, NULL)
       f: clock_enter(); ...; clock_leave(); */
#ifndef VIRTUAL_CLOCK_H
#define VIRTUAL_CLOCK_H

#include <math.h>
#include <pthread.h>
#include <sched.h>

enum { CLOCK_RANKS = 16 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t advanced;
    double now, wake[CLOCK_RANKS]; /* wake: INFINITY while a rank does not sleep */
    int ranks, sleeping, slots;
} virtual_clock = { .lock = PTHREAD_MUTEX_INITIALIZER, .advanced = PTHREAD_COND_INITIALIZER };

static __thread int clock_slot = -1; /* -1: this thread is no rank */

/* Advances the clock if all ranks sleep; called with the lock. */
static inline void clock_advance(void) {
    double first = INFINITY;
    for (int i = 0; i < virtual_clock.slots; i++) first = fmin(first, virtual_clock.wake[i]);
    if (virtual_clock.sleeping < virtual_clock.ranks || virtual_clock.ranks == 0) return;
    /* a rank whose time has come is still counted as sleeping until it runs */
    if (first > virtual_clock.now) virtual_clock.now = first;
    pthread_cond_broadcast(&virtual_clock.advanced);
}

/* A rank begins to use the clock; `ranks` of them begin before time passes. */
static inline void clock_enter(int ranks) {
    pthread_mutex_lock(&virtual_clock.lock);
    if (virtual_clock.slots == 0) virtual_clock.ranks = ranks;
    clock_slot = virtual_clock.slots++;
    virtual_clock.wake[clock_slot] = INFINITY;
    pthread_mutex_unlock(&virtual_clock.lock);
}

static inline void clock_leave(void) {
    pthread_mutex_lock(&virtual_clock.lock);
    clock_slot = -1;
    if (--virtual_clock.ranks == 0) virtual_clock.slots = 0;
    clock_advance();
    pthread_mutex_unlock(&virtual_clock.lock);
}

static inline void clock_sleep(void *user, double s) {
    if (clock_slot < 0) {
        dt_host_default()->sleep(user, s);
        return;
    }
    if (s <= 0) {
        sched_yield();
        return;
    }
    pthread_mutex_lock(&virtual_clock.lock);
    double wake = virtual_clock.wake[clock_slot] = virtual_clock.now + s;
    virtual_clock.sleeping++;
    for (clock_advance(); virtual_clock.now < wake;)
        pthread_cond_wait(&virtual_clock.advanced, &virtual_clock.lock);
    virtual_clock.sleeping--;
    virtual_clock.wake[clock_slot] = INFINITY;
    pthread_mutex_unlock(&virtual_clock.lock);
}

static inline double clock_now(void *user) {
    if (clock_slot < 0) return dt_host_default()->now(user);
    pthread_mutex_lock(&virtual_clock.lock);
    double now = virtual_clock.now;
    pthread_mutex_unlock(&virtual_clock.lock);
    return now;
}

static inline dt_host clock_host(void) {
    dt_host host = *dt_host_default();
    host.now = clock_now;
    host.sleep = clock_sleep;
    return host;
}

/* A product of an accelerator: takes 2 m n k / rate seconds and gives zeros. */
static double clock_flops_per_s = 1e9;

static inline dt_status clock_matmul(const dt_matmul_args *a, void *stream) {
    double batch = a->batch > 1 ? (double)a->batch : 1, count = batch * (double)(a->m * a->n);
    (void)stream;
    if (!a->accumulate) memset(a->c, 0, (size_t)count * sizeof(float));
    clock_sleep(NULL, 2 * count * (double)a->k / clock_flops_per_s);
    return DT_OK;
}

#endif
