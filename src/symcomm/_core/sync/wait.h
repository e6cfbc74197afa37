/* The one way to wait. Every wait looks for a while (sync/backoff.c says how), then sleeps until somebody rings; while
 * it sleeps it notices within a slice that its group has failed, that a peer is gone, that its time is up, or that a
 * signal handler raised. What differs from wait to wait is a `struct wait_kind`.
 *
 * No wake-up is lost: the sleeper publishes, fences and looks again; whoever ends the wait acts, fences and looks for
 * sleepers. */
#pragma once

#include "group/group.h"

#define SLICE_NS 10000000 /* how often a sleeper looks for dead peers: a tenth of the 100 ms we promise */

struct flight_entry;
struct wait_kind;

/* Callers put it first in a struct of their own, which the functions of its kind know. */
struct wait {
    const struct wait_kind *kind;
    const struct visit *visit;   /* NULL: no group's; it sleeps at once */
    _Atomic uint32_t *bell;      /* the futex it sleeps on */
    _Atomic uint32_t *sleepers;  /* counts who sleeps there; NULL: publish() says so */
    int missing;                 /* the rank it waits for first, or -1; is_over() keeps this and `word` current */
    const void *word;            /* changes when that rank comes, where a processor can watch it; or NULL */
    int64_t deadline;            /* ns, CLOCK_MONOTONIC; 0: none */
    struct flight_entry *record; /* of the call, or NULL */
};

struct wait_kind {
    /* Looks, does what can be done, and says whether that was all. */
    bool (*is_over)(struct wait *w);
    /* Publishes what this thread waits for and returns what the bell showed before. NULL: nothing to publish. */
    uint32_t (*publish)(struct wait *w);
    /* It sleeps no longer. NULL: nothing was published. */
    void (*retract)(struct wait *w, int status);
    /* Once a slice: STATUS_OK, or why to stop, of which every rank has been told. NULL: nothing to check. */
    int (*check)(struct wait *w);
    /* STATUS_OK, or how the culprit is gone, which has not done its part. NULL: nobody can be. */
    int (*find_gone)(struct wait *w, int *culprit);
    /* The wait ends without being over. culprit: the rank to blame; -1: it is known, or nobody is. Returns the status
     * that counts. */
    int (*give_up)(struct wait *w, int status, int culprit);
    bool
        is_operation; /* it also ends when its asynchronous call is given up, and the recorder notes how long it took */
};

/* STATUS_OK: it is over. */
int wait_loop(struct wait *w);

/* For waits that only a failure brings about: looks every 0.1 ms, for so long at most, whether it is over. */
bool wait_briefly(bool (*is_over)(void *context), void *context, int64_t most_ns);
