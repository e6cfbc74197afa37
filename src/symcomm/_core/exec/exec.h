/* Runs plans. */
#pragma once

#include "exec/plan.h"
#include "observe/flight.h"
#include "sync/sync.h"

/* The caller's buffers; n_in/n_out entries as the plan asks. */
struct buffers {
    char *const *in;
    char *const *out;
    int n_in, n_out;
};

/* The next operation of the group, from head to end. Takes the group's lock. timeout in ns, 0: none.
 * 0, or a status with the operation's number above its 8 bits. */
int64_t exec_run(struct group *g, const struct plan *p, const struct buffers *b, int64_t timeout, struct origin from);

/* In the place of the next operation: this rank takes its number, and the others, who find that it has refused its
 * call, leave the operation with STATUS_REFUSED. Waits for nobody, unless the operation before was left that way, too.
 * 0, or why nobody was told: the group has failed. */
int64_t exec_refuse(struct group *g, const char *words, size_t n, int64_t timeout, struct origin from);
/* Whether it would wait for peers now. */
bool exec_may_wait(struct group *g);

/* Whether it will be over in microseconds once all ranks have come, and none of them needs this thread to go on. */
static inline bool exec_is_short(const struct group *g, const struct plan *p) { return g->own_process && p->is_short; }
