/* Moves the bytes of messages, into the rings of this rank and out of its peers'. */
#include "p2p/engine.h"

#include <stdlib.h>

#include "exec/plan.h"
#include "group/symmetric.h"
#include "memory/isolate.h"
#include "memory/life.h"
#include "memory/nontemporal.h"
#include "module/module.h"
#include "observe/flight.h"
#include "os/futex.h"
#include "os/thread.h"
#include "sync/fail.h"
#include "sync/wait.h"

/* Elsewhere two copies through the ring are faster than a copy by system call. */
#if defined(__x86_64__)
#define ATTACHING_PAYS true
#else
#define ATTACHING_PAYS false
#endif

#define DIRECT_BYTES (32 * 1024)       /* below, copying twice is cheaper than waiting for the receiver */
#define WAKING_BYTES (4 * 1024 * 1024) /* below, a sender that sleeps is not woken to help: it would come too late */

static void ring_p2p_doorbell(const struct visit *v, int rank) {
    struct control *c = block_of(v, rank);
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&c->p2p_sleepers, memory_order_acquire)) return;
    atomic_fetch_add_explicit(&c->p2p_doorbell, 1, memory_order_release);
    futex_wake(&c->p2p_doorbell, INT32_MAX);
}

void p2p_record(struct group *g, struct op *op) {
    int way = (op->slow_path ? FLIGHT_SLOW_PATH : 0) | (op->background ? FLIGHT_QUEUED : 0);
    struct flight_facts facts = {
        .seq = ++g->p2p->posted[op->is_send],
        .signature = (uint64_t)op->is_send | (uint64_t)op->dtype << 8 | (uint64_t)(uint32_t)op->peer << 24,
        .count = op->nbytes,
        .created = symcomm_ticks(),
        .site = op->site,
        .group = g->flight_group,
        .path = (uint8_t)(FLIGHT_MESSAGE | way),
        .exact_site = 1,
    };
    op->record = flight_begin(g->flight, &facts, &op->record_number);
}

void p2p_finish(struct op *op, int status) {
    if (op->attached) flight_add_path_of(op->record, op->record_number, FLIGHT_ATTACHED_MESSAGE);
    flight_end(op->record, op->record_number, status);
    op->status = status;
    op->state = OP_DONE;
    if (op->version && status == STATUS_OK) atomic_fetch_add_explicit(op->version, 1, memory_order_relaxed);
    if (!op->background) return;
    op->p2p->background--;
    if (op->nbytes > SHORT_BYTES) op->p2p->lengthy--;
}

/* --- the ring --------------------------------------------------------------------------------------------------- */

static void ring_write(struct channel *c, uint64_t at, const void *bytes, uint64_t n) {
    uint64_t start = at % RING_BYTES, first = n < RING_BYTES - start ? n : RING_BYTES - start;
    memcpy(c->ring + start, bytes, first);
    memcpy(c->ring, (const char *)bytes + first, n - first);
}

static void ring_read(struct channel *c, uint64_t at, void *bytes, uint64_t n, bool nontemporal) {
    uint64_t start = at % RING_BYTES, first = n < RING_BYTES - start ? n : RING_BYTES - start;
    nt_copy(bytes, c->ring + start, first, nontemporal);
    nt_copy((char *)bytes + first, c->ring, n - first, nontemporal);
}

/* --- sending ---------------------------------------------------------------------------------------------------- */

/* Where a message of so many bytes is copied from or to directly, or IN_RING. */
static int64_t direct_offset(const struct group *g, const char *buffer, uint64_t nbytes) {
    return nbytes >= DIRECT_BYTES ? symmetric_offset(g, buffer, (int64_t)nbytes) : IN_RING;
}

static bool is_attached(const struct header *h) { return h->offset < IN_RING; }

/* The header of a send, which settles how its bytes travel. */
static struct header header_of(struct group *g, const struct channel *c, struct op *op) {
    struct header h = {op->nbytes, op->tag, direct_offset(g, op->buffer, op->nbytes), op->dtype};
    if (h.offset != IN_RING || !coop_fits(op->nbytes)) return h;
    op->attached = atomic_load_explicit(&c->attaches, memory_order_relaxed) &&
                   cma_is_readable(&op->buffer, 1, (int64_t)op->nbytes);
    if (op->attached) h.offset = ATTACHED + (int64_t)(intptr_t)op->buffer;
    return h;
}

/* Bytes that fit into the ring, of so many wanted. */
static uint64_t room_for(struct outgoing *o, uint64_t filled, uint64_t wanted) {
    if (RING_BYTES - (filled - o->emptied) < wanted)
        o->emptied = atomic_load_explicit(&o->channel->emptied, memory_order_acquire);
    return RING_BYTES - (filled - o->emptied);
}

/* Puts as much of op into the ring as there is room for. True when all of it is in. */
static bool push(struct p2p *m, struct outgoing *o, struct op *op) {
    struct channel *c = o->channel;
    uint64_t filled = atomic_load_explicit(&c->filled, memory_order_relaxed);
    uint64_t room = room_for(o, filled, sizeof(struct header) + op->nbytes - op->moved);
    if (op->state == OP_POSTED) {
        if (room < sizeof(struct header)) return false;
        struct header h = header_of(m->group, c, op);
        ring_write(c, filled, &h, sizeof h);
        filled += sizeof h, room -= sizeof h;
        op->state = OP_MOVING;
        if (h.offset != IN_RING) op->moved = op->nbytes, op->ticket = ++o->tickets;
    }
    uint64_t n = op->nbytes - op->moved < room ? op->nbytes - op->moved : room;
    if (n > RING_BYTES / 4) n = RING_BYTES / 4; /* let the receiver start on the first part */
    ring_write(c, filled, op->buffer + op->moved, n);
    op->moved += n;
    atomic_store_explicit(&c->filled, filled + n, memory_order_release);
    return op->moved == op->nbytes;
}

/* Helps to copy the message that peer is at. */
static bool help(const struct visit *v, struct p2p *m, int peer) {
    bool helped = false;
    for (struct op *op = m->out[peer].unacknowledged; op; op = op->next) {
        struct coop_message t = {&m->out[peer].channel->coop, op->ticket, op->nbytes, op->buffer,
                                 m->group->arena[peer],       m->group,   peer,       op->attached};
        if (coop_fits(op->nbytes) && (!op->attached || cma_can_read(v, peer))) helped |= coop_push(&t);
    }
    if (helped) ring_p2p_doorbell(v, peer);
    return helped;
}

static bool progress_sends(const struct visit *v, struct p2p *m, int peer, bool waits) {
    struct outgoing *o = &m->out[peer];
    bool moved = waits && o->unacknowledged && help(v, m, peer);
    while (o->first) {
        struct op *op = o->first;
        uint64_t before = atomic_load_explicit(&o->channel->filled, memory_order_relaxed);
        bool whole = push(m, o, op);
        bool advanced = atomic_load_explicit(&o->channel->filled, memory_order_relaxed) != before;
        if (advanced) ring_p2p_doorbell(v, peer), moved = true;
        if (!whole && !advanced) break;
        if (!whole) continue;
        if ((o->first = op->next) == NULL) o->last = NULL;
        op->next = NULL;
        if (op->ticket) {
            op->state = OP_UNACKNOWLEDGED;
            op->next = o->unacknowledged, o->unacknowledged = op;
        } else {
            p2p_finish(op, STATUS_OK);
            p2p_release(op);
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
        p2p_finish(op, STATUS_OK);
        p2p_release(op);
        moved = true;
    }
    return moved;
}

/* --- receiving -------------------------------------------------------------------------------------------------- */

static struct op *match(struct p2p *m, int peer, const struct header *h) {
    for (struct op **at = &m->receives; *at; at = &(*at)->next) {
        struct op *op = *at;
        if ((op->peer != peer && op->peer != ANY_SOURCE) || op->tag != h->tag || op->state == OP_HELD) continue;
        *at = op->next;
        op->next = NULL;
        op->peer = peer;
        op->state = OP_MOVING;
        return op;
    }
    return NULL;
}

static bool wanted_from(struct p2p *m, int peer) {
    for (struct op *op = m->receives; op; op = op->next)
        if ((op->peer == peer || op->peer == ANY_SOURCE) && op->state != OP_HELD) return true;
    return false;
}

static bool fits(const struct op *op, const struct header *h) {
    return op->nbytes == h->nbytes && op->dtype == h->dtype;
}

static void deliver(struct op *op, const struct header *h) {
    op->got = h->nbytes, op->got_dtype = h->dtype;
    p2p_finish(op, fits(op, h) ? STATUS_OK : STATUS_SIZE);
    p2p_release(op);
}

/* Lets the next large message come by system call, if that is possible. */
static void offer_to_attach(const struct visit *v, struct channel *c, int peer) {
    if (ATTACHING_PAYS && peer != v->group->rank && cma_can_read(v, peer))
        atomic_store_explicit(&c->attaches, 1, memory_order_relaxed);
}

static bool take_header(const struct visit *v, struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct channel *c = i->channel;
    uint64_t emptied = atomic_load_explicit(&c->emptied, memory_order_relaxed);
    if (atomic_load_explicit(&c->filled, memory_order_acquire) - emptied < sizeof(struct header)) return false;
    ring_read(c, emptied, &i->header, sizeof i->header, false);
    i->into = match(m, peer, &i->header);
    i->unexpected = NULL;
    if (i->into == NULL) {
        if (!wanted_from(m, peer)) return false; /* leave it in the ring until somebody wants something */
        struct unexpected *p = calloc(1, sizeof *p);
        if (p) p->bytes = malloc(i->header.nbytes + 1);
        if (p == NULL || p->bytes == NULL) {
            free(p);
            return false; /* no memory to set it aside: wait for its receive instead */
        }
        p->header = i->header;
        i->unexpected = p;
    }
    if (i->into) i->into->attached = is_attached(&i->header);
    if (i->header.offset == IN_RING && coop_fits(i->header.nbytes)) offer_to_attach(v, i->channel, peer);
    i->reading = true;
    i->moved = 0;
    atomic_store_explicit(&c->emptied, emptied + sizeof i->header, memory_order_release);
    return true;
}

static char *destination(struct incoming *i) {
    if (i->unexpected) return i->unexpected->bytes;
    return i->into && fits(i->into, &i->header) ? i->into->buffer : NULL;
}

/* A message outside the ring was copied: is it what was sent, or did the sender have its tensor back meanwhile? */
static bool was_withdrawn(const struct channel *c) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&c->withdrawn, memory_order_relaxed);
}

static bool is_dead(struct p2p *m, int peer) { return life_has_ended(m->group->life[peer]); }

/* The number that the sender gave to the message outside the ring which is being read. */
static uint64_t ticket_of(struct incoming *i) {
    return atomic_load_explicit(&i->channel->copied, memory_order_relaxed) + 1;
}

static struct coop_message message_of(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    bool attached = is_attached(&i->header);
    char *theirs = attached ? (char *)(intptr_t)(i->header.offset - ATTACHED) /* NOLINT: an address of the sender's */
                            : m->group->arena[peer] + i->header.offset;
    return (struct coop_message){&i->channel->coop, ticket_of(i), i->header.nbytes, destination(i), theirs,
                                 m->group,          peer,         attached};
}

/* Whether the sender may help to copy. If ranks share cores, it would only take the receiver's. */
static bool may_cooperate(struct group *g, struct incoming *i, int peer) {
    if (i->into == NULL || peer == g->rank || !coop_fits(i->header.nbytes)) return false;
    if (atomic_load_explicit(&g->oversubscribed, memory_order_relaxed)) return false;
    return is_attached(&i->header) ? !i->alone : direct_offset(g, i->into->buffer, i->header.nbytes) >= 0;
}

static enum coop_state copy_alone(const struct coop_message *t) {
    if (t->attached)
        return cma_get(t->g, t->peer, t->mine, (uint64_t)(uintptr_t)t->theirs, t->nbytes) ? COOP_WHOLE : COOP_LOST;
    nt_copy(t->mine, t->theirs, t->nbytes, nt_pays(2 * t->nbytes));
    return COOP_WHOLE;
}

/* Copies a message that is not in the ring. */
static enum coop_state copy(const struct visit *v, struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct coop_message t = message_of(m, peer);
    if (t.mine == NULL) return COOP_WHOLE;
    if (!i->coop && may_cooperate(m->group, i, peer)) {
        i->coop = true;
        if (t.attached && m->guard == 0) m->guard = cma_make_guard();
        coop_open(&t, t.attached ? (int64_t)(intptr_t)t.mine : direct_offset(m->group, t.mine, t.nbytes), m->guard);
        if (t.nbytes >= WAKING_BYTES) ring_p2p_doorbell(v, peer);
    }
    if (!i->coop) return copy_alone(&t);
    enum coop_state state = coop_pull(&t, is_dead(m, peer));
    if (state != COOP_WHOLE) return state;
    i->coop = false;
    if (t.attached) cma_revoke_writes(&t.copy->grant);
    return state;
}

struct writing {
    struct p2p *p2p;
    const struct coop_message *message;
};

/* Whether the sender has said that it does not write any more, or cannot. */
static bool is_at_rest(void *context) {
    const struct writing *w = context;
    const struct coop_message *t = w->message;
    if (!coop_is_written(t)) return true;
    return t->attached ? thread_is_stopped(atomic_load(&t->copy->pusher)) : is_dead(w->p2p, t->peer);
}

/* Waits until the sender has said that it does not write any more. False: it is stopped or dead, or has not said so for
 * too long. A stopped sender has copied its piece, or will find that it may not. */
static bool await_writer(struct p2p *m, const struct coop_message *t) {
    struct group *g = m->group;
    if (t->attached) cma_revoke_writes(&t->copy->grant);
    else if (is_dead(m, t->peer)) return true;
    struct writing x = {m, t};
    wait_briefly(is_at_rest, &x, g->own_process && !t->attached ? SOON_ENOUGH_NS : LONG_ENOUGH_NS);
    return !coop_is_written(t) || (!t->attached && is_dead(m, t->peer));
}

void p2p_revoke_receive(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    if (!i->coop) return;
    i->coop = false;
    struct coop_message t = message_of(m, peer);
    if (await_writer(m, &t)) return;
    if (t.attached) i->alone = true;
    else if (m->group->own_process) isolate(i->into->buffer, (int64_t)t.nbytes);
}

/* The bytes read are not those sent: the sender has its tensor back, or cannot be read. */
static void lose_message(const struct visit *v, struct p2p *m, int peer, bool withdrawn) {
    int gone = sync_gone(v, peer), me = v->group->rank;
    p2p_revoke_receive(m, peer);
    if (gone) sync_fail(v, gone, peer);
    else if (withdrawn) sync_fail_of(v, STATUS_HALF_SENT, me, peer); /* the sender says the same as soon as it can */
    else sync_fail(v, STATUS_UNREADABLE, peer);
    m->in[peer].void_message = true;
}

static void take_outside(const struct visit *v, struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    enum coop_state state = copy(v, m, peer);
    if (state == COOP_WAITS) return;
    i->moved = i->header.nbytes;
    bool withdrawn = was_withdrawn(i->channel);
    if (withdrawn || state == COOP_LOST) lose_message(v, m, peer, withdrawn);
    else atomic_fetch_add_explicit(&i->channel->copied, 1, memory_order_release);
}

static void take_bytes(const struct visit *v, struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct channel *c = i->channel;
    char *to = destination(i);
    if (i->header.offset != IN_RING) {
        take_outside(v, m, peer);
        return;
    }
    uint64_t emptied = atomic_load_explicit(&c->emptied, memory_order_relaxed);
    uint64_t n = atomic_load_explicit(&c->filled, memory_order_acquire) - emptied;
    if (n > i->header.nbytes - i->moved) n = i->header.nbytes - i->moved;
    if (to) ring_read(c, emptied, to + i->moved, n, nt_pays(2 * i->header.nbytes));
    i->moved += n;
    atomic_store_explicit(&c->emptied, emptied + n, memory_order_release);
}

void p2p_free_unexpected(struct unexpected *p) {
    if (p) free(p->bytes);
    free(p);
}

static void deliver_unexpected(struct unexpected *p, struct op *op) {
    if (fits(op, &p->header)) memcpy(op->buffer, p->bytes, p->header.nbytes);
    deliver(op, &p->header);
    p2p_free_unexpected(p);
}

/* The sender took the message back: its receive ends with that, and the channel says nothing more. */
static void drop_message(struct incoming *i) {
    if (i->into) {
        p2p_finish(i->into, STATUS_HALF_SENT);
        p2p_release(i->into);
    }
    p2p_free_unexpected(i->unexpected);
    i->into = NULL, i->unexpected = NULL;
}

static void finish_message(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    i->reading = false;
    if (i->void_message) {
        drop_message(i);
        return;
    }
    if (i->into) deliver(i->into, &i->header);
    if (i->unexpected == NULL) return;
    struct op *late = match(m, peer, &i->header); /* posted while the bytes were set aside */
    if (late) {
        deliver_unexpected(i->unexpected, late);
        return;
    }
    if (i->unexpected_last) i->unexpected_last->next = i->unexpected;
    else i->unexpected_first = i->unexpected;
    i->unexpected_last = i->unexpected;
}

static bool progress_receives(const struct visit *v, struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    bool moved = false;
    while (!i->void_message) {
        bool fresh = !i->reading;
        if (fresh && !take_header(v, m, peer)) break;
        uint64_t before = i->moved;
        take_bytes(v, m, peer);
        bool advanced = fresh || i->moved != before;
        if (advanced) ring_p2p_doorbell(v, peer), moved = true;
        if (i->moved == i->header.nbytes) finish_message(m, peer);
        else if (!advanced) break;
    }
    return moved;
}

/* A receive that finds its message among those set aside. */
bool p2p_match_unexpected(struct p2p *m, struct op *op) {
    int first = op->peer == ANY_SOURCE ? 0 : op->peer, end = op->peer == ANY_SOURCE ? m->group->world : op->peer + 1;
    for (int peer = first; peer < end; peer++) {
        struct incoming *i = &m->in[peer];
        for (struct unexpected *p = i->unexpected_first, *before = NULL; p; before = p, p = p->next) {
            if (p->header.tag != op->tag) continue;
            if (before) before->next = p->next;
            else i->unexpected_first = p->next;
            if (i->unexpected_last == p) i->unexpected_last = before;
            op->peer = peer;
            deliver_unexpected(p, op);
            return true;
        }
    }
    return false;
}

void p2p_progress_first(const struct visit *v, struct p2p *m, const struct op *op) {
    if (op->is_send) progress_sends(v, m, op->peer, true);
    else if (op->peer != ANY_SOURCE) progress_receives(v, m, op->peer);
}

bool p2p_progress(const struct visit *v, struct p2p *m, bool waits) {
    bool moved = false;
    for (int r = 0; r < m->group->world; r++) {
        moved |= progress_sends(v, m, r, waits);
        moved |= progress_receives(v, m, r);
    }
    return moved;
}
