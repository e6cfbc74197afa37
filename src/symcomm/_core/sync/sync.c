/* Waits: look for a while (sync/backoff.c says how), then sleep in the kernel until a peer rings.
 *
 * A sleeper publishes what it waits for. A rank that signals looks at the sleepers and wakes only those whose
 * condition now holds, so that 32 ranks on 2 cores are woken once each and not at every arrival.
 * No wake-up can be lost: sleeper (publish, fence, look again) against signaller (signal, fence, look for sleepers). */
#include "sync/sync.h"

#include <errno.h>
#include <stddef.h>

#include "exec/plan.h"
#include "memory/life.h"
#include "module/module.h"
#include "observe/flight.h"
#include "os/futex.h"
#include "sync/backoff.h"

#define WORTH_NOTING_NS 100000 /* of a wait, in the flight recorder */
#define SLICE_NS 10000000      /* how often a sleeper looks for dead peers: a tenth of the 100 ms we promise */

static bool rank_satisfies(const struct visit *v, int rank, const struct condition *c) {
    struct control *peer = block_of(v, rank);
    if (c->kind == WAIT_ARRIVED_ALL)
        return atomic_load_explicit(&peer->arrival[c->target & 1].seq, memory_order_acquire) == c->target;
    /* A peer is at this operation or the next, or has not signalled for long: also where numbers wrap after 2^40
     * operations. */
    return atomic_load_explicit(&peer->progress, memory_order_acquire) - c->target < (uint64_t)2 << PLAN_SIGNAL_BITS;
}

/* Whether c holds for the rank `sleeper`. */
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
            .kind = (enum wait_kind)atomic_load_explicit(&peer->wait_kind, memory_order_relaxed),
            .who = atomic_load_explicit(&peer->wait_who, memory_order_relaxed),
            .target = atomic_load_explicit(&peer->wait_target, memory_order_relaxed),
        };
        if (c.who < 0 || c.who >= g->world || !holds(v, r, &c)) continue;
        uint32_t asleep = ASLEEP;
        if (atomic_compare_exchange_strong(&peer->sleeping, &asleep, RUNG)) ring(peer);
    }
}

void sync_signal(const struct visit *v, uint64_t progress) {
    /* Whoever hears of it through us sees at least what we saw: also that it is void. */
    atomic_thread_fence(memory_order_acquire);
    atomic_store_explicit(&block_of(v, v->group->rank)->progress, progress, memory_order_release);
    sync_wake_peers(v);
}

int sync_aborted(const struct visit *v) {
    return (int)(atomic_load_explicit(&block_of(v, v->group->rank)->abort, memory_order_acquire) & 0xff);
}

static void wake(struct control *block) {
    atomic_store(&block->sleeping, AWAKE);
    ring(block);
    atomic_fetch_add(&block->p2p_doorbell, 1);
    futex_wake(&block->p2p_doorbell, INT32_MAX);
}

void sync_wake_own(const struct visit *v) { wake(block_of(v, v->group->rank)); }

/* Gives every rank a reason to stop, unless it has one, and marks operations from ~mark on as void (0: none). If I have
 * one already, the others get that: whoever gave it to me may not have come to them yet, and it is why I do what I do
 * now. */
static void abort_all(const struct visit *v, uint64_t cause, uint64_t mark) {
    struct group *g = v->group;
    for (int i = 0; i < g->world; i++) {
        struct control *peer = block_of(v, (g->rank + i) % g->world); /* mine first: it decides what I report */
        uint64_t none = 0, voided = atomic_load(&peer->voided);
        if (atomic_compare_exchange_strong(&peer->abort, &none, cause)) atomic_store(&peer->abort_seq, g->seq);
        else if (i == 0) cause = none; /* what was there */
        while (voided < mark && !atomic_compare_exchange_weak(&peer->voided, &voided, mark)) {}
        wake(peer);
    }
    atomic_thread_fence(memory_order_seq_cst); /* what the caller does with its tensors comes after */
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

/* Whether c holds, or the group was given up (status). Looks at c again after it saw that: whoever gave it up may have
 * passed this wait first, and then it was complete for everybody. */
static bool is_over(const struct visit *v, struct condition *c, int *status) {
    int me = v->group->rank;
    *status = STATUS_OK;
    if (holds(v, me, c)) return true;
    if ((*status = sync_aborted(v)) == STATUS_OK) return false;
    if (holds(v, me, c)) *status = STATUS_OK;
    return true;
}

/* Of a condition that was looked at: whom it waits for first. */
static int missing_rank(const struct condition *c) { return c->kind == WAIT_PROGRESS_ONE ? c->who : c->next; }

/* The first rank that is missing and gone, or -1. Looks at the condition again after it saw the rank gone:
 * it may have done its part before it left. */
static int find_gone(const struct visit *v, const struct condition *c, int *status) {
    int first = missing_rank(c);
    int end = c->kind == WAIT_PROGRESS_ONE ? c->who + 1 : v->group->world;
    for (int r = first; r < end; r++) {
        if (r == v->group->rank || rank_satisfies(v, r, c)) continue;
        *status = sync_gone(v, r);
        if (*status != STATUS_OK && !rank_satisfies(v, r, c)) return r;
    }
    return -1;
}

static void publish_condition(struct control *me, const struct condition *c) {
    atomic_store_explicit(&me->wait_kind, (uint32_t)c->kind, memory_order_relaxed);
    atomic_store_explicit(&me->wait_who, c->who, memory_order_relaxed);
    atomic_store_explicit(&me->wait_target, c->target, memory_order_relaxed);
    atomic_store_explicit(&me->sleeping, ASLEEP, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
}

THREAD_LOCAL int (*symcomm_interrupted)(void);

/* After a sleep: nonzero when the caller must stop because a signal handler raised. */
static int check_interrupt(const struct visit *v, bool signalled) {
    struct group *g = v->group;
    if (symcomm_interrupted == NULL || (!signalled && g->slices % 16 != 0) || !symcomm_interrupted()) return STATUS_OK;
    sync_fail(v, STATUS_ABORTED, g->rank);
    return STATUS_INTERRUPTED;
}

THREAD_LOCAL uint32_t (*symcomm_call_site)(void);

void symcomm_note_call_site(struct flight_entry *e) {
    uint32_t site = e && symcomm_call_site ? symcomm_call_site() : 0;
    if (site == 0) return;
    atomic_store_explicit(&e->exact_site, 1, memory_order_relaxed);
    atomic_store_explicit(&e->site, site, memory_order_release);
}

static int sleep_until(const struct visit *v, struct condition *c, const struct deadline *deadline) {
    struct group *g = v->group;
    struct control *me = block_of(v, g->rank);
    symcomm_note_call_site(g->recording);
    int status = STATUS_OK;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&me->doorbell, memory_order_acquire);
        publish_condition(me, c);
        if (is_over(v, c, &status) || (c->check && (status = c->check(c->context)))) break;
        int culprit = find_gone(v, c, &status);
        if (culprit >= 0) {
            status = sync_fail(v, status, culprit);
            break;
        }
        int64_t left = deadline->at ? deadline->at - symcomm_now_ns() : SLICE_NS;
        if (left <= 0 || has_given_up(g)) {
            status = sync_fail(v, STATUS_TIMEOUT, missing_rank(c));
            break;
        }
        g->slices++;
        bool signalled = futex_wait(&me->doorbell, seen, left < SLICE_NS ? left : SLICE_NS) < 0 && errno == EINTR;
        if ((status = check_interrupt(v, signalled))) break;
    }
    atomic_store_explicit(&me->sleeping, AWAKE, memory_order_relaxed);
    return status;
}

THREAD_LOCAL void (*symcomm_before_waiting)(void);

void symcomm_lock(pthread_mutex_t *lock) {
    if (pthread_mutex_trylock(lock) == 0) return;
    if (symcomm_before_waiting) symcomm_before_waiting();
    pthread_mutex_lock(lock);
}

static const void *awaited_word(const struct visit *v, int rank, const struct condition *c) {
    struct control *peer = block_of(v, rank);
    return c->kind == WAIT_ARRIVED_ALL ? &peer->arrival[c->target & 1].seq : &peer->progress;
}

/* Looks on, until there is no more point in it. `over`: it holds, or failed. */
static int poll(struct condition *c, struct backoff *b, bool *over) {
    const struct visit *v = b->visit;
    int status, missing;
    bool watched;
    do {
        missing = missing_rank(c);
        watched = backoff_watch(b, awaited_word(v, missing, c));
        if ((*over = is_over(v, c, &status))) return status;
        watched = watched && missing == missing_rank(c);
    } while (backoff_step(b, missing_rank(c), watched));
    return STATUS_OK;
}

static void note_wait(struct group *g, const struct backoff *b) {
    int64_t ns = symcomm_now_ns() - b->start;
    if (g->recording && ns >= WORTH_NOTING_NS)
        atomic_fetch_add_explicit(&g->recording->waited, (uint32_t)(ns / 1000), memory_order_relaxed);
}

/* Apart from the first spins, so that those stay short. */
static __attribute__((noinline)) int wait_for_long(const struct visit *v, struct condition *c,
                                                   struct deadline *deadline) {
    if (symcomm_before_waiting) symcomm_before_waiting();
    if (deadline->at == 0 && deadline->timeout) deadline->at = symcomm_now_ns() + deadline->timeout;
    struct backoff b;
    backoff_begin(&b, v, deadline->at);
    bool over = false;
    int status = poll(c, &b, &over);
    bool sleeps = status == STATUS_OK && !over;
    if (sleeps) status = sleep_until(v, c, deadline);
    backoff_end(&b, sleeps);
    note_wait(v->group, &b);
    return status;
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
