#include "p2p.h"

#include <errno.h>
#include <signal.h>
#include <sched.h>
#include <stdlib.h>

#include "common.h"
#include "exec.h"
#include "isolate.h"

#define SLICE_NS 10000000
#define DIRECT_BYTES (32 * 1024) /* below, copying twice is cheaper than waiting for the receiver */

struct parked { /* a message that came before its receive, while a later one was wanted */
    struct header header;
    uint64_t moved;
    char *bytes;
    struct parked *next;
};

struct incoming {
    struct channel *channel;
    struct header header; /* of the message being read */
    bool reading;         /* the header was taken, the bytes not all yet */
    bool void_message;    /* it came to nothing */
    uint64_t moved;
    struct op *into; /* or */
    struct parked *park; /* or neither: discard */
    struct parked *parked_first, *parked_last;
};

struct outgoing {
    struct channel *channel;
    struct op *first, *last; /* sends not yet fully in the ring */
    struct op *unacknowledged;
    uint64_t tickets;
};

struct mail {
    struct group *group;
    pthread_mutex_t lock;
    struct incoming *in;
    struct outgoing *out;
    struct op *receives; /* posted, in order */
    uint64_t posted[2];  /* receives and sends so far */
    _Atomic int background; /* unfinished operations that nobody may be waiting for */
    pthread_t thread;
    bool thread_runs;
    bool closed; /* the channels belong to others: the rank has left, or this is a child's copy */
    _Atomic bool closing;
};

static void ring_bell(struct group *g, int rank) {
    struct control *c = g->control[rank];
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&c->mail_sleepers, memory_order_acquire)) return;
    atomic_fetch_add_explicit(&c->mail_bell, 1, memory_order_release);
    symcomm_futex_wake(&c->mail_bell, INT32_MAX);
}

static void record(struct group *g, struct op *op) {
    struct flight_entry *e = op->record = flight_take(g->flight, &op->record_number);
    if (e == NULL) return;
    e->seq = ++g->mail->posted[op->is_send], e->count = op->nbytes, e->group = g->flight_group, e->created = symcomm_ticks();
    e->signature = (uint64_t)op->is_send | (uint64_t)op->dtype << 8 | (uint64_t)(uint32_t)op->peer << 24;
    e->status = 0, e->path = FLIGHT_MESSAGE, e->plan = 0, e->exact_site = 1;
    atomic_store_explicit(&e->site, op->site, memory_order_relaxed);
    flight_show(e, op->record_number);
}

static void finish(struct op *op, int status) {
    flight_end(op->record, op->record_number, status);
    op->status = status;
    op->state = OP_DONE;
    if (op->background) op->mail->background--;
}

/* --- the ring --------------------------------------------------------------------------------------------------- */

static void ring_write(struct channel *c, uint64_t at, const void *bytes, uint64_t n) {
    uint64_t start = at % RING_BYTES, first = n < RING_BYTES - start ? n : RING_BYTES - start;
    memcpy(c->ring + start, bytes, first);
    memcpy(c->ring, (const char *)bytes + first, n - first);
}

static void ring_read(struct channel *c, uint64_t at, void *bytes, uint64_t n) {
    uint64_t start = at % RING_BYTES, first = n < RING_BYTES - start ? n : RING_BYTES - start;
    memcpy(bytes, c->ring + start, first);
    memcpy((char *)bytes + first, c->ring, n - first);
}

/* --- sending ---------------------------------------------------------------------------------------------------- */

static int64_t arena_offset(struct group *g, const char *p, uint64_t nbytes) {
    uintptr_t base = (uintptr_t)g->arena[g->rank], at = (uintptr_t)p;
    bool inside = at >= base && at - base < (uintptr_t)g->arena_bytes && !is_isolated(p, (int64_t)nbytes);
    return inside && nbytes >= DIRECT_BYTES ? (int64_t)(at - base) : -1;
}

/* Puts as much of op into the ring as there is room for. True when all of it is in. */
static bool push(struct mail *m, struct outgoing *o, struct op *op) {
    struct channel *c = o->channel;
    uint64_t filled = atomic_load_explicit(&c->filled, memory_order_relaxed);
    uint64_t room = RING_BYTES - (filled - atomic_load_explicit(&c->emptied, memory_order_acquire));
    if (op->state == OP_POSTED) {
        if (room < sizeof(struct header)) return false;
        struct header h = {op->nbytes, op->tag, arena_offset(m->group, op->buffer, op->nbytes), op->dtype};
        ring_write(c, filled, &h, sizeof h);
        filled += sizeof h, room -= sizeof h;
        op->state = OP_MOVING;
        if (h.offset >= 0) op->moved = op->nbytes, op->ticket = ++o->tickets;
    }
    uint64_t n = op->nbytes - op->moved < room ? op->nbytes - op->moved : room;
    if (n > RING_BYTES / 4) n = RING_BYTES / 4; /* let the receiver start on the first part */
    ring_write(c, filled, op->buffer + op->moved, n);
    op->moved += n;
    atomic_store_explicit(&c->filled, filled + n, memory_order_release);
    return op->moved == op->nbytes;
}

static bool progress_sends(struct mail *m, int peer) {
    struct outgoing *o = &m->out[peer];
    bool moved = false;
    while (o->first) {
        struct op *op = o->first;
        uint64_t before = atomic_load_explicit(&o->channel->filled, memory_order_relaxed);
        bool whole = push(m, o, op);
        bool advanced = atomic_load_explicit(&o->channel->filled, memory_order_relaxed) != before;
        if (advanced) ring_bell(m->group, peer), moved = true;
        if (!whole && !advanced) break;
        if (!whole) continue;
        if ((o->first = op->next) == NULL) o->last = NULL;
        op->next = NULL;
        if (op->ticket) {
            op->state = OP_UNACKNOWLEDGED;
            op->next = o->unacknowledged, o->unacknowledged = op;
        } else {
            finish(op, STATUS_OK);
            mail_release(op);
        }
    }
    uint64_t copied = atomic_load_explicit(&o->channel->copied, memory_order_acquire);
    for (struct op **at = &o->unacknowledged; *at;) {
        struct op *op = *at;
        if (op->ticket > copied) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        finish(op, STATUS_OK);
        mail_release(op);
        moved = true;
    }
    return moved;
}

/* --- receiving -------------------------------------------------------------------------------------------------- */

static struct op *match(struct mail *m, int peer, const struct header *h) {
    for (struct op **at = &m->receives; *at; at = &(*at)->next) {
        struct op *op = *at;
        if ((op->peer != peer && op->peer != ANY_SOURCE) || op->tag != h->tag) continue;
        *at = op->next;
        op->next = NULL;
        op->peer = peer;
        op->state = OP_MOVING;
        return op;
    }
    return NULL;
}

static bool wanted_from(struct mail *m, int peer) {
    for (struct op *op = m->receives; op; op = op->next)
        if (op->peer == peer || op->peer == ANY_SOURCE) return true;
    return false;
}

static bool fits(const struct op *op, const struct header *h) { return op->nbytes == h->nbytes && op->dtype == h->dtype; }

static void deliver(struct op *op, const struct header *h) {
    op->got = h->nbytes, op->got_dtype = h->dtype;
    finish(op, fits(op, h) ? STATUS_OK : STATUS_SIZE);
    mail_release(op);
}

static bool take_header(struct mail *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct channel *c = i->channel;
    uint64_t emptied = atomic_load_explicit(&c->emptied, memory_order_relaxed);
    if (atomic_load_explicit(&c->filled, memory_order_acquire) - emptied < sizeof(struct header)) return false;
    ring_read(c, emptied, &i->header, sizeof i->header);
    i->into = match(m, peer, &i->header);
    i->park = NULL;
    if (i->into == NULL) {
        if (!wanted_from(m, peer)) return false; /* leave it in the ring until somebody wants something */
        struct parked *p = calloc(1, sizeof *p);
        if (p) p->bytes = malloc(i->header.nbytes + 1);
        if (p == NULL || p->bytes == NULL) {
            free(p);
            return false; /* no memory to set it aside: wait for its receive instead */
        }
        p->header = i->header;
        i->park = p;
    }
    i->reading = true;
    i->moved = 0;
    atomic_store_explicit(&c->emptied, emptied + sizeof i->header, memory_order_release);
    return true;
}

static char *destination(struct incoming *i) {
    if (i->park) return i->park->bytes;
    return i->into && fits(i->into, &i->header) ? i->into->buffer : NULL;
}

/* A symmetric message was copied: is it what was sent, or did the sender have its tensor back meanwhile? */
static bool was_withdrawn(const struct channel *c) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&c->withdrawn, memory_order_relaxed);
}

static void take_bytes(struct mail *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct channel *c = i->channel;
    char *to = destination(i);
    if (i->header.offset >= 0) {
        if (to) memcpy(to, m->group->arena[peer] + i->header.offset, i->header.nbytes);
        i->moved = i->header.nbytes;
        if (was_withdrawn(c)) { /* the sender says the same as soon as it can */
            int gone = sync_marked_gone(m->group, peer);
            if (gone) sync_fail(m->group, gone, peer);
            else sync_fail_of(m->group, STATUS_HALF_SENT, m->group->rank, peer);
            i->void_message = true;
            return;
        }
        atomic_fetch_add_explicit(&c->copied, 1, memory_order_release);
        return;
    }
    uint64_t emptied = atomic_load_explicit(&c->emptied, memory_order_relaxed);
    uint64_t n = atomic_load_explicit(&c->filled, memory_order_acquire) - emptied;
    if (n > i->header.nbytes - i->moved) n = i->header.nbytes - i->moved;
    if (to) ring_read(c, emptied, to + i->moved, n);
    i->moved += n;
    atomic_store_explicit(&c->emptied, emptied + n, memory_order_release);
}

static void free_parked(struct parked *p) {
    if (p) free(p->bytes);
    free(p);
}

static void hand_over(struct parked *p, struct op *op) {
    if (fits(op, &p->header)) memcpy(op->buffer, p->bytes, p->header.nbytes);
    deliver(op, &p->header);
    free_parked(p);
}

/* The sender took the message back: who waits for it is told, and the channel says nothing more. */
static void drop_message(struct incoming *i) {
    if (i->into) {
        finish(i->into, STATUS_HALF_SENT);
        mail_release(i->into);
    }
    free_parked(i->park);
    i->into = NULL, i->park = NULL;
}

static void finish_message(struct mail *m, int peer) {
    struct incoming *i = &m->in[peer];
    i->reading = false;
    if (i->void_message) {
        drop_message(i);
        return;
    }
    if (i->into) deliver(i->into, &i->header);
    if (i->park == NULL) return;
    struct op *late = match(m, peer, &i->header); /* posted while the bytes were set aside */
    if (late) {
        hand_over(i->park, late);
        return;
    }
    if (i->parked_last) i->parked_last->next = i->park;
    else i->parked_first = i->park;
    i->parked_last = i->park;
}

static bool progress_receives(struct mail *m, int peer) {
    struct incoming *i = &m->in[peer];
    bool moved = false;
    while (!i->void_message) {
        bool fresh = !i->reading;
        if (fresh && !take_header(m, peer)) break;
        uint64_t before = i->moved;
        take_bytes(m, peer);
        bool advanced = fresh || i->moved != before;
        if (advanced) ring_bell(m->group, peer), moved = true;
        if (i->moved == i->header.nbytes) finish_message(m, peer);
        else if (!advanced) break;
    }
    return moved;
}

/* A receive that finds its message among those set aside. */
static bool unpark(struct mail *m, struct op *op) {
    int first = op->peer == ANY_SOURCE ? 0 : op->peer, end = op->peer == ANY_SOURCE ? m->group->world : op->peer + 1;
    for (int peer = first; peer < end; peer++) {
        struct incoming *i = &m->in[peer];
        for (struct parked *p = i->parked_first, *before = NULL; p; before = p, p = p->next) {
            if (p->header.tag != op->tag) continue;
            if (before) before->next = p->next;
            else i->parked_first = p->next;
            if (i->parked_last == p) i->parked_last = before;
            op->peer = peer;
            hand_over(p, op);
            return true;
        }
    }
    return false;
}

static bool progress(struct mail *m) {
    bool moved = false;
    for (int r = 0; r < m->group->world; r++) {
        moved |= progress_sends(m, r);
        moved |= progress_receives(m, r);
    }
    return moved;
}

/* --- waiting ---------------------------------------------------------------------------------------------------- */

static void remove_op(struct op **list, struct op *op) {
    for (; *list; list = &(*list)->next)
        if (*list == op) {
            *list = op->next;
            op->next = NULL;
            return;
        }
}

/* Tells the receiver that symmetric messages from here on do not count. True: it had copied this one already. */
static bool take_back(struct outgoing *o, uint64_t ticket) {
    if (atomic_load(&o->channel->copied) >= ticket) return true;
    atomic_store(&o->channel->withdrawn, 1);
    atomic_thread_fence(memory_order_seq_cst); /* what the caller does with its tensor comes after */
    return false;
}

/* The caller gives up on op, which ends in STATUS_OK if the receiver has it already. False when its bytes are half on the way,
 * so that the channel cannot be used further. */
static bool withdraw(struct op *op) {
    struct mail *m = op->mail;
    bool clean = true, received = false;
    if (op->is_send) {
        struct outgoing *o = &m->out[op->peer];
        received = op->ticket && take_back(o, op->ticket);
        clean = received || op->state == OP_POSTED;
        remove_op(&o->first, op);
        remove_op(&o->unacknowledged, op);
        o->last = o->first;
        while (o->last && o->last->next) o->last = o->last->next;
    } else if (op->state == OP_POSTED) {
        remove_op(&m->receives, op);
    } else {
        m->in[op->peer].into = NULL; /* the rest of the message is discarded */
    }
    finish(op, received ? STATUS_OK : STATUS_TIMEOUT);
    mail_release(op);
    return clean;
}

/* Whether whom op waits for is gone: STATUS_OK, or how, and who. */
static int peer_gone(struct op *op, int *culprit) {
    struct group *g = op->mail->group;
    int peer = op->peer;
    bool all_gone = true;
    *culprit = peer == ANY_SOURCE ? (g->rank + 1) % g->world : peer;
    for (int r = 0; r < g->world; r++) {
        if (peer != ANY_SOURCE && r != peer) continue;
        int gone = r == g->rank ? STATUS_OK : sync_gone(g, r);
        if (gone == STATUS_DEAD) *culprit = r;
        if (gone == STATUS_DEAD || (gone == STATUS_LEFT && peer != ANY_SOURCE)) return gone;
        all_gone &= gone != STATUS_OK;
    }
    return all_gone ? STATUS_LEFT : STATUS_OK;
}

static bool drive(struct op *op) {
    struct mail *m = op->mail;
    symcomm_lock(&m->lock);
    while (!m->closed && op->state != OP_DONE && progress(m)) {}
    bool done = op->state == OP_DONE;
    pthread_mutex_unlock(&m->lock);
    return done;
}

static bool sleep_slice(struct mail *m, struct op *op, int64_t ns) {
    struct control *me = m->group->control[m->group->rank];
    uint32_t seen = atomic_load_explicit(&me->mail_bell, memory_order_acquire);
    atomic_fetch_add(&me->mail_sleepers, 1);
    atomic_thread_fence(memory_order_seq_cst);
    bool signalled = false;
    if (!drive(op)) signalled = symcomm_futex_wait(&me->mail_bell, seen, ns) < 0 && errno == EINTR;
    atomic_fetch_sub(&me->mail_sleepers, 1);
    return signalled;
}

static int give_up(struct op *op, int status, bool withdraw_it) {
    struct mail *m = op->mail;
    pthread_mutex_lock(&m->lock);
    bool done = op->state == OP_DONE, clean = true;
    if (!done && withdraw_it && !m->closed) {
        clean = withdraw(op);
        done = op->status == STATUS_OK;
        if (!done) flight_end(op->record, op->record_number, status);
    }
    pthread_mutex_unlock(&m->lock);
    if (done) return op->status;
    if (!clean && status == STATUS_TIMEOUT) sync_fail(m->group, STATUS_HALF_SENT, op->peer);
    if (!clean && status == STATUS_INTERRUPTED) sync_fail(m->group, STATUS_ABORTED, m->group->rank);
    return status;
}

static int wait_for(struct op *op, int64_t timeout, bool withdraw_it) {
    struct mail *m = op->mail;
    if (drive(op)) return op->status;
    if (timeout < 0) return STATUS_TIMEOUT;
    for (int i = 0; i < m->group->spin_now / 8; i++) {
        if (drive(op)) return op->status;
        symcomm_relax();
    }
    int64_t start = symcomm_now_ns(), deadline = timeout ? start + timeout : INT64_MAX;
    if (symcomm_before_waiting) symcomm_before_waiting();
    while (symcomm_now_ns() < start + m->group->yield_ns) {
        if (drive(op)) return op->status;
        sched_yield();
    }
    symcomm_note_site(op->record);
    for (int slices = 1;; slices++) {
        int64_t left = deadline - symcomm_now_ns();
        if (left <= 0) return give_up(op, STATUS_TIMEOUT, withdraw_it);
        bool signalled = sleep_slice(m, op, left < SLICE_NS ? left : SLICE_NS);
        if (drive(op)) return op->status;
        int culprit = 0, status = sync_aborted(m->group);
        if (status == STATUS_OK && (status = peer_gone(op, &culprit)) != STATUS_OK) {
            if (drive(op)) return op->status; /* it did its part before it went */
            status = sync_fail(m->group, status, culprit);
        }
        if (status) return give_up(op, status, true);
        if (slices % 16 == 0) signalled = true; /* one may have come just before we slept */
        if (signalled && symcomm_interrupted && symcomm_interrupted()) return give_up(op, STATUS_INTERRUPTED, true);
    }
}

int mail_wait(struct op *op, int64_t timeout, bool withdraw_it) {
    struct visit visit;
    if (!visit_begin(&visit, op->mail->group)) return mail_done(op) ? op->status : STATUS_LEFT;
    int status = wait_for(op, timeout, withdraw_it);
    visit_end(&visit);
    return status;
}

bool mail_is_short(const struct group *g, uint64_t nbytes) {
    return nbytes <= SHORT_BYTES && atomic_load_explicit(&g->mail->background, memory_order_relaxed) == 0;
}

bool mail_done(struct op *op) {
    pthread_mutex_lock(&op->mail->lock);
    bool done = op->state == OP_DONE;
    pthread_mutex_unlock(&op->mail->lock);
    return done;
}

/* Drives operations that nobody waits for. */
static void *background(void *argument) {
    struct mail *m = argument;
    struct control *me = m->group->control[m->group->rank];
    while (!atomic_load(&m->closing)) {
        uint32_t seen = atomic_load_explicit(&me->mail_bell, memory_order_acquire);
        atomic_fetch_add(&me->mail_sleepers, 1);
        atomic_thread_fence(memory_order_seq_cst);
        pthread_mutex_lock(&m->lock);
        while (progress(m)) {}
        int64_t slice = m->background ? SLICE_NS : 100 * SLICE_NS;
        pthread_mutex_unlock(&m->lock);
        symcomm_futex_wait(&me->mail_bell, seen, slice);
        atomic_fetch_sub(&me->mail_sleepers, 1);
    }
    return NULL;
}

static bool start_thread(struct mail *m) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    m->thread_runs = pthread_create(&m->thread, NULL, background, m) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return m->thread_runs;
}

/* --- life cycle ------------------------------------------------------------------------------------------------- */

int mail_open(struct group *g, char *const *channels) {
    struct mail *m = calloc(1, sizeof *m);
    size_t n = (size_t)g->world;
    if (m) m->in = calloc(n, sizeof *m->in), m->out = calloc(n, sizeof *m->out);
    if (!m || !m->in || !m->out) return -1;
    m->group = g;
    pthread_mutex_init(&m->lock, NULL);
    for (int r = 0; r < g->world; r++) {
        m->out[r].channel = (struct channel *)channels[g->rank] + r;
        m->in[r].channel = (struct channel *)channels[r] + g->rank;
    }
    g->mail = m;
    return 0;
}

void mail_close(struct group *g) {
    struct mail *m = g->mail;
    if (m == NULL) return;
    if (m->thread_runs) {
        struct control *me = g->control[g->rank];
        atomic_store(&m->closing, true);
        atomic_fetch_add(&me->mail_bell, 1);
        symcomm_futex_wake(&me->mail_bell, INT32_MAX);
        pthread_join(m->thread, NULL);
        m->thread_runs = false;
    }
    pthread_mutex_lock(&m->lock);
    for (int r = 0; r < g->world && !m->closed; r++) /* whoever sent them may use its tensors again */
        if (m->out[r].tickets) take_back(&m->out[r], m->out[r].tickets);
    m->closed = true;
    pthread_mutex_unlock(&m->lock);
}

void mail_forked(struct group *g) {
    if (g->mail == NULL) return;
    pthread_mutex_init(&g->mail->lock, NULL);
    g->mail->closed = true, g->mail->thread_runs = false;
    g->mail = NULL; /* operations that were on their way keep it */
}

/* False: the thread that would drive it cannot be started. */
static bool queue(struct mail *m, struct op *op) {
    symcomm_lock(&m->lock);
    if (op->background && !m->thread_runs && !start_thread(m)) {
        pthread_mutex_unlock(&m->lock);
        return false;
    }
    record(m->group, op);
    if (op->background) m->background++;
    if (op->is_send) {
        struct outgoing *o = &m->out[op->peer];
        if (o->last) o->last->next = op;
        else o->first = op;
        o->last = op;
    } else if (!unpark(m, op)) {
        struct op **at = &m->receives;
        while (*at) at = &(*at)->next;
        *at = op;
    }
    while (!m->closed && progress(m)) {}
    pthread_mutex_unlock(&m->lock);
    return true;
}

/* An operation nobody has begun yet; NULL: no memory. */
static struct op *make_op(struct group *g, const struct op *wanted) {
    struct op *op = malloc(sizeof *op);
    if (op == NULL) return NULL;
    *op = *wanted;
    op->mail = g->mail;
    op->references = 2; /* the caller's, and that of the queue it stands in */
    return op;
}

static struct op *refuse(struct op *op, int status) {
    op->references = 1, op->state = OP_DONE, op->status = status;
    return op;
}

struct op *mail_post(struct group *g, const struct op *wanted) {
    struct visit visit;
    struct op *op = make_op(g, wanted);
    if (op == NULL) return NULL;
    if (!visit_begin(&visit, g)) return refuse(op, STATUS_LEFT);
    if (!queue(g->mail, op)) free(op), op = NULL, errno = EAGAIN;
    visit_end(&visit);
    return op;
}

struct op *mail_exchange(struct group *g, const struct op *wanted, int64_t timeout, int *status) {
    struct visit visit;
    struct op *op = make_op(g, wanted);
    *status = STATUS_LEFT;
    if (op == NULL) return NULL;
    if (!visit_begin(&visit, g)) return refuse(op, STATUS_LEFT);
    queue(g->mail, op);
    *status = wait_for(op, timeout, true);
    visit_end(&visit);
    return op;
}

void mail_disown(struct op *op) {
    pthread_mutex_t *lock = &op->mail->lock;
    pthread_mutex_lock(lock);
    mail_release(op);
    pthread_mutex_unlock(lock);
}

/* Called with the mail's lock held. */
void mail_release(struct op *op) {
    if (--op->references == 0) free(op);
}

static void release_all(struct op *op) {
    for (struct op *next; op; op = next) {
        next = op->next;
        mail_release(op);
    }
}

static void mail_free(struct mail *m) {
    release_all(m->receives);
    for (int r = 0; r < m->group->world; r++) {
        release_all(m->out[r].first);
        release_all(m->out[r].unacknowledged);
        if (m->in[r].reading && m->in[r].into) mail_release(m->in[r].into);
        if (m->in[r].reading) free_parked(m->in[r].park);
        for (struct parked *p = m->in[r].parked_first, *next; p; p = next) {
            next = p->next;
            free_parked(p);
        }
    }
    pthread_mutex_destroy(&m->lock);
    free(m->in);
    free(m->out);
    free(m);
}

void mail_drop(struct group *g) {
    mail_close(g);
    if (g->mail) mail_free(g->mail);
    g->mail = NULL;
}
