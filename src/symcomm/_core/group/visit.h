/* A visit is the right to touch the memory that ranks share.
 *
 * Once this rank has departed, peers give their part of the group back and use it for something else. So code that
 * touches a control block or a staging area has a visit, and departing waits for all visits. Only group/visit.c knows
 * the addresses; a function that needs them takes the visit as an argument. */
#pragma once

#include <stdbool.h>

#include "group/control.h"

struct group;

/* The visit of one call. Visits nest: a signal handler or a finalizer may make a call of its own. */
struct visit {
    struct group *group;
    struct control *const *blocks; /* per rank; after the group was left: for every rank the same private one */
    char *const *stages;           /* per rank, two halves of stage_bytes */
    struct visit *outer;           /* of the same thread */
    bool is_counted;
};

static inline struct control *block_of(const struct visit *v, int rank) { return v->blocks[rank]; }
static inline char *stage_of(const struct visit *v, int rank) { return v->stages[rank]; }

/* False: the group is being left, and nothing may begin. The visit then sees a private block, which says for every rank
 * that it has left and refuses every operation. What is done to it reaches nobody. */
bool visit_begin(struct visit *v, struct group *g);
void visit_end(struct visit *v);

/* The visit of the one operation that may run at a time. False: this thread is in another one. */
bool visit_lock(struct visit *v, struct group *g);
void visit_unlock(struct visit *v);
/* Returns once the operation of another thread has ended, after LONG_ENOUGH_NS at most. The group has failed, so that
 * operation needs no peer to end. */
void visit_await_operation(const struct visit *v);
/* Whether some thread is in an operation. */
bool visit_is_locked(const struct group *g);

/* Leaving: nothing begins from here on, and operations of this rank end. The leaver's visit lasts until leave_end(),
 * which ends this process's waits, waits for other threads' calls, and departs. If this very thread is in a call, that
 * call departs when it ends. False: somebody is leaving the group, or has left it. */
bool leave_begin(struct visit *v, struct group *g);
void leave_end(struct visit *v);
/* Whether this rank has departed. */
bool leave_is_done(const struct group *g);
/* With the interpreter lock held. Whether all ranks have departed or died, so that this rank's part of the group may be
 * used for other things. */
bool leave_is_done_by_all(struct group *g);

/* In a forked child, which is not the rank: the group counts as left there, also in calls under way. Threads did not
 * come along, and one of them may hold the lock. */
void leave_as_child(struct group *g);

/* controls, stages: an address per rank. NULL: no memory. */
struct blocks *blocks_make(int rank, int world, char *const *controls, char *const *stages);
void blocks_free(struct blocks *b);
