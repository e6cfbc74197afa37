/* How ranks of a group wait for each other in collectives. */
#pragma once

#include "sync/fail.h"

enum wait_for { WAIT_ARRIVED_ALL, WAIT_PROGRESS_ALL, WAIT_PROGRESS_ONE };

struct condition {
    enum wait_for kind;
    int who;
    uint64_t target;
    int next;                    /* all ranks below are known to satisfy it */
    int (*check)(void *context); /* asked while sleeping: STATUS_OK, or why to stop; NULL: nothing to ask */
    void *context;
};

/* When to give up. Most waits end before it matters, so nobody reads the clock until one takes longer. */
struct deadline {
    int64_t timeout; /* ns; 0: none */
    int64_t at;      /* ns, CLOCK_MONOTONIC; 0: not known yet */
};

/* Waits until it holds, the deadline passes, a missing rank dies, or someone aborts. */
int sync_wait(const struct visit *v, struct condition *c, struct deadline *deadline);

/* Publishes my progress and wakes whoever slept for it. */
void sync_signal(const struct visit *v, uint64_t progress);
void sync_wake_peers(const struct visit *v);
