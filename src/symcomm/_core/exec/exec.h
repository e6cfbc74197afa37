/* Runs plans: one operation of a group at a time. */
#pragma once

#include "exec/plan.h"
#include "observe/flight.h"
#include "sync/sync.h"

/* The caller's buffers, as many as the plan asks for. */
struct buffers {
    char *const *in;
    char *const *out;
    int n_in, n_out;
};

/* Runs the group's next operation, from head to end. Takes the group's lock. timeout: ns; 0: none. Returns 0, or a
 * status with the operation's number above its 8 bits. */
int64_t exec_run(struct group *g, const struct plan *p, const struct buffers *b, int64_t timeout, struct origin from);

/* Refuses a call instead of running the next operation: this rank takes the operation's number, and the others, who see
 * the refusal, leave it with STATUS_REFUSED. Does not wait, unless the operation before ended that way too. Returns 0,
 * or the status of a group that has failed, which learns nothing. */
int64_t exec_refuse(struct group *g, const char *words, size_t n, int64_t timeout, struct origin from);
/* Whether exec_refuse() would wait for peers now. */
bool exec_may_wait(struct group *g);

/* Whether a plan ends microseconds after all ranks have come, and no rank is a thread that needs our interpreter
 * lock. */
static inline bool exec_is_short(const struct group *g, const struct plan *p) { return g->own_process && p->is_short; }
