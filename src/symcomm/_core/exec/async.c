#include "exec/async.h"

#include <stdlib.h>
#include <string.h>

#include "module/module.h"
#include "os/futex.h"
#include "os/thread.h"
#include "sync/caller.h"
#include "sync/wait.h"

struct worker {
    struct group *group;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct request *first, *last; /* with the lock held, as the next three */
    uint64_t number;              /* of the last operation queued */
    uint64_t queued;              /* how many were, ever */
    bool stopping;
    _Atomic int pending; /* queued or running */
    _Atomic bool joined; /* nobody is the thread any more */
    /* Called by the thread itself at its end, once nobody else knows the group any more. Only it uses these two. */
    void (*on_exit)(void *);
    void *argument;
};

static struct request *take(struct worker *w) {
    pthread_mutex_lock(&w->lock);
    while (w->first == NULL && !w->stopping) pthread_cond_wait(&w->changed, &w->lock);
    struct request *r = w->first;
    if (r != NULL && (w->first = r->next) == NULL) w->last = NULL;
    pthread_mutex_unlock(&w->lock);
    return r;
}

/* Before anybody can know that it is done: whatever the caller does with the tensors from then on is not affected. */
static void raise_versions(const struct request *r) {
    for (int i = 0; i < r->n_versions; i++) atomic_fetch_add_explicit(r->versions[i], 1, memory_order_relaxed);
}

static int64_t run_request(struct group *g, struct request *r) {
    if (leave_is_done(g)) return STATUS_LEFT; /* and nobody may keep the tensors any more */
    if (r->plan == NULL) return exec_refuse(g, r->words, r->n_words, r->timeout, r->from);
    if (r->batch && r->batch->refused) return r->batch->refused;
    int64_t status = exec_run(g, r->plan, &r->buffers, r->timeout, r->from);
    if (r->batch && (status & 0xff) == STATUS_REFUSED) r->batch->refused = status;
    raise_versions(r);
    return status;
}

static void *work(void *argument) {
    struct worker *w = argument;
    struct group *g = w->group;
    struct request *r;
    struct caller caller = {.awaited = NULL};
    symcomm_caller = &caller;
    while ((r = take(w)) != NULL) {
        caller.awaited = &r->awaited;
        r->status = run_request(g, r);
        bool more = r->finished != NULL; /* which is part of it: blocking calls come after */
        if (!more) atomic_fetch_sub_explicit(&w->pending, 1, memory_order_release);
        atomic_store(&g->ended, r->place); /* the next one has time again */
        atomic_store_explicit(&r->done, 1, memory_order_release);
        futex_wake(&r->done, INT32_MAX);
        if (more) {
            r->finished(r);
            atomic_fetch_sub_explicit(&w->pending, 1, memory_order_release);
        }
        caller.awaited = NULL;
        async_release(r);
    }
    if (w->on_exit) {
        pthread_detach(w->thread);
        w->joined = true;
        w->on_exit(w->argument);
    }
    return NULL;
}

static void free_worker(struct worker *w) {
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    free(w);
}

/* With the interpreter lock held, so that there is one. Others may ask for it at any time, so it is complete when they
 * see it. */
static struct worker *start(struct group *g) {
    struct worker *w = calloc(1, sizeof *w);
    if (w == NULL) return NULL;
    w->group = g;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    if (thread_start(&w->thread, "symcomm-async", THREAD_STACK_PYTHON, work, w) == 0) return g->worker = w;
    free_worker(w);
    return NULL;
}

int async_submit(struct group *g, struct request *r) {
    struct worker *w = g->worker;
    if (w == NULL && (w = start(g)) == NULL) return -1;
    r->from.created = symcomm_ticks(), r->from.way |= FLIGHT_QUEUED;
    pthread_mutex_lock(&w->lock);
    bool late = w->stopping; /* another thread leaves the group at this moment: nobody would take it */
    if (!late) {
        atomic_fetch_add_explicit(&r->references, 1, memory_order_relaxed);
        bool idle = atomic_fetch_add_explicit(&w->pending, 1, memory_order_acquire) == 0;
        r->place = ++w->queued;
        r->number = w->number = idle ? g->seq + 1 : w->number + 1;
        if (w->last) w->last->next = r;
        else w->first = r;
        w->last = r;
        pthread_cond_signal(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
    if (!late) return 0;
    r->status = STATUS_LEFT;
    atomic_store_explicit(&r->done, 1, memory_order_release);
    if (r->finished) r->finished(r);
    return 0;
}

bool async_idle(struct group *g) {
    struct worker *w = atomic_load_explicit(&g->worker, memory_order_acquire);
    return w == NULL || atomic_load_explicit(&w->pending, memory_order_acquire) == 0;
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

struct request_wait {
    struct wait wait;
    struct request *request;
};

static bool is_over(struct wait *w) {
    return atomic_load_explicit(&((struct request_wait *)w)->request->done, memory_order_acquire);
}

static int give_up(struct wait *w, int status, int culprit) {
    (void)w, (void)culprit;
    return status;
}

static const struct wait_kind for_request = {.is_over = is_over, .give_up = give_up};

/* The worker ends the request whatever happens, so nobody looks for dead peers here. */
static int sleep_until_done(struct request *r, int64_t deadline) {
    struct request_wait w = {
        .wait = {.kind = &for_request, .bell = &r->done, .deadline = deadline},
        .request = r,
    };
    return wait_loop(&w.wait);
}

/* The buffers are the caller's again when this returns, whatever signals come. */
static void await_end(struct request *r) {
    struct caller *c = symcomm_caller, nobody = {.outer = c};
    symcomm_caller = &nobody;
    sleep_until_done(r, 0);
    symcomm_caller = c;
}

/* Ctrl-C: the operations before this one, and this one, end on every rank. */
static void abort_queue(struct group *g) {
    struct visit v;
    if (visit_begin(&v, g)) sync_fail(&v, STATUS_ABORTED, g->rank); /* else another thread leaves, which ends them */
    visit_end(&v);
}

bool async_wait(struct request *r, int64_t timeout) {
    /* Our core is free meanwhile, the worker may keep one. */
    atomic_fetch_add_explicit(&r->awaited, 1, memory_order_relaxed);
    int status = sleep_until_done(r, timeout ? symcomm_now_ns() + timeout : 0);
    if (status == STATUS_INTERRUPTED) {
        abort_queue(r->group);
        await_end(r);
    }
    atomic_fetch_sub_explicit(&r->awaited, 1, memory_order_relaxed);
    return status == STATUS_OK;
}

void async_give_up(struct request *r) {
    struct group *g = r->group;
    struct visit v;
    uint64_t seen = atomic_load(&g->given_up);
    while (seen < r->place && !atomic_compare_exchange_weak(&g->given_up, &seen, r->place)) {}
    visit_begin(&v, g);
    sync_wake_own(&v);
    visit_end(&v);
    await_end(r);
}

void async_release(struct request *r) {
    if (atomic_fetch_sub_explicit(&r->references, 1, memory_order_acq_rel) > 1) return;
    free((void *)r->buffers.in);
    free((void *)r->buffers.out);
    free(r->words);
    async_leave_batch(r->batch);
    free(r->versions);
    free(r);
}

void async_join_batch(struct request *r, struct batch *b) {
    atomic_fetch_add_explicit(&b->references, 1, memory_order_relaxed);
    r->batch = b;
}

void async_leave_batch(struct batch *b) {
    if (b && atomic_fetch_sub_explicit(&b->references, 1, memory_order_acq_rel) == 1) free(b);
}

/* Once a thread was joined, another may go by its name. */
bool async_inside(struct group *g) {
    struct worker *w = g->worker;
    return w != NULL && !w->joined && pthread_equal(w->thread, pthread_self());
}

void async_stop(struct group *g) {
    struct worker *w = g->worker;
    if (w == NULL || w->joined) return;
    pthread_mutex_lock(&w->lock);
    w->stopping = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (async_inside(g)) return;
    pthread_join(w->thread, NULL);
    w->joined = true;
}

void async_free(struct group *g) {
    struct worker *w = g->worker;
    if (w) free_worker(w);
    g->worker = NULL;
}

void async_at_end(struct group *g, void (*on_exit)(void *), void *argument) {
    struct worker *w = g->worker;
    w->argument = argument, w->on_exit = on_exit;
    async_stop(g);
}

static char **copy_addresses(char *const *addresses, int n) {
    char **copy = malloc(sizeof(char *) * (size_t)(n + 1));
    if (copy && n) memcpy(copy, addresses, sizeof(char *) * (size_t)n);
    return copy;
}

struct request *async_request(struct group *g, const struct plan *p, const struct buffers *b, int64_t timeout,
                              struct origin from) {
    struct request *r = calloc(1, sizeof *r);
    if (r == NULL) return NULL;
    struct buffers own = {copy_addresses(b->in, b->n_in), copy_addresses(b->out, b->n_out), b->n_in, b->n_out};
    *r = (struct request){.group = g, .plan = p, .buffers = own, .timeout = timeout, .from = from, .references = 1};
    if (own.in && own.out) return r;
    async_release(r);
    return NULL;
}

struct request *async_refusal(struct group *g, const char *words, size_t n, int64_t timeout, struct origin from) {
    struct buffers none = {NULL, NULL, 0, 0};
    struct request *r = async_request(g, NULL, &none, timeout, from);
    if (r == NULL || (r->words = malloc(n ? n : 1)) == NULL) {
        if (r) async_release(r);
        return NULL;
    }
    memcpy(r->words, words, n);
    r->n_words = n;
    return r;
}

int64_t async_run_queued(struct group *g, const struct plan *p, const struct buffers *b, int64_t timeout,
                         struct origin from) {
    struct request *r = async_request(g, p, b, timeout, from);
    if (r == NULL) return STATUS_PLAN;
    int64_t status = STATUS_PLAN;
    if (async_submit(g, r) == 0) {
        status = async_wait(r, 0) ? r->status : STATUS_INTERRUPTED;
    }
    async_release(r);
    return status;
}
