#include "sync/fail.h"

#include "memory/life.h"
#include "os/futex.h"

int sync_aborted(const struct visit *v) {
    return (int)(atomic_load_explicit(&block_of(v, v->group->rank)->abort, memory_order_acquire) & 0xff);
}

static void wake(struct control *block) {
    atomic_store(&block->sleeping, AWAKE);
    atomic_fetch_add_explicit(&block->doorbell, 1, memory_order_release);
    futex_wake(&block->doorbell, 1);
    atomic_fetch_add(&block->p2p_doorbell, 1);
    futex_wake(&block->p2p_doorbell, INT32_MAX);
}

void sync_wake_own(const struct visit *v) { wake(block_of(v, v->group->rank)); }

/* Gives every rank a reason to stop, unless it has one, and marks operations from ~mark on as void (0: none). If this
 * rank has a reason already, the others get that one: it is why this rank stops, and the rank that gave it may not have
 * reached the others yet. */
static void abort_all(const struct visit *v, uint64_t cause, uint64_t mark) {
    struct group *g = v->group;
    for (int i = 0; i < g->world; i++) { /* this rank first, which decides what it reports */
        struct control *peer = block_of(v, (g->rank + i) % g->world);
        uint64_t none = 0, voided = atomic_load(&peer->voided);
        if (atomic_compare_exchange_strong(&peer->abort, &none, cause)) atomic_store(&peer->abort_seq, g->seq);
        else if (i == 0) cause = none; /* the reason that it had */
        while (voided < mark && !atomic_compare_exchange_weak(&peer->voided, &voided, mark)) {}
        wake(peer);
    }
    atomic_thread_fence(memory_order_seq_cst); /* before the caller touches its tensors */
}

int sync_fail_of(const struct visit *v, int status, int culprit, int origin) {
    abort_all(v, (uint64_t)status | (uint64_t)(culprit & 0xffff) << 8 | (uint64_t)(origin & 0xffff) << 24, 0);
    return sync_aborted(v);
}

int sync_fail(const struct visit *v, int status, int culprit) {
    return sync_fail_of(v, status, culprit, v->group->rank);
}

void sync_void(const struct visit *v) {
    struct group *g = v->group;
    if (!sync_aborted(v)) sync_fail(v, STATUS_ABORTED, g->rank); /* a void operation has a cause */
    abort_all(v, atomic_load(&block_of(v, g->rank)->abort), ~g->seq);
}

bool sync_is_void(const struct visit *v, uint64_t seq) {
    atomic_thread_fence(memory_order_acquire); /* after the last read of a peer's tensor */
    return atomic_load_explicit(&block_of(v, v->group->rank)->voided, memory_order_acquire) >= ~seq;
}

int sync_marked_gone(const struct visit *v, int rank) {
    if (life_has_ended(v->group->life[rank])) return STATUS_DEAD;
    if (atomic_load_explicit(&block_of(v, rank)->state, memory_order_acquire) == CONTROL_LEFT) return STATUS_LEFT;
    return STATUS_OK;
}

int sync_gone(const struct visit *v, int rank) {
    int status = sync_marked_gone(v, rank);
    return status == STATUS_OK && life_dumps_core(v->group->life[rank]) ? STATUS_DEAD : status;
}
