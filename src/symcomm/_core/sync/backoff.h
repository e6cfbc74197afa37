/* What a wait does between its first looks, which take some microseconds, and its sleep.
 *
 * A rank that has a core of its own keeps looking for some milliseconds: nobody it waits for needs that core, and once
 * it is given away, whoever else is there may keep it for a whole time slice. With more ranks than cores it offers the
 * core for a moment instead, or for longer while others use it or a peer is being woken. In both cases it sleeps then.
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
    int64_t until;      /* then it is time to sleep, or to ask whether it is */
    int64_t deadline;   /* 0: none */
    int64_t yields;     /* so far */
    int64_t offer_at;   /* when to ask whether the missing rank waits for this very core */
    bool keeps_core;
    unsigned looks;
};

/* deadline: ns, CLOCK_MONOTONIC; 0: none. It is not looked for beyond that. */
void backoff_begin(struct backoff *b, const struct visit *v, int64_t deadline);

/* Before the condition is looked at again: have the processor watch the word that is to change, where it can. */
bool backoff_watch(const struct backoff *b, const void *word);

/* Pauses, or offers the core. missing: the rank that is waited for, or -1; watched: backoff_watch() watches its word,
 * which has not changed since. False: it is time to sleep. */
bool backoff_step(struct backoff *b, int missing, bool watched);

/* A wait was over late within the first looks: more of them would be worth it. */
void backoff_look_longer(struct group *g);

/* The wait is over. */
void backoff_end(struct backoff *b, bool slept);
