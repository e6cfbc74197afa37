/* Asynchronous operations of a group stand in a queue, and are run one at a time, in order, by whoever has the turn: a
 * caller who waits for one runs all up to it in its own thread, as a blocking call would; the group's thread runs what
 * nobody has come for. A call that is usually waited for at once does not even wake that thread, which would take
 * longer than most operations: it looks by itself once the call is LINGER_NS old. */
#include "exec/async.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "module/module.h"
#include "os/futex.h"
#include "os/thread.h"
#include "sync/caller.h"
#include "sync/wait.h"

#define LINGER_NS 100000 /* whoever waits within that time waits soon: the thread, once woken, takes half of it */
#define NAP_NS 2000000   /* of the thread; 16 that woke each 0.1 ms made all_to_alls of 16 ranks take 50 us, not 17 */
#define OFFER_NS 100000  /* how long a waiter offers its core to whoever runs its operation, before it sleeps */
#define PATIENCE 4       /* calls in a row that must be waited for soon before the next one is left to its caller */

struct worker {
    struct group *group;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct request *first, *last; /* with the lock held, as all up to `stopping` */
    const void *runner;           /* names the thread that has the turn; NULL: nobody */
    uint64_t number;              /* of the last operation queued, as g->seq counts */
    uint64_t queued;              /* how many were, ever */
    uint64_t wanted;              /* somebody waits for the one in this place, without running it */
    uint64_t seen;                /* what `queued` was when the thread last found nothing to do */
    int64_t wakes_at;             /* when it looks by itself; NEVER: when it is signalled; 0: it is awake */
    bool stopping;
    _Atomic int pending; /* queued or running */
    _Atomic bool joined; /* nobody is the thread any more */
    /* Called by the thread itself at its end, once nobody else knows the group any more. Only it uses these two. */
    void (*on_exit)(void *);
    void *argument;
};

#define NEVER INT64_MAX

static THREAD_LOCAL char this_thread; /* its address names the thread */

/* --- turns: with the worker's lock held ----------------------------------------------------------------------------
 */

static struct request *begin_turn(struct worker *w) {
    struct request *r = w->first;
    if ((w->first = r->next) == NULL) w->last = NULL;
    w->runner = &this_thread;
    return r;
}

/* When the thread is to run the first in the queue; 0: now. */
static int64_t due(const struct worker *w) { return w->stopping || w->first->place <= w->wanted ? 0 : w->first->due; }

/* Has the thread look in time for the first in the queue. A nap that ends a little later will do. */
static void call_thread(struct worker *w) {
    if (w->first == NULL || w->runner || w->wakes_at == 0) return;
    int64_t at = due(w);
    if (at == 0 || w->wakes_at > at + NAP_NS) pthread_cond_signal(&w->changed);
}

static void end_turn(struct worker *w) {
    w->runner = NULL;
    if (w->stopping) pthread_cond_signal(&w->changed);
    else call_thread(w);
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* Before anybody can know that it is done: whatever the caller does with the tensors from then on is not affected. */
static void raise_versions(const struct request *r) {
    for (int i = 0; i < r->n_versions; i++) atomic_fetch_add_explicit(r->versions[i], 1, memory_order_relaxed);
}

static int64_t run_request(struct group *g, struct request *r) {
    if (leave_is_done(g)) return STATUS_LEFT; /* and nobody may keep the tensors any more */
    if (r->after) {
        int64_t status = r->after->status;
        if (status || (status = r->prepare(r)) != 0) return status;
    }
    if (r->plan == NULL) return exec_refuse(g, r->words, r->n_words, r->timeout, r->from);
    if (r->batch && r->batch->refused) return r->batch->refused;
    int64_t status = exec_run(g, r->plan, &r->buffers, r->timeout, r->from);
    if (r->batch && (status & 0xff) == STATUS_REFUSED) r->batch->refused = status;
    raise_versions(r);
    return status;
}

/* How soon a call was waited for says how soon the next one of its kind will be. */
static void note_wait(const struct request *r, bool soon) {
    if (r->kind == NULL) return;
    int before = atomic_load_explicit(&r->kind->impatience, memory_order_relaxed);
    int now = soon ? before - (before > 0) : PATIENCE;
    if (now != before) atomic_store_explicit(&r->kind->impatience, now, memory_order_relaxed);
}

static void say_done(struct request *r) {
    atomic_store(&r->done, 1);
    if (atomic_load(&r->sleepers)) futex_wake(&r->done, INT32_MAX);
}

/* By whoever has the turn. */
static void perform(struct worker *w, struct request *r) {
    struct group *g = w->group;
    r->status = run_request(g, r);
    r->ended = symcomm_now_ns();
    bool more = r->finished != NULL; /* which is part of it: blocking calls come after */
    if (!more) atomic_fetch_sub_explicit(&w->pending, 1, memory_order_release);
    atomic_store(&g->ended, r->place); /* the next one has time again */
    say_done(r);
    if (more) {
        r->finished(r);
        atomic_fetch_sub_explicit(&w->pending, 1, memory_order_release);
    }
    async_release(r);
}

/* --- the group's thread --------------------------------------------------------------------------------------------
 */

/* Until it is signalled, or for so long. With the lock held. */
static void sleep_until(struct worker *w, int64_t at) {
    w->wakes_at = at;
    thread_wait_until(&w->changed, &w->lock, at);
    w->wakes_at = 0;
}

/* While calls keep coming the thread takes naps, so that callers who leave nothing to it need not wake it. */
static int64_t end_of_nap(struct worker *w, int64_t now) {
    bool quiet = w->queued == w->seen;
    w->seen = w->queued;
    return quiet ? NEVER : now + NAP_NS;
}

/* What it has to run next, and the turn; NULL: it is to end. */
static struct request *await_turn(struct worker *w) {
    struct request *r = NULL;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        int64_t now = symcomm_now_ns();
        if (w->first == NULL && w->stopping) break;
        if (w->runner || w->first == NULL) sleep_until(w, end_of_nap(w, now));
        else if (due(w) > now) sleep_until(w, due(w));
        else {
            r = begin_turn(w);
            break;
        }
    }
    pthread_mutex_unlock(&w->lock);
    return r;
}

static void *work(void *argument) {
    struct worker *w = argument;
    struct request *r;
    struct caller caller = {.awaited = NULL};
    symcomm_caller = &caller;
    while ((r = await_turn(w)) != NULL) {
        caller.awaited = &r->awaited;
        if (r->due && r->due <= symcomm_now_ns()) note_wait(r, false);
        perform(w, r);
        caller.awaited = NULL;
        pthread_mutex_lock(&w->lock);
        end_turn(w);
        pthread_mutex_unlock(&w->lock);
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
    thread_prepare_timed(&w->changed);
    if (thread_start(&w->thread, "symcomm-async", THREAD_STACK_PYTHON, work, w) == 0) return g->worker = w;
    free_worker(w);
    return NULL;
}

/* A kind of call that is waited for soon is left to its caller for a while. */
static int64_t choose_due(const struct request *r) {
    bool soon = r->kind && atomic_load_explicit(&r->kind->impatience, memory_order_relaxed) == 0;
    return soon ? r->submitted + LINGER_NS : 0;
}

int async_submit(struct group *g, struct request *r) {
    struct worker *w = g->worker;
    if (w == NULL && (w = start(g)) == NULL) return -1;
    r->from.created = symcomm_ticks(), r->from.way |= FLIGHT_QUEUED;
    r->submitted = symcomm_now_ns(), r->due = choose_due(r);
    pthread_mutex_lock(&w->lock);
    bool late = w->stopping; /* another thread leaves the group at this moment: nobody would take it */
    if (!late) {
        atomic_fetch_add_explicit(&r->references, 1, memory_order_relaxed);
        bool idle = atomic_fetch_add_explicit(&w->pending, 1, memory_order_acquire) == 0;
        r->place = ++w->queued;
        w->number = idle ? g->seq + 1 : w->number + 1;
        r->number = number_of(g, w->number);
        if (w->last) w->last->next = r;
        else w->first = r;
        w->last = r;
        call_thread(w);
    }
    pthread_mutex_unlock(&w->lock);
    if (!late) return 0;
    r->status = STATUS_LEFT;
    say_done(r);
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

/* Whoever has its turn ends the request whatever happens, so nobody looks for dead peers here. */
static int sleep_until_done(struct request *r, int64_t deadline) {
    struct request_wait w = {
        .wait = {.kind = &for_request,
                 .bell = &r->done,
                 .sleepers = &r->sleepers,
                 .missing = -1,
                 .deadline = deadline,
                 .tells_of = r->group},
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

/* Somebody waits for r and does not run it: the thread is to, without delay. */
static void want(struct request *r) {
    struct worker *w = r->group->worker;
    pthread_mutex_lock(&w->lock);
    if (w->wanted < r->place) w->wanted = r->place;
    call_thread(w);
    pthread_mutex_unlock(&w->lock);
}

/* Until it is done, or whoever runs it seems to need long. */
static bool offer_core(struct request *r) {
    for (int64_t end = symcomm_now_ns() + OFFER_NS; symcomm_now_ns() < end; sched_yield())
        if (atomic_load_explicit(&r->done, memory_order_acquire)) return true;
    return false;
}

/* Waits, while somebody else runs it. */
static int await_other(struct request *r, int64_t deadline) {
    /* Our core is free meanwhile, who runs it may keep one. */
    atomic_fetch_add_explicit(&r->awaited, 1, memory_order_relaxed);
    caller_before_waiting();
    want(r);
    int status = offer_core(r) ? STATUS_OK : sleep_until_done(r, deadline);
    if (status == STATUS_INTERRUPTED) {
        abort_queue(r->group);
        await_end(r);
    }
    atomic_fetch_sub_explicit(&r->awaited, 1, memory_order_relaxed);
    return status;
}

/* The first in the queue, and the turn; NULL: r is done, or another thread has the turn, or is to run that. With the
 * worker's lock held. */
static struct request *take_turn(struct worker *w, const struct request *r) {
    bool done = atomic_load_explicit(&r->done, memory_order_acquire);
    return !done && !w->runner && w->first && !w->first->finished ? begin_turn(w) : NULL;
}

/* Runs what is queued up to r, as its caller's own: where that was called is known. With the lock held, which it gives
 * up meanwhile. */
static void run_queue(struct worker *w, const struct request *r) {
    struct caller *c = symcomm_caller;
    bool knew_site = c && c->knows_site;
    if (c) c->knows_site = true;
    for (struct request *one; (one = take_turn(w, r)) != NULL; end_turn(w)) {
        pthread_mutex_unlock(&w->lock);
        atomic_fetch_add_explicit(&w->group->collectives.by_waiter[(one->from.way & FLIGHT_SLOW_PATH) != 0], 1,
                                  memory_order_relaxed);
        one->from.way &= (uint8_t)~FLIGHT_QUEUED;
        perform(w, one);
        pthread_mutex_lock(&w->lock);
    }
    if (c) c->knows_site = knew_site;
}

bool async_is_next(const struct request *r) {
    const struct worker *w = r->group->worker;
    return r->place && r->plan && r->after == NULL && atomic_load_explicit(&w->pending, memory_order_relaxed) == 1;
}

int async_wait(struct request *r, int64_t timeout, bool runs) {
    if (r->place == 0 || atomic_load_explicit(&r->done, memory_order_acquire)) return STATUS_OK;
    struct worker *w = r->group->worker;
    int64_t now = symcomm_now_ns();
    pthread_mutex_lock(&w->lock);
    bool own = w->runner == &this_thread;
    if (runs && !own) note_wait(r, now - r->submitted < LINGER_NS);
    if (runs && !own && timeout == 0) run_queue(w, r);
    pthread_mutex_unlock(&w->lock);
    if (own) return STATUS_NESTED;
    if (atomic_load_explicit(&r->done, memory_order_acquire)) return STATUS_OK;
    return await_other(r, timeout ? now + timeout : 0);
}

void async_give_up(struct request *r) {
    struct group *g = r->group;
    struct visit v;
    uint64_t seen = atomic_load(&g->given_up);
    while (seen < r->place && !atomic_compare_exchange_weak(&g->given_up, &seen, r->place)) {}
    visit_begin(&v, g);
    sync_wake_own(&v);
    visit_end(&v);
    want(r);
    await_end(r);
}

static void drop_buffers(struct request *r) {
    if (r->buffers.in != r->few) free((void *)r->buffers.in);
}

void async_release(struct request *r) {
    if (atomic_fetch_sub_explicit(&r->references, 1, memory_order_acq_rel) > 1) return;
    drop_buffers(r);
    free(r->words);
    if (r->after) async_release(r->after);
    async_leave_batch(r->batch);
    if (r->versions != &r->one_version) free(r->versions);
    free(r);
}

void async_follow(struct request *r, struct request *first, int64_t (*prepare)(struct request *), void *preparation) {
    atomic_fetch_add_explicit(&first->references, 1, memory_order_relaxed);
    r->after = first, r->prepare = prepare, r->preparation = preparation;
    r->kind = first->kind;
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
    bool own = w->runner == &this_thread;
    w->stopping = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (async_inside(g) || own) return; /* the last who knows the group calls again */
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

struct request *async_request(struct group *g, struct plan *p, const struct buffers *b, int64_t timeout,
                              struct origin from) {
    struct request *r = malloc(sizeof *r);
    if (r == NULL) return NULL;
    *r = (struct request){.group = g, .kind = p, .timeout = timeout, .from = from, .references = 1};
    if (async_use(r, p, b)) return r;
    async_release(r);
    return NULL;
}

bool async_use(struct request *r, struct plan *p, const struct buffers *b) {
    size_t n_in = (size_t)b->n_in, n_out = (size_t)b->n_out;
    char **copy = n_in + n_out <= FEW_BUFFERS ? r->few : malloc((n_in + n_out) * sizeof *copy);
    if (copy == NULL) return false;
    if (n_in) memcpy(copy, b->in, n_in * sizeof *copy);
    if (n_out) memcpy(copy + n_in, b->out, n_out * sizeof *copy);
    drop_buffers(r);
    r->plan = p;
    r->buffers = (struct buffers){copy, copy + n_in, b->n_in, b->n_out};
    return true;
}

bool async_refuse_with(struct request *r, const char *words, size_t n) {
    if ((r->words = malloc(n ? n : 1)) == NULL) return false;
    memcpy(r->words, words, n);
    r->n_words = n;
    return true;
}

struct request *async_refusal(struct group *g, const char *words, size_t n, int64_t timeout, struct origin from) {
    struct buffers none = {NULL, NULL, 0, 0};
    struct request *r = async_request(g, NULL, &none, timeout, from);
    if (r == NULL || async_refuse_with(r, words, n)) return r;
    async_release(r);
    return NULL;
}

int64_t async_run_queued(struct group *g, struct plan *p, const struct buffers *b, int64_t timeout,
                         struct origin from) {
    struct request *r = async_request(g, p, b, timeout, from);
    if (r == NULL) return STATUS_PLAN;
    int64_t status = STATUS_PLAN;
    if (async_submit(g, r) == 0) {
        status = async_wait(r, 0, true);
        if (status == STATUS_OK) status = r->status;
    }
    async_release(r);
    return status;
}
