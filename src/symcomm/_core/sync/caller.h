/* The caller of the core in this thread, and what a wait must do for it. The bindings set it (module/gil.h); the core's
 * own threads have none. */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "os/thread.h"

struct caller;
struct group;

/* A wait that takes long. */
struct long_wait {
    struct group *group;
    const void *id; /* of the wait, while it lasts */
    int missing;    /* the rank it waits for first, or -1 */
    int kind;       /* enum wait_for_what */
    int64_t ns;     /* how long it has lasted */
    int status;     /* WAIT_GOES_ON, or how it ended */
};

#define WAIT_GOES_ON (-1)

struct caller_hooks {
    void (*before_waiting)(struct caller *c); /* before a wait that may take long */
    bool (*is_interrupted)(struct caller *c); /* during a wait: whether a signal handler raised */
    uint32_t (*find_site)(struct caller *c);  /* the number of the place in the program that made the call, or 0 */
    int64_t (*tell)(struct caller *c, const struct long_wait *w); /* reports it; returns ns until the next report */
};

/* One call. Calls nest, by way of signal handlers and finalizers: the inner one restores the outer. */
struct caller {
    const struct caller_hooks *hooks; /* NULL: a thread of the core's own */
    struct caller *outer;
    void *lock_state; /* what the bindings need to retake the interpreter lock; NULL: the thread has it */
    /* In a thread that runs operations for others: how many threads wait for it. If none, their other work may need the
     * core. NULL in all other threads. */
    const _Atomic int *awaited;
    unsigned slices; /* slept so far */
    bool knows_site; /* find_site was called */
};

extern THREAD_LOCAL struct caller *symcomm_caller; /* NULL: there is none */

static inline void caller_before_waiting(void) {
    struct caller *c = symcomm_caller;
    if (c && c->hooks) c->hooks->before_waiting(c);
}

static inline const _Atomic int *caller_awaited(void) { return symcomm_caller ? symcomm_caller->awaited : NULL; }

/* Takes a lock that another thread may hold for long. */
void caller_lock(pthread_mutex_t *lock);
