/* Leaving a group while other threads may be in the middle of its calls.
 *
 * A rank that has departed is never waited for and never looked after again: its peers give their memory back once all
 * have. So from then on nothing here may touch it. Calls that began before are waited for; the group then looks at a
 * private copy of its own control block, which refuses every operation, and whoever aborts, waits or asks later reaches
 * nobody. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "exec/exec.h"
#include "group/group.h"
#include "module/module.h"
#include "os/futex.h"
#include "sync/sync.h"

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
    atomic_fetch_sub(&v->group->visitors, 1);
    if (atomic_load_explicit(&v->group->departs_late, memory_order_relaxed)) leave_late(v->group);
}

static void wake_own(struct group *g) {
    struct control *me = g->control[g->rank];
    atomic_store(&me->sleeping, AWAKE);
    atomic_fetch_add(&me->doorbell, 1);
    futex_wake(&me->doorbell, INT32_MAX);
    atomic_fetch_add(&me->p2p_doorbell, 1);
    futex_wake(&me->p2p_doorbell, INT32_MAX);
}

/* With the group's lock held, and no visitors. No wait is satisfied by what the copy says. */
static void depart(struct group *g) {
    struct control *copy = g->left ? NULL : aligned_alloc(64, (sizeof *copy + 63) / 64 * 64);
    if (copy == NULL) return; /* without memory for it the peers keep what they have, too */
    g->own_block = g->control[g->rank];
    memset(copy, 0, sizeof *copy);
    atomic_store(&copy->state, CONTROL_LEFT);
    atomic_store(&copy->abort, atomic_load(&g->own_block->abort));
    atomic_store(&copy->abort_seq, atomic_load(&g->own_block->abort_seq));
    for (int r = 0; r < g->world; r++) atomic_store(&g->control[r]->departed[g->rank], 1);
    for (int r = 0; r < g->world; r++) g->control[r] = copy;
    g->own_copy = copy;
    atomic_store(&g->left, true);
}

void leave_late(struct group *g) {
    /* Two calls that end at once may each find the other: whoever had the lock looks again. */
    while (atomic_load(&g->departs_late) && !atomic_load(&g->left) && atomic_load(&g->visitors) == 0) {
        if (pthread_mutex_trylock(&g->lock) != 0) return; /* an operation runs: its end comes here */
        if (atomic_load(&g->visitors) == 0) depart(g);
        pthread_mutex_unlock(&g->lock);
    }
}

void leave_group(struct group *g) {
    wake_own(g);
    int own = 0;
    for (struct visit *v = visits; v; v = v->outer) own += v->group == g;
    while (atomic_load(&g->visitors) > own) usleep(50); /* they notice that they were aborted */
    if (own == 0 && exec_settle(g)) {
        pthread_mutex_lock(&g->lock);
        depart(g);
        pthread_mutex_unlock(&g->lock);
        return;
    }
    atomic_store(&g->departs_late, true);
    leave_late(g);
}
