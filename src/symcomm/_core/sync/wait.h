/* The one way to wait. Every wait looks for a while (sync/backoff.c says how), then sleeps until another rank rings.
 * While it sleeps it notices within a slice that its group has failed, that a peer is gone, that its time is up, or
 * that a signal handler raised. A `struct wait_kind` has what differs from wait to wait.
 *
 * No wake-up is lost: the sleeper publishes, fences and looks again; the rank that ends the wait acts, fences and looks
 * for sleepers. */
#pragma once

#include "group/group.h"

#define SLICE_NS 10000000 /* how often a sleeper looks for dead peers: a tenth of the 100 ms we promise */

struct flight_entry;
struct wait_kind;

enum wait_for_what { WAITS_FOR_RANKS, WAITS_FOR_MESSAGE, WAITS_FOR_SIGNAL };

/* Callers put it first in a struct of their own; the functions of its kind know that struct. */
struct wait {
    const struct wait_kind *kind;
    const struct visit *visit;   /* NULL: it belongs to no group, and sleeps at once */
    _Atomic uint32_t *bell;      /* the futex it sleeps on */
    _Atomic uint32_t *sleepers;  /* counts threads that sleep there; NULL: publish() tells the others */
    int missing;                 /* the rank it waits for first, or -1; is_over() keeps this and `word` current */
    const void *word;            /* changes when that rank comes; a processor may watch it; or NULL */
    int64_t deadline;            /* ns, CLOCK_MONOTONIC; 0: none */
    struct flight_entry *record; /* of the call, or NULL */
    struct group *tells_of;      /* if visit is NULL: the group whose operation another thread runs */
    unsigned slices;             /* how many this wait has slept */
};

struct wait_kind {
    /* Looks, does what can be done, and returns whether the wait is over. */
    bool (*is_over)(struct wait *w);
    /* Publishes what this thread waits for and returns what the bell showed before. NULL: nothing to publish. */
    uint32_t (*publish)(struct wait *w);
    /* Takes back what was published. NULL: nothing was. */
    void (*retract)(struct wait *w, int status);
    /* Called once a slice: STATUS_OK, or why to stop, which all ranks have been told. NULL: nothing to check. */
    int (*check)(struct wait *w);
    /* STATUS_OK, or how a rank that has not done its part is gone. NULL: no rank can be. */
    int (*find_gone)(struct wait *w, int *culprit);
    /* Called when a wait ends without being over. culprit: the rank to blame; -1: it is known, or there is none.
     * Returns the status that counts. */
    int (*give_up)(struct wait *w, int status, int culprit);
    enum wait_for_what what;
    /* Whether it waits in an operation: it also ends if its asynchronous call is given up, and the recorder notes how
     * long it took. */
    bool is_operation;
    /* It may last for hours with nothing wrong, so slices get longer. */
    bool dozes;
};

/* STATUS_OK: it is over. */
int wait_loop(struct wait *w);

/* Waits that take so long, in ns, are reported to their callers once they sleep; 0: none is. */
void wait_tell_after(int64_t ns);

/* For short waits after a failure: looks every 0.1 ms whether it is over, for `most_ns` at most. */
bool wait_briefly(bool (*is_over)(void *context), void *context, int64_t most_ns);
