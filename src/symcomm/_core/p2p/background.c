/* The thread that drives messages which nobody waits for. A rank whose messages are usually waited for at once does not
 * even wake it: that would take longer than most messages. It looks by itself once a message is LINGER_NS old, and
 * takes naps while messages keep coming, as the thread of asynchronous collectives does (exec/async.c). */
#include "module/module.h"
#include "os/futex.h"
#include "os/thread.h"
#include "p2p/engine.h"
#include "sync/wait.h"

#define LINGER_NS 100000
#define NAP_NS 2000000
#define PATIENCE 4 /* messages in a row that must be waited for soon before the next one is left to its caller */

/* --- when it is needed: with the lock held ---------------------------------------------------------------------- */

static int64_t earlier(int64_t due, const struct op *list) {
    for (; list; list = list->next) {
        int64_t its = atomic_load_explicit(&list->due, memory_order_relaxed);
        if (its < due) due = its;
    }
    return due;
}

/* When there is something to move that nobody waits for; 0: the rest of a message that is discarded or set aside. */
static int64_t due(const struct p2p *m) {
    int64_t at = NEVER_DUE;
    bool any = m->background > 0;
    for (int r = 0; r < m->group->world; r++) {
        const struct incoming *i = &m->in[r];
        if (i->reading && i->into == NULL) return 0;
        if (i->reading && i->into) at = atomic_load(&i->into->due) < at ? atomic_load(&i->into->due) : at;
        if (any) at = earlier(earlier(at, m->out[r].first), m->out[r].unacknowledged);
    }
    return any ? earlier(at, m->receives) : at;
}

static void note_wait(struct p2p *m, bool soon) {
    int before = atomic_load_explicit(&m->impatience, memory_order_relaxed);
    int now = soon ? before - (before > 0) : PATIENCE;
    if (now != before) atomic_store_explicit(&m->impatience, now, memory_order_relaxed);
}

void p2p_leave_to_background(struct p2p *m, struct op *op) {
    int64_t now = symcomm_now_ns();
    bool soon = atomic_load_explicit(&m->impatience, memory_order_relaxed) == 0;
    int64_t at = soon ? now + LINGER_NS : now;
    atomic_store_explicit(&op->posted, now, memory_order_relaxed);
    atomic_store_explicit(&op->due, at, memory_order_relaxed);
    if (m->wakes_at > (soon ? at + NAP_NS : 0)) pthread_cond_signal(&m->needed);
}

void p2p_take_from_background(struct op *op) {
    int64_t posted = atomic_load_explicit(&op->posted, memory_order_relaxed);
    if (!op->background || posted == 0) return;
    note_wait(op->p2p, symcomm_now_ns() - posted < LINGER_NS);
    atomic_store_explicit(&op->posted, 0, memory_order_relaxed);
    atomic_store_explicit(&op->due, NEVER_DUE, memory_order_relaxed);
}

/* --- the thread ------------------------------------------------------------------------------------------------- */

/* Until it is signalled, or for so long. With the lock held. */
static void sleep_until(struct p2p *m, int64_t at) {
    m->wakes_at = at;
    thread_wait_until(&m->needed, &m->lock, at);
    m->wakes_at = 0;
}

static void sleep_until_needed(struct p2p *m) {
    pthread_mutex_lock(&m->lock);
    for (int64_t at, now; !m->closing && (at = due(m)) > (now = symcomm_now_ns());) {
        bool quiet = m->queued == m->seen;
        m->seen = m->queued;
        if (at == NEVER_DUE && !quiet) at = now + NAP_NS;
        sleep_until(m, at);
    }
    if (!m->closing) note_wait(m, false);
    pthread_mutex_unlock(&m->lock);
}

/* Moves what can be moved, then sleeps for a slice or until a bell rings. `last`: when there last was something to
 * drive. True: that was long ago, and it did not sleep. */
static bool drive_in_background(const struct visit *v, struct p2p *m, int64_t *last) {
    struct control *me = block_of(v, v->group->rank);
    uint32_t seen = atomic_load_explicit(&me->p2p_doorbell, memory_order_acquire);
    atomic_fetch_add(&me->p2p_sleepers, 1);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&m->lock);
    while (!m->closing && p2p_progress(v, m, false)) {}
    int64_t now = symcomm_now_ns();
    if (due(m) <= now) *last = now;
    pthread_mutex_unlock(&m->lock);
    bool long_idle = now - *last >= SLICE_NS;
    if (!long_idle) futex_wait(&me->p2p_doorbell, seen, SLICE_NS);
    atomic_fetch_sub(&me->p2p_sleepers, 1);
    return long_idle;
}

/* Some time after the last of the operations that it drives it stops listening to bells: each would cost the sender of
 * a blocking message a call of the kernel, and wake this thread for nothing. It ends when the group is left. */
static void *background(void *argument) {
    struct p2p *m = argument;
    struct visit visit;
    sleep_until_needed(m);
    int64_t last = symcomm_now_ns();
    while (!m->closing && visit_begin(&visit, m->group)) {
        bool long_idle = drive_in_background(&visit, m, &last);
        visit_end(&visit);
        if (long_idle) sleep_until_needed(m), last = symcomm_now_ns();
    }
    return NULL;
}

void p2p_prepare_background(struct p2p *m) { thread_prepare_timed(&m->needed); }

bool p2p_start_background(struct p2p *m) {
    m->thread_runs = thread_start(&m->thread, "symcomm-p2p", THREAD_STACK, background, m) == 0;
    return m->thread_runs;
}

void p2p_end_background(const struct visit *v, struct p2p *m) {
    struct control *me = block_of(v, v->group->rank);
    pthread_mutex_lock(&m->lock);
    bool runs = m->thread_runs;
    m->thread_runs = false;
    atomic_store(&m->closing, true);
    pthread_cond_signal(&m->needed);
    pthread_mutex_unlock(&m->lock);
    if (!runs) return;
    atomic_fetch_add(&me->p2p_doorbell, 1);
    futex_wake(&me->p2p_doorbell, INT32_MAX);
    pthread_join(m->thread, NULL);
}
