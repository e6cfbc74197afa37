/* What collectives wait for, and how they signal.
 *
 * A sleeper publishes its condition. A rank that signals wakes only the sleepers whose condition now holds, so that 32
 * ranks on 2 cores are woken once each, not at every arrival. */
#include "sync/sync.h"

#include <stddef.h>

#include "exec/plan.h"
#include "os/clock.h"
#include "os/futex.h"
#include "sync/backoff.h"
#include "sync/wait.h"

static bool rank_satisfies(const struct visit *v, int rank, const struct condition *c) {
    struct control *peer = block_of(v, rank);
    if (c->kind == WAIT_ARRIVED_ALL)
        return atomic_load_explicit(&peer->arrival[c->target & 1].seq, memory_order_acquire) == c->target;
    /* A peer is at this operation or the next, or has not signalled for long, so the difference decides, even when
     * numbers wrap after 2^40 operations. */
    return atomic_load_explicit(&peer->progress, memory_order_acquire) - c->target < (uint64_t)2 << PLAN_SIGNAL_BITS;
}

/* Whether c holds, for the rank `sleeper`. */
static bool holds(const struct visit *v, int sleeper, struct condition *c) {
    if (c->kind == WAIT_PROGRESS_ONE) return rank_satisfies(v, c->who, c);
    int world = v->group->world;
    while (c->next < world && (c->next == sleeper || rank_satisfies(v, c->next, c))) c->next++;
    return c->next == world;
}

static void ring(struct control *peer) {
    atomic_fetch_add_explicit(&peer->doorbell, 1, memory_order_release);
    futex_wake(&peer->doorbell, 1);
}

void sync_wake_peers(const struct visit *v) {
    struct group *g = v->group;
    atomic_thread_fence(memory_order_seq_cst);
    for (int r = 0; r < g->world; r++) {
        struct control *peer = block_of(v, r);
        if (r == g->rank || atomic_load_explicit(&peer->sleeping, memory_order_acquire) != ASLEEP) continue;
        struct condition c = {
            .kind = (enum wait_for)atomic_load_explicit(&peer->wait_kind, memory_order_relaxed),
            .who = atomic_load_explicit(&peer->wait_who, memory_order_relaxed),
            .target = atomic_load_explicit(&peer->wait_target, memory_order_relaxed),
        };
        if (c.who < 0 || c.who >= g->world || !holds(v, r, &c)) continue;
        uint32_t asleep = ASLEEP;
        if (atomic_compare_exchange_strong(&peer->sleeping, &asleep, RUNG)) ring(peer);
    }
}

void sync_signal(const struct visit *v, uint64_t progress) {
    /* A peer that sees this signal sees all that we saw, even that the operation is void. */
    atomic_thread_fence(memory_order_acquire);
    atomic_store_explicit(&block_of(v, v->group->rank)->progress, progress, memory_order_release);
    sync_wake_peers(v);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

struct collective_wait {
    struct wait wait;
    struct condition *condition;
};

static struct condition *condition_of(struct wait *w) { return ((struct collective_wait *)w)->condition; }

static bool is_over(struct wait *w) {
    struct condition *c = condition_of(w);
    if (holds(w->visit, w->visit->group->rank, c)) return true;
    w->missing = c->kind == WAIT_PROGRESS_ONE ? c->who : c->next;
    struct control *peer = block_of(w->visit, w->missing);
    w->word = c->kind == WAIT_ARRIVED_ALL ? &peer->arrival[c->target & 1].seq : &peer->progress;
    return false;
}

static uint32_t publish(struct wait *w) {
    struct control *me = block_of(w->visit, w->visit->group->rank);
    const struct condition *c = condition_of(w);
    uint32_t seen = atomic_load_explicit(&me->doorbell, memory_order_acquire);
    atomic_store_explicit(&me->wait_kind, (uint32_t)c->kind, memory_order_relaxed);
    atomic_store_explicit(&me->wait_who, c->who, memory_order_relaxed);
    atomic_store_explicit(&me->wait_target, c->target, memory_order_relaxed);
    atomic_store_explicit(&me->sleeping, ASLEEP, memory_order_release);
    return seen;
}

static void retract(struct wait *w, int status) {
    (void)status;
    atomic_store_explicit(&block_of(w->visit, w->visit->group->rank)->sleeping, AWAKE, memory_order_relaxed);
}

static int check(struct wait *w) {
    const struct condition *c = condition_of(w);
    return c->check ? c->check(c->context) : STATUS_OK;
}

/* Finds the first missing rank that is gone, then looks again: the rank may have done its part before. */
static int find_gone(struct wait *w, int *culprit) {
    const struct visit *v = w->visit;
    const struct condition *c = condition_of(w);
    int end = c->kind == WAIT_PROGRESS_ONE ? c->who + 1 : v->group->world;
    for (int r = w->missing; r < end; r++) {
        if (r == v->group->rank || rank_satisfies(v, r, c)) continue;
        int status = sync_gone(v, r);
        if (status == STATUS_OK || rank_satisfies(v, r, c)) continue;
        *culprit = r;
        return status;
    }
    return STATUS_OK;
}

static int give_up(struct wait *w, int status, int culprit) {
    if (culprit >= 0) return sync_fail(w->visit, status, culprit);
    if (status == STATUS_INTERRUPTED) sync_fail(w->visit, STATUS_ABORTED, w->visit->group->rank);
    return status;
}

static const struct wait_kind collective = {
    .is_over = is_over,
    .publish = publish,
    .retract = retract,
    .check = check,
    .find_gone = find_gone,
    .give_up = give_up,
    .is_operation = true,
};

/* Kept out of sync_wait(), so that its first looks stay short. */
static __attribute__((noinline)) int wait_for_long(const struct visit *v, struct condition *c,
                                                   struct deadline *deadline) {
    struct group *g = v->group;
    if (deadline->at == 0 && deadline->timeout) deadline->at = symcomm_now_ns() + deadline->timeout;
    struct collective_wait w = {.condition = c};
    w.wait = (struct wait){
        .kind = &collective,
        .visit = v,
        .bell = &block_of(v, g->rank)->doorbell,
        .deadline = deadline->at,
        .record = g->recording,
    };
    return wait_loop(&w.wait);
}

int sync_wait(const struct visit *v, struct condition *c, struct deadline *deadline) {
    struct group *g = v->group;
    for (int i = 0, spins = spins_now(g); i < spins; i++) {
        if (holds(v, g->rank, c)) {
            if (i > spins / 2) backoff_look_longer(g);
            return STATUS_OK;
        }
        cpu_relax();
    }
    return wait_for_long(v, c, deadline);
}
