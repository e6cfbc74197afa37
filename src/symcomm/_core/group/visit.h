/* A visit is the right to touch the memory that ranks share.
 *
 * Once this rank has departed, peers may reuse their part of the group's memory. So code that touches a control block
 * or a staging area holds a visit, and a rank departs only when all visits are over. Only group/visit.c knows the
 * addresses; a function that needs them takes the visit as an argument. */
#pragma once

#include <stdbool.h>

#include "group/control.h"

struct group;

/* The visit of one call. Visits nest: a signal handler or a finalizer may make a call of its own. */
struct visit {
    struct group *group;
    struct control *const *blocks; /* per rank; once the group was left: the private one for every rank */
    char *const *stages;           /* per rank, two halves of stage_bytes */
    struct visit *outer;           /* of the same thread */
    bool is_counted;
};

static inline struct control *block_of(const struct visit *v, int rank) { return v->blocks[rank]; }
static inline char *stage_of(const struct visit *v, int rank) { return v->stages[rank]; }

/* False: the group is being left, and no call may begin. The visit then sees a private block, which says that every
 * rank has left, refuses every operation, and is seen by no peer. */
bool visit_begin(struct visit *v, struct group *g);
void visit_end(struct visit *v);

/* Begins the visit of an operation; one runs at a time. False: this thread is in another one. */
bool visit_lock(struct visit *v, struct group *g);
void visit_unlock(struct visit *v);
/* Waits until another thread's operation has ended, for LONG_ENOUGH_NS at most. The group has failed, so the operation
 * ends without any peer. */
void visit_await_operation(const struct visit *v);
/* Whether some thread is in an operation. */
bool visit_is_locked(const struct group *g);

/* Begins to leave: from now on no call begins, and operations of this rank end. The leaver's visit lasts until
 * leave_end(), which ends this process's waits, waits for other threads' calls, and departs. If this thread itself is
 * in a call, that call departs when it ends. False: another call is leaving the group, or has left it. */
bool leave_begin(struct visit *v, struct group *g);
void leave_end(struct visit *v);
/* Whether this rank has departed. */
bool leave_is_done(const struct group *g);
/* With the interpreter lock held. Whether all ranks have departed or died, so that this rank's part of the group may be
 * used for other things. */
bool leave_is_done_by_all(struct group *g);

/* In a forked child, which is not the rank: the group counts as left, even in calls under way. The parent's threads are
 * gone, and one of them may have held the lock. */
void leave_as_child(struct group *g);

/* controls, stages: an address per rank. NULL: no memory. */
struct blocks *blocks_make(int rank, int world, char *const *controls, char *const *stages);
void blocks_free(struct blocks *b);
