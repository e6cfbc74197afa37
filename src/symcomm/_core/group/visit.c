/* Visits, and leaving a group while other threads may be in the middle of its calls.
 *
 * Leaving is the request (leave_begin, leave_end). Departing is the moment from which this rank no longer touches
 * shared memory: once all ranks have departed, each gives its memory back. So a rank departs only after calls that
 * began before have ended. Later calls see a private block instead, which refuses every operation and is seen by no
 * peer. */
#include "group/visit.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "group/group.h"
#include "memory/isolate.h"
#include "memory/life.h"
#include "sync/caller.h"
#include "sync/fail.h"
#include "sync/wait.h"

struct blocks {
    int rank, world;
    struct control **shared;      /* per rank. constant, except in a forked child */
    struct control **refusing;    /* per rank: the private one */
    struct control *private_one;  /* what calls see once the group is left */
    char **stages;                /* per rank */
    pthread_mutex_t lock;         /* one operation at a time */
    _Atomic(const void *) holder; /* names the thread that holds it */
    _Atomic int visitors;         /* calls that use the memory without the lock */
    _Atomic bool has_leaver;      /* leave_begin() was called */
    _Atomic bool leaving;         /* no call begins any more */
    _Atomic bool departs_late;    /* the leaver was in the middle of a call; the rank departs when that ends */
    _Atomic bool left;            /* departed: shared memory is not touched any more */
    bool done_by_all;             /* all ranks are known to have departed; used with the interpreter lock held */
};

/* --- blocks ------------------------------------------------------------------------------------------------------- */

void blocks_free(struct blocks *b) {
    if (b == NULL) return;
    free(b->shared);
    free(b->refusing);
    free(b->stages);
    free(b->private_one);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

static uint64_t own_departure(int rank) { return STATUS_LEFT | (uint64_t)rank << 8 | (uint64_t)rank << 24; }

struct blocks *blocks_make(int rank, int world, char *const *controls, char *const *stages) {
    struct blocks *b = calloc(1, sizeof *b);
    if (b == NULL) return NULL;
    size_t n = (size_t)world;
    b->rank = rank, b->world = world;
    pthread_mutex_init(&b->lock, NULL);
    b->shared = calloc(n, sizeof *b->shared), b->refusing = calloc(n, sizeof *b->refusing);
    b->stages = calloc(n, sizeof *b->stages);
    b->private_one = aligned_alloc(64, (sizeof *b->private_one + 63) / 64 * 64);
    if (!b->shared || !b->refusing || !b->stages || !b->private_one) {
        blocks_free(b);
        return NULL;
    }
    memset(b->private_one, 0, sizeof *b->private_one); /* it says nothing that would end a wait */
    atomic_store(&b->private_one->state, CONTROL_LEFT);
    atomic_store(&b->private_one->abort, own_departure(rank));
    for (int r = 0; r < world; r++) {
        b->shared[r] = (struct control *)(void *)controls[r];
        b->refusing[r] = b->private_one;
        b->stages[r] = stages[r];
    }
    return b;
}

/* --- departing ---------------------------------------------------------------------------------------------------- */

/* Makes the private block say why operations are refused. */
static void copy_cause(struct blocks *b) {
    const struct control *me = b->shared[b->rank];
    atomic_store(&b->private_one->abort, atomic_load(&me->abort));
    atomic_store(&b->private_one->abort_seq, atomic_load(&me->abort_seq));
}

/* With the lock held, no visitors, and the leaver's visit over. */
static void depart(struct blocks *b) {
    if (atomic_load(&b->left)) return;
    copy_cause(b);
    for (int r = 0; r < b->world; r++) atomic_store(&b->shared[r]->departed[b->rank], 1);
    atomic_store(&b->left, true);
}

/* Called at the end of a call, with no lock held: departs if leave_end() left that to the last call. */
static void depart_late(struct blocks *b) {
    /* Two calls that end at once may each find the other; the one that had the lock looks again. */
    while (atomic_load(&b->departs_late) && !atomic_load(&b->left) && atomic_load(&b->visitors) == 0) {
        if (pthread_mutex_trylock(&b->lock) != 0) return; /* an operation runs: its end comes here */
        if (atomic_load(&b->visitors) == 0) depart(b);
        pthread_mutex_unlock(&b->lock);
    }
}

static void depart_if_late(struct blocks *b) {
    if (atomic_load_explicit(&b->departs_late, memory_order_relaxed)) depart_late(b);
}

/* --- visits ------------------------------------------------------------------------------------------------------- */

static THREAD_LOCAL struct visit *visits; /* this thread's counted visits, the innermost first */
static THREAD_LOCAL char this_thread;     /* its address names the thread */

/* The one place that makes visits. Field by field: a copy of the whole would wait for the stores of its parts. */
static inline void make_visit(struct visit *v, struct group *g, bool refused) {
    struct blocks *b = g->blocks;
    v->group = g;
    v->blocks = refused ? b->refusing : b->shared;
    v->stages = b->stages;
    v->outer = NULL;
    v->is_counted = false;
}

bool visit_begin(struct visit *v, struct group *g) {
    struct blocks *b = g->blocks;
    atomic_fetch_add(&b->visitors, 1);
    bool refused = atomic_load(&b->leaving);
    make_visit(v, g, refused);
    if (refused) {
        atomic_fetch_sub(&b->visitors, 1);
        return false;
    }
    v->outer = visits, v->is_counted = true;
    visits = v;
    return true;
}

void visit_end(struct visit *v) {
    if (!v->is_counted) return;
    struct blocks *b = v->group->blocks;
    visits = v->outer;
    atomic_fetch_sub(&b->visitors, 1);
    depart_if_late(b);
}

static bool is_inside(const struct blocks *b) {
    return atomic_load_explicit(&b->holder, memory_order_relaxed) == &this_thread;
}

bool visit_lock(struct visit *v, struct group *g) {
    struct blocks *b = g->blocks;
    if (is_inside(b)) return false;
    caller_lock(&b->lock);
    atomic_store_explicit(&b->holder, &this_thread, memory_order_relaxed);
    make_visit(v, g, atomic_load_explicit(&b->left, memory_order_relaxed));
    return true;
}

void visit_unlock(struct visit *v) {
    struct blocks *b = v->group->blocks;
    atomic_store_explicit(&b->holder, NULL, memory_order_relaxed);
    pthread_mutex_unlock(&b->lock);
    depart_if_late(b);
}

static bool try_lock(void *lock) { return pthread_mutex_trylock(lock) == 0; }

void visit_await_operation(const struct visit *v) {
    struct blocks *b = v->group->blocks;
    if (is_inside(b)) return;
    if (wait_briefly(try_lock, &b->lock, LONG_ENOUGH_NS)) pthread_mutex_unlock(&b->lock);
}

bool visit_is_locked(const struct group *g) { return atomic_load(&g->blocks->holder) != NULL; }

/* --- leaving ------------------------------------------------------------------------------------------------------ */

bool leave_begin(struct visit *v, struct group *g) {
    struct blocks *b = g->blocks;
    if (atomic_exchange(&b->has_leaver, true)) return false;
    make_visit(v, g, false);
    struct control *me = b->shared[b->rank];
    uint64_t none = 0;
    atomic_store(&me->state, CONTROL_LEFT);
    atomic_compare_exchange_strong(&me->abort, &none, own_departure(b->rank)); /* ends this rank's operations only */
    copy_cause(b);                                                             /* before any call is refused */
    atomic_store(&b->leaving, true);
    return true;
}

void leave_end(struct visit *v) {
    struct blocks *b = v->group->blocks;
    sync_wake_own(v);
    int own = 0;
    for (struct visit *one = visits; one; one = one->outer) own += one->group == v->group;
    while (atomic_load(&b->visitors) > own) usleep(50); /* they notice that they are aborted */
    if (own == 0 && !is_inside(b)) {
        caller_lock(&b->lock); /* once the running operation has ended; new ones are refused */
        depart(b);
        pthread_mutex_unlock(&b->lock);
        return;
    }
    atomic_store(&b->departs_late, true);
    depart_late(b);
}

bool leave_is_done(const struct group *g) { return atomic_load(&g->blocks->left); }

bool leave_is_done_by_all(struct group *g) {
    struct blocks *b = g->blocks;
    depart_late(b); /* two calls that ended at once may have left that to each other */
    if (!atomic_load(&b->left)) return false;
    for (int r = 0; r < b->world && !b->done_by_all; r++) {
        _Atomic uint8_t *departed = &b->shared[b->rank]->departed[r]; /* its own block stays until this is true */
        if (!life_has_ended(g->life[r]) && !atomic_load_explicit(departed, memory_order_acquire)) return false;
    }
    b->done_by_all = true;
    return true;
}

void leave_as_child(struct group *g) {
    struct blocks *b = g->blocks;
    atomic_store(&b->private_one->abort, own_departure(b->rank));
    for (int r = 0; r < b->world; r++) b->shared[r] = b->private_one;
    pthread_mutex_init(&b->lock, NULL);
    atomic_store(&b->holder, NULL);
    atomic_store(&b->visitors, 0);
    atomic_store(&b->has_leaver, true);
    atomic_store(&b->leaving, true);
    atomic_store(&b->left, true);
    b->done_by_all = true;
}
