/* What a wait does between its first looks, which take some microseconds, and its sleep.
 *
 * A rank with a core of its own keeps looking for some milliseconds: the ranks that it waits for do not need that core,
 * and a process that it is given to may keep it for a whole time slice. With more ranks than cores it offers the core
 * for a moment instead, or for longer while others use it or a peer is being woken. Then it sleeps.
 *
 *     backoff_begin(&b, v, deadline);
 *     do {
 *         if (it holds) return backoff_end(&b, false), ...;
 *     } while (backoff_step(&b, the rank that is missing, false));
 *     sleep, then backoff_end(&b, true)
 */
#pragma once

#include "group/group.h"

struct backoff {
    const struct visit *visit;
    int64_t start, now; /* ns, CLOCK_MONOTONIC */
    int64_t until;      /* when to sleep, or to ask whether to sleep */
    int64_t deadline;   /* 0: none */
    int64_t yields;     /* so far */
    int64_t offer_at;   /* when to check whether the missing rank waits for this very core */
    bool keeps_core;
    unsigned looks;
};

/* deadline: ns, CLOCK_MONOTONIC; 0: none. Looking ends then. */
void backoff_begin(struct backoff *b, const struct visit *v, int64_t deadline);

/* Called before the next look at the condition: has the processor watch the word that will change, if it can. */
bool backoff_watch(const struct backoff *b, const void *word);

/* Pauses, or offers the core. missing: the rank to wait for, or -1; watched: backoff_watch() watches its word, which
 * has not changed since. False: it is time to sleep. */
bool backoff_step(struct backoff *b, int missing, bool watched);

/* Called when a wait ended late in its first looks: allows more of them. */
void backoff_look_longer(struct group *g);

/* The wait is over. */
void backoff_end(struct backoff *b, bool slept);
