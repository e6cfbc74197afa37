/* Time: nanoseconds of CLOCK_MONOTONIC, and the processor's own counter, which costs a tenth of that to read. */
#pragma once

#include <stdint.h>
#include <time.h>

static inline int64_t symcomm_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Processes of one host can compare ticks, if all cores share the counter. */
static inline uint64_t symcomm_ticks(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return (uint64_t)symcomm_now_ns();
#endif
}

/* Notes both clocks; called once, before the other two functions. */
void symcomm_start_clock(void);
/* The time on CLOCK_MONOTONIC. */
int64_t symcomm_ticks_to_ns(uint64_t ticks);
double symcomm_seconds_since(uint64_t ticks);
