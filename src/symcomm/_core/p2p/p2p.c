#include "p2p/p2p.h"

#include <errno.h>
#include <stdlib.h>

#include "exec/async.h"
#include "exec/exec.h"
#include "group/group.h"
#include "module/module.h"
#include "os/futex.h"
#include "os/thread.h"
#include "p2p/engine.h"
#include "sync/caller.h"
#include "sync/fail.h"
#include "sync/wait.h"

#define SPINS_A_DRIVE 8
#define FEW_MESSAGES 8         /* short ones, which a short one may find on its way without becoming long itself */
#define DEADLOCK_NS 1000000000 /* before a deadlock is reported: a thread that is about to send would have done so */

/* --- waiting ---------------------------------------------------------------------------------------------------- */

static void remove_op(struct op **list, struct op *op) {
    for (; *list; list = &(*list)->next)
        if (*list == op) {
            *list = op->next;
            op->next = NULL;
            return;
        }
}

/* Tells the receiver that messages outside the ring do not count from here on. True: it had copied this one already. */
static bool take_back(struct outgoing *o, uint64_t ticket) {
    if (atomic_load(&o->channel->copied) >= ticket) return true;
    atomic_store(&o->channel->withdrawn, 1);
    atomic_thread_fence(memory_order_seq_cst); /* what the caller does with its tensor comes after */
    return false;
}

/* The caller gives up op, which ends in STATUS_OK if the receiver has it already. False: half of its bytes are on their
 * way, so the channel cannot be used any more. */
static bool withdraw(struct op *op, int status) {
    struct p2p *m = op->p2p;
    bool clean = true, received = false;
    if (op->is_send) {
        struct outgoing *o = &m->out[op->peer];
        received = op->ticket && take_back(o, op->ticket);
        clean = received || op->state == OP_POSTED;
        remove_op(&o->first, op);
        remove_op(&o->unacknowledged, op);
        o->last = o->first;
        while (o->last && o->last->next) o->last = o->last->next;
    } else if (op->state == OP_POSTED || op->state == OP_HELD) {
        remove_op(&m->receives, op);
    } else {
        p2p_revoke_receive(m, op->peer);
        m->in[op->peer].into = NULL; /* the rest of the message is discarded */
        pthread_cond_signal(&m->needed);
    }
    p2p_finish(op, received ? STATUS_OK : status);
    return clean;
}

/* Moves what can be moved until op is done; with the lock held. */
static void progress(const struct visit *v, struct p2p *m, struct op *op) {
    if (!m->closed && op->state != OP_DONE) p2p_progress_first(v, m, op);
    while (!m->closed && op->state != OP_DONE && p2p_progress(v, m, true)) {}
}

static bool drive(const struct visit *v, struct op *op) {
    struct p2p *m = op->p2p;
    caller_lock(&m->lock);
    progress(v, m, op);
    bool done = op->state == OP_DONE;
    pthread_mutex_unlock(&m->lock);
    return done;
}

static int give_up(const struct visit *v, struct op *op, int status, bool withdraw_it) {
    struct p2p *m = op->p2p;
    pthread_mutex_lock(&m->lock);
    bool done = op->state == OP_DONE, clean = true, withdrawn = !done && withdraw_it && !m->closed;
    if (withdrawn) {
        clean = withdraw(op, status == STATUS_INTERRUPTED ? STATUS_TIMEOUT : status);
        done = op->status == STATUS_OK;
        if (!done) flight_end(op->record, op->record_number, status);
    }
    pthread_mutex_unlock(&m->lock);
    if (done) status = op->status;
    if (!clean && status == STATUS_TIMEOUT) sync_fail(v, STATUS_HALF_SENT, op->peer);
    if (!clean && status == STATUS_INTERRUPTED) sync_fail(v, STATUS_ABORTED, v->group->rank);
    if (withdrawn) p2p_release(op); /* it stands in no queue any more */
    return status;
}

/* Whether all ranks that op waits for have arrived at a collective which this rank has not called, and no other thread
 * of this rank runs one or has one queued: then they cannot go on without this rank. */
static bool seems_deadlocked(const struct visit *v, const struct op *op) {
    struct group *g = v->group;
    uint64_t next = atomic_load(&g->seq) + 1;
    if (g->world == 1 || op->peer == g->rank || visit_is_locked(g) || !async_idle(g)) return false;
    for (int r = 0; r < g->world; r++) {
        if (r == g->rank || (op->peer != ANY_SOURCE && r != op->peer)) continue;
        if (atomic_load_explicit(&block_of(v, r)->arrival[next & 1].seq, memory_order_acquire) != next) return false;
    }
    return true;
}

void (*_Atomic p2p_deadlock_hook)(const struct op *op);

struct message_wait {
    struct wait wait;
    struct op *op;
    int32_t published;     /* in p2p_awaits */
    bool withdraw_it;      /* if its time is up */
    int64_t blocked_since; /* when it first seemed deadlocked; 0: it does not; -1: it was reported */
};

static struct message_wait *as_message(struct wait *w) { return (struct message_wait *)w; }

static bool is_over(struct wait *w) {
    struct op *op = as_message(w)->op;
    if (drive(w->visit, op)) return true;
    w->missing = op->peer;
    return false;
}

static uint32_t publish(struct wait *w) {
    struct message_wait *m = as_message(w);
    struct control *me = block_of(w->visit, w->visit->group->rank);
    m->published = 2 * (m->op->peer + 2) + m->op->is_send;
    atomic_store_explicit(&me->p2p_awaits, m->published, memory_order_release);
    return atomic_load_explicit(&me->p2p_doorbell, memory_order_acquire);
}

/* Unless another thread has published since. After a failure the word stays: reports say what this rank waited for. */
static void retract(struct wait *w, int status) {
    int32_t mine = as_message(w)->published;
    if (status == STATUS_OK || sync_aborted(w->visit) == STATUS_OK)
        atomic_compare_exchange_strong(&block_of(w->visit, w->visit->group->rank)->p2p_awaits, &mine, 0);
}

/* Reports, but goes on waiting: a thread of either rank may still end the deadlock. */
static int report_deadlock(struct wait *w) {
    struct message_wait *m = as_message(w);
    void (*tell)(const struct op *) = p2p_deadlock_hook;
    if (m->blocked_since < 0 || tell == NULL) return STATUS_OK;
    int64_t now = symcomm_now_ns();
    if (!seems_deadlocked(w->visit, m->op)) m->blocked_since = 0;
    else if (m->blocked_since == 0) m->blocked_since = now;
    else if (now - m->blocked_since >= DEADLOCK_NS) tell(m->op), m->blocked_since = -1;
    return STATUS_OK;
}

/* A receive from any rank ends when one has died, or when all have left. */
static int find_gone(struct wait *w, int *culprit) {
    struct group *g = w->visit->group;
    int peer = as_message(w)->op->peer, others = 0, left = 0;
    for (int r = 0; r < g->world; r++) {
        if (r == g->rank || (peer != ANY_SOURCE && r != peer)) continue;
        int gone = sync_gone(w->visit, r);
        if (gone != STATUS_OK) *culprit = r;
        if (gone == STATUS_DEAD) return gone;
        others++, left += gone != STATUS_OK;
    }
    return others > 0 && left == others ? STATUS_LEFT : STATUS_OK;
}

static int give_up_waiting(struct wait *w, int status, int culprit) {
    struct message_wait *m = as_message(w);
    bool too_late = status == STATUS_TIMEOUT && !sync_aborted(w->visit),
         gone = status == STATUS_DEAD || status == STATUS_LEFT;
    if (culprit >= 0 && gone) status = sync_fail(w->visit, status, culprit);
    return give_up(w->visit, m->op, status, !too_late || m->withdraw_it);
}

static const struct wait_kind for_message = {
    .is_over = is_over,
    .publish = publish,
    .retract = retract,
    .check = report_deadlock,
    .find_gone = find_gone,
    .give_up = give_up_waiting,
    .what = WAITS_FOR_MESSAGE,
};

/* Whether something has come for a receive from one peer. For other operations only driving them tells. */
static bool may_move(const struct op *op) {
    int peer = op->peer;
    if (op->is_send || peer == ANY_SOURCE) return true;
    const struct channel *c = op->p2p->in[peer].channel;
    return atomic_load_explicit(&c->filled, memory_order_relaxed) !=
           atomic_load_explicit(&c->emptied, memory_order_relaxed);
}

static int wait_for(const struct visit *v, struct op *op, int64_t timeout, bool withdraw_it) {
    if (drive(v, op)) return op->status;
    if (timeout < 0) return STATUS_TIMEOUT;
    /* Driving takes as long as some spins, and other messages need it only now and then. */
    for (int i = 0, spins = spins_now(v->group); i < spins; i++) {
        if ((i % SPINS_A_DRIVE == 0 || may_move(op)) && drive(v, op)) return op->status;
        cpu_relax();
    }
    struct message_wait w = {
        .wait = {.kind = &for_message,
                 .visit = v,
                 .bell = &block_of(v, v->group->rank)->p2p_doorbell,
                 .sleepers = &block_of(v, v->group->rank)->p2p_sleepers,
                 .missing = op->peer,
                 .deadline = timeout ? symcomm_now_ns() + timeout : 0,
                 .record = op->record},
        .op = op,
        .withdraw_it = withdraw_it,
    };
    int status = wait_loop(&w.wait);
    return status == STATUS_OK ? op->status : status;
}

/* Withdraws op, and drops the reference of its queue. */
static void end_op(struct op *op, int status) {
    withdraw(op, status);
    p2p_release(op);
}

void p2p_let_go(const struct visit *v) {
    struct p2p *m = v->group->p2p;
    if (m == NULL) return;
    caller_lock(&m->lock);
    int status = m->closed || m->over ? STATUS_OK : sync_aborted(v);
    if (status) m->over = status;
    while (status && m->receives) end_op(m->receives, status);
    for (int r = 0; status && r < v->group->world; r++) {
        while (m->out[r].first) end_op(m->out[r].first, status);
        while (m->out[r].unacknowledged) end_op(m->out[r].unacknowledged, status);
        if (m->in[r].reading && m->in[r].into) end_op(m->in[r].into, status);
    }
    pthread_mutex_unlock(&m->lock);
}

void p2p_let_all_go(const struct visit *v) {
    if (!sync_aborted(v)) return;
    visit_await_operation(v);
    p2p_let_go(v);
}

int p2p_wait(struct op *op, int64_t timeout, bool withdraw_it) {
    struct visit visit;
    if (!visit_begin(&visit, op->p2p->group)) return give_up(&visit, op, STATUS_LEFT, timeout >= 0);
    if (timeout >= 0) p2p_take_from_background(op);
    int status = wait_for(&visit, op, timeout, withdraw_it);
    if (status != STATUS_OK && (timeout >= 0 || status != STATUS_TIMEOUT)) p2p_let_all_go(&visit);
    visit_end(&visit);
    return status;
}

/* --- receives that a message from outside the group may end ------------------------------------------------------ */

bool p2p_hold(struct op *op) {
    caller_lock(&op->p2p->lock);
    bool held = !op->is_send && op->state == OP_POSTED;
    if (held) op->state = OP_HELD;
    pthread_mutex_unlock(&op->p2p->lock);
    return held;
}

void p2p_resume(struct op *op) {
    struct p2p *m = op->p2p;
    caller_lock(&m->lock);
    if (op->state == OP_HELD) {
        op->state = OP_POSTED;
        if (p2p_match_unexpected(m, op)) remove_op(&m->receives, op); /* the caller's reference keeps it */
    }
    pthread_mutex_unlock(&m->lock);
}

bool p2p_fill(struct op *op, int status) {
    caller_lock(&op->p2p->lock);
    bool held = op->state == OP_HELD;
    if (held) {
        remove_op(&op->p2p->receives, op);
        p2p_finish(op, status);
        op->status = STATUS_TIMEOUT; /* for whoever looks at it: nothing came this way */
    }
    pthread_mutex_unlock(&op->p2p->lock);
    if (held) p2p_release(op);
    return held;
}

bool p2p_is_short(const struct group *g, uint64_t nbytes) {
    return nbytes <= SHORT_BYTES && atomic_load_explicit(&g->p2p->lengthy, memory_order_relaxed) == 0 &&
           atomic_load_explicit(&g->p2p->background, memory_order_relaxed) <= FEW_MESSAGES;
}

/* --- life cycle ------------------------------------------------------------------------------------------------- */

int p2p_open(struct group *g, char *const *channels) {
    struct p2p *m = calloc(1, sizeof *m);
    size_t n = (size_t)g->world;
    if (m) m->in = calloc(n, sizeof *m->in), m->out = calloc(n, sizeof *m->out);
    if (!m || !m->in || !m->out) {
        if (m) free(m->in), free(m->out);
        free(m);
        return -1;
    }
    m->group = g;
    pthread_mutex_init(&m->lock, NULL);
    p2p_prepare_background(m);
    for (int r = 0; r < g->world; r++) {
        m->out[r].channel = (struct channel *)channels[g->rank] + r;
        m->in[r].channel = (struct channel *)channels[r] + g->rank;
    }
    g->p2p = m;
    return 0;
}

void p2p_close(const struct visit *v) {
    struct group *g = v->group;
    struct p2p *m = g->p2p;
    if (m == NULL) return;
    p2p_end_background(v, m);
    pthread_mutex_lock(&m->lock);
    for (int r = 0; r < g->world && !m->closed; r++) { /* callers may use the tensors of messages on their way again */
        if (m->out[r].tickets) take_back(&m->out[r], m->out[r].tickets);
        p2p_revoke_receive(m, r);
    }
    m->closed = true;
    pthread_mutex_unlock(&m->lock);
}

void p2p_forked(struct group *g) {
    if (g->p2p == NULL) return;
    pthread_mutex_init(&g->p2p->lock, NULL);
    p2p_prepare_background(g->p2p);
    g->p2p->closed = true, g->p2p->thread_runs = false;
    g->p2p->guard = 0; /* the child's memory does not have it */
    g->p2p = NULL;     /* operations on their way keep the struct */
}

static struct op *refuse(struct op *op, int status) {
    atomic_store(&op->references, 1);
    op->state = OP_DONE, op->status = status;
    return op;
}

/* False: the thread that would drive op cannot be started. done: there is nothing left to wait for. */
static bool queue(const struct visit *v, struct p2p *m, struct op *op, bool *done) {
    caller_lock(&m->lock);
    if (m->over) {
        refuse(op, m->over);
        pthread_mutex_unlock(&m->lock);
        return *done = true;
    }
    if (op->background && !m->thread_runs && !m->closing && !p2p_start_background(m)) {
        pthread_mutex_unlock(&m->lock);
        return false;
    }
    p2p_record(m->group, op);
    if (op->background) {
        m->background++;
        m->queued++;
        if (op->nbytes > SHORT_BYTES) m->lengthy++;
    }
    if (op->is_send) {
        struct outgoing *o = &m->out[op->peer];
        if (o->last) o->last->next = op;
        else o->first = op;
        o->last = op;
    } else if (!p2p_match_unexpected(m, op)) {
        struct op **at = &m->receives;
        while (*at) at = &(*at)->next;
        *at = op;
    }
    progress(v, m, op);
    *done = op->state == OP_DONE;
    if (op->background && !*done) p2p_leave_to_background(m, op);
    pthread_mutex_unlock(&m->lock);
    return true;
}

/* An operation that has not begun; NULL: no memory. */
static struct op *make_op(struct group *g, const struct op *wanted) {
    struct op *op = malloc(sizeof *op);
    if (op == NULL) return NULL;
    *op = *wanted;
    op->p2p = g->p2p;
    op->due = NEVER_DUE;
    atomic_store(&op->references, 2); /* the caller's, and that of the queue it stands in */
    return op;
}

struct op *p2p_post(struct group *g, const struct op *wanted, bool *done) {
    struct visit visit;
    struct op *op = make_op(g, wanted);
    *done = false;
    if (op == NULL) return NULL;
    if (!visit_begin(&visit, g)) return refuse(op, STATUS_LEFT);
    if (!queue(&visit, g->p2p, op, done)) free(op), op = NULL, errno = EAGAIN;
    visit_end(&visit);
    return op;
}

struct op *p2p_exchange(struct group *g, const struct op *wanted, int64_t timeout, int *status) {
    struct visit visit;
    struct op *op = make_op(g, wanted);
    *status = STATUS_LEFT;
    if (op == NULL) return NULL;
    if (!visit_begin(&visit, g)) return refuse(op, STATUS_LEFT);
    bool done = false;
    queue(&visit, g->p2p, op, &done);
    *status = done ? op->status : wait_for(&visit, op, timeout, true);
    if (*status != STATUS_OK) p2p_let_all_go(&visit);
    visit_end(&visit);
    return op;
}

void p2p_release(struct op *op) {
    if (atomic_fetch_sub_explicit(&op->references, 1, memory_order_acq_rel) == 1) free(op);
}

static void release_all(struct op *op) {
    for (struct op *next; op; op = next) {
        next = op->next;
        p2p_release(op);
    }
}

static void p2p_free(struct p2p *m) {
    release_all(m->receives);
    for (int r = 0; r < m->group->world; r++) {
        release_all(m->out[r].first);
        release_all(m->out[r].unacknowledged);
        if (m->in[r].reading && m->in[r].into) p2p_release(m->in[r].into);
        if (m->in[r].reading) p2p_free_unexpected(m->in[r].unexpected);
        for (struct unexpected *p = m->in[r].unexpected_first, *next; p; p = next) {
            next = p->next;
            p2p_free_unexpected(p);
        }
    }
    cma_drop_guard(m->guard);
    pthread_cond_destroy(&m->needed);
    pthread_mutex_destroy(&m->lock);
    free(m->in);
    free(m->out);
    free(m);
}

void p2p_drop(const struct visit *v) {
    struct group *g = v->group;
    p2p_close(v);
    if (g->p2p) p2p_free(g->p2p);
    g->p2p = NULL;
}
