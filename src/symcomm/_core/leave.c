/* Leaving a group while other threads may be in the middle of its calls.
 *
 * A rank that has departed is never waited for and never looked after again: its peers give their memory back once all have.
 * So from then on nothing here may touch it. Calls that began before are waited for; the group then looks at a private copy
 * of its own control block, which refuses every operation, and whoever aborts, waits or asks later reaches nobody. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common.h"
#include "exec.h"
#include "sync.h"

static _Thread_local struct visit *visits; /* of this thread, the innermost first */

bool visit_begin(struct visit *v, struct group *g) {
    atomic_fetch_add(&g->visitors, 1);
    if (atomic_load(&g->leaving)) {
        atomic_fetch_sub(&g->visitors, 1);
        return false;
    }
    *v = (struct visit){g, visits};
    visits = v;
    return true;
}

void visit_end(struct visit *v) {
    visits = v->outer;
    if (atomic_fetch_sub(&v->group->visitors, 1) == 1 && v->group->departs_late) leave_depart(v->group);
}

void leave_wake_own(struct group *g) {
    struct control *me = g->control[g->rank];
    atomic_store(&me->sleeping, 0);
    atomic_fetch_add(&me->doorbell, 1);
    symcomm_futex_wake(&me->doorbell, INT32_MAX);
    atomic_fetch_add(&me->mail_bell, 1);
    symcomm_futex_wake(&me->mail_bell, INT32_MAX);
}

bool leave_settle(struct group *g) {
    int own = 0;
    for (struct visit *v = visits; v; v = v->outer) own += v->group == g;
    while (atomic_load(&g->visitors) > own) usleep(50); /* they notice that they were aborted */
    return exec_settle(g) && own == 0;
}

void leave_depart(struct group *g) {
    if (g->left) return;
    struct control *copy = aligned_alloc(64, (sizeof *copy + 63) / 64 * 64);
    if (copy == NULL) return; /* then the peers keep what they have, too */
    g->own_block = g->control[g->rank];
    memcpy(copy, g->own_block, sizeof *copy);
    for (int r = 0; r < g->world; r++) atomic_store(&g->control[r]->departed[g->rank], 1);
    for (int r = 0; r < g->world; r++) g->control[r] = copy;
    g->own_copy = copy;
    g->left = true;
}
