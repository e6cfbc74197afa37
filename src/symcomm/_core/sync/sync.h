/* How ranks of a group wait for each other, and end each other's waits when something fails. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "group/group.h"
#include "os/thread.h"

struct flight_entry;

enum wait_kind { WAIT_ARRIVED_ALL, WAIT_PROGRESS_ALL, WAIT_PROGRESS_ONE };

struct condition {
    enum wait_kind kind;
    int who;
    uint64_t target;
    int next;                    /* all ranks below are known to satisfy it */
    int (*check)(void *context); /* asked while sleeping: STATUS_OK, or why to stop; NULL: nothing to ask */
    void *context;
};

/* When to give up. Most waits are over before it matters, so the clock is not looked at until one takes longer. */
struct deadline {
    int64_t timeout; /* ns; 0: none */
    int64_t at;      /* ns, CLOCK_MONOTONIC; 0: not known yet */
};

/* Wait until it holds, the deadline passes, a missing rank dies, or someone aborts. */
int sync_wait(const struct visit *v, struct condition *c, struct deadline *deadline);

/* Publish my progress and wake whoever slept for it. */
void sync_signal(const struct visit *v, uint64_t progress);
void sync_wake_peers(const struct visit *v);

/* Have the waits of this rank look again. */
void sync_wake_own(const struct visit *v);

/* Make every rank's pending and later waits fail with this cause; the first cause wins. Returns the winning status. */
int sync_fail(const struct visit *v, int status, int culprit);
/* What another rank could not tell itself. */
int sync_fail_of(const struct visit *v, int status, int culprit, int origin);
int sync_aborted(const struct visit *v);

/* Asked while a call of the main thread sleeps: nonzero when a signal handler raised. NULL elsewhere. */
extern THREAD_LOCAL int (*symcomm_interrupted)(void);

/* Called when a wait turns into sleep: the number of the place in the program that made the call, or 0. NULL: known. */
extern THREAD_LOCAL uint32_t (*symcomm_call_site)(void);
void symcomm_note_call_site(struct flight_entry *e);

/* Called before a wait that may last. NULL when there is nothing to do then. */
extern THREAD_LOCAL void (*symcomm_before_waiting)(void);
void symcomm_lock(pthread_mutex_t *lock);

/* STATUS_OK, STATUS_DEAD or STATUS_LEFT */
int sync_gone(const struct visit *v, int rank);
int sync_marked_gone(const struct visit *v, int rank); /* the same as far as memory tells, for those who do not wait */

/* Operation g->seq has failed on this rank, whose abort word says why. Every rank is told before the caller gets its
 * tensors back, also by those who were only told themselves: the first one may have died while it told the others. */
void sync_void(const struct visit *v);
/* Whether some rank has left operation `seq` in failure; what was read before is as it was if none has. */
bool sync_is_void(const struct visit *v, uint64_t seq);
