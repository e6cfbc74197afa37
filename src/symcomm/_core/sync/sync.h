/* How ranks of a group wait for each other in collectives. */
#pragma once

#include "sync/fail.h"

enum wait_for { WAIT_ARRIVED_ALL, WAIT_PROGRESS_ALL, WAIT_PROGRESS_ONE };

struct condition {
    enum wait_for kind;
    int who;
    uint64_t target;
    int next;                    /* all ranks below are known to satisfy it */
    int (*check)(void *context); /* called while sleeping: STATUS_OK, or why to stop; NULL: none */
    void *context;
};

/* When to give up. Most waits end sooner, so the clock is read only when one takes longer. */
struct deadline {
    int64_t timeout; /* ns; 0: none */
    int64_t at;      /* ns, CLOCK_MONOTONIC; 0: not known yet */
};

/* Waits until c holds, the deadline passes, a missing rank dies, or a rank aborts. */
int sync_wait(const struct visit *v, struct condition *c, struct deadline *deadline);

/* Publishes my progress and wakes the ranks that slept for it. */
void sync_signal(const struct visit *v, uint64_t progress);
void sync_wake_peers(const struct visit *v);
