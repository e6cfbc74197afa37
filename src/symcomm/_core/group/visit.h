/* The right to touch what ranks share.
 *
 * Peers give their part of a group back once this rank has departed, and it becomes something else. So whoever touches
 * a control block or a staging area has a visit, and departing waits for all visits: the addresses are known to
 * group/visit.c alone, and a function that needs them takes the visit as an argument. */
#pragma once

#include <stdbool.h>

#include "group/control.h"

struct group;

/* One call's. Visits nest: a signal handler or a finalizer may make a call of its own. */
struct visit {
    struct group *group;
    struct control *const *blocks; /* per rank; after the group was left: for every rank the same private one */
    char *const *stages;           /* per rank, two halves of stage_bytes */
    struct visit *outer;           /* of the same thread */
    bool is_counted;
};

static inline struct control *block_of(const struct visit *v, int rank) { return v->blocks[rank]; }
static inline char *stage_of(const struct visit *v, int rank) { return v->stages[rank]; }

/* False: the group is being left, and nothing may begin. The visit then sees a private block, which says so of every
 * rank and refuses every operation; what is done to that reaches nobody. */
bool visit_begin(struct visit *v, struct group *g);
void visit_end(struct visit *v);

/* The visit of the one operation that may run at a time. False: this thread is in another one. */
bool visit_lock(struct visit *v, struct group *g);
void visit_unlock(struct visit *v);
/* Returns once the operation that another thread is in has ended, which needs no peer for that since the group has
 * failed; after LONG_ENOUGH_NS at most. */
void visit_await_operation(const struct visit *v);
/* Whether some thread is in an operation. */
bool visit_is_locked(const struct group *g);

/* Leaving: nothing begins from here on, and operations of this rank end. The leaver's visit lasts until leave_end(),
 * which ends this process's waits, returns when other threads' calls have ended, and departs; or it has the last call
 * of this very thread do so when that ends. False: somebody leaves the group already, or has. */
bool leave_begin(struct visit *v, struct group *g);
void leave_end(struct visit *v);
/* Whether this rank has departed. */
bool leave_is_done(const struct group *g);
/* With the interpreter lock held. Whether all ranks have departed or died, so that this rank's part of the group may be
 * used for other things. */
bool leave_is_done_by_all(struct group *g);

/* In a forked child, which is not the rank: the group counts as left there, also in calls that it is in. Threads did
 * not come along, and the lock may be held by one of them. */
void leave_as_child(struct group *g);

/* controls, stages: an address per rank. NULL: no memory. */
struct blocks *blocks_make(int rank, int world, char *const *controls, char *const *stages);
void blocks_free(struct blocks *b);
