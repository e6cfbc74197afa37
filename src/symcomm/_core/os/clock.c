/* Converts ticks to nanoseconds. Their rate follows from how far both clocks have come since the module was loaded. */
#include "os/clock.h"

static uint64_t first_ticks;
static int64_t first_ns;

void symcomm_start_clock(void) {
    first_ns = symcomm_now_ns();
    first_ticks = symcomm_ticks();
}

int64_t symcomm_ticks_to_ns(uint64_t ticks) {
    int64_t now_ns = symcomm_now_ns();
    uint64_t now_ticks = symcomm_ticks();
    double rate = now_ticks > first_ticks ? (double)(now_ns - first_ns) / (double)(now_ticks - first_ticks) : 1.0;
    return now_ns - (int64_t)((double)(int64_t)(now_ticks - ticks) * rate);
}

double symcomm_seconds_since(uint64_t ticks) { return (double)(symcomm_now_ns() - symcomm_ticks_to_ns(ticks)) / 1e9; }
