/* check.h - the checks of the test programs: they count, print what failed, and sum up in one line.

       int main(void)
       {
           CHECK(1 + 1 == 2);
           CHECK_MSG(n == 3, "%d ranks answered, not 3", n);
           return check_done("test_name");       prints "test_name: 2 passed, 0 failed, 0 skipped"
       }

   C11 and C++17. A check that fails does not end the program: it prints "FAIL file:line: text"
   and returns 0, so that `if (!CHECK(p)) return;` can guard code that needs p. The counters are
   atomic, because ranks may be threads. */
#ifndef CHECK_H
#define CHECK_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 1 if the program is compiled with AddressSanitizer; the headers then allocate each tensor
   separately, so sizes and numbers of allocations differ. */
#if defined(__SANITIZE_ADDRESS__)
#define UNDER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define UNDER_ASAN 1
#endif
#endif
#ifndef UNDER_ASAN
#define UNDER_ASAN 0
#endif

static int check_passed, check_failed, check_skipped;

#define CHECK(cond) check_report(!!(cond), __FILE__, __LINE__, "%s", #cond)
#define CHECK_MSG(cond, ...) check_report(!!(cond), __FILE__, __LINE__, __VA_ARGS__)

__attribute__((format(printf, 4, 5))) static inline int check_report(
    int ok, const char *file, int line, const char *format, ...) {
    if (ok) {
        __atomic_fetch_add(&check_passed, 1, __ATOMIC_RELAXED);
        return 1;
    }
    char text[512]; /* one printf for the line, so that lines of threads do not mix */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("FAIL %s:%d: %s\n", file, line, text);
    fflush(stdout); /* so that a crash right after does not lose the line */
    __atomic_fetch_add(&check_failed, 1, __ATOMIC_RELAXED);
    return 0;
}

/* 1 with CASES=all in the environment, as make faults, the sanitizers and the mutants have it; else
   the longest tests run a part of their cases. */
static inline int check_all_cases(void) {
    const char *cases = getenv("CASES");
    return cases && strcmp(cases, "all") == 0;
}

/* Counts a part of the test that cannot run on this machine, and prints the reason. */
static inline void check_skip(const char *reason) {
    printf("SKIP %s\n", reason);
    __atomic_fetch_add(&check_skipped, 1, __ATOMIC_RELAXED);
}

/* Prints the summary. Returns main's result: 0 if no check failed, else 1. */
static inline int check_done(const char *name) {
    printf(
        "%s: %d passed, %d failed, %d skipped\n", name, check_passed, check_failed, check_skipped);
    return check_failed == 0 ? 0 : 1;
}

#endif
