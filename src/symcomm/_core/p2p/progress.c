/* Moves the bytes of messages: into the rings of this rank, and out of its peers'. */
#include "p2p/engine.h"

#include <stdlib.h>
#include <unistd.h>

#include "group/symmetric.h"
#include "memory/isolate.h"
#include "memory/nontemporal.h"
#include "module/module.h"
#include "observe/flight.h"
#include "os/futex.h"
#include "sync/sync.h"

#define DIRECT_BYTES (32 * 1024)       /* below, copying twice is cheaper than waiting for the receiver */
#define WAKING_BYTES (4 * 1024 * 1024) /* below, a sender that sleeps is not woken to help: it would come too late */

static void ring_p2p_doorbell(struct group *g, int rank) {
    struct control *c = g->control[rank];
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
    flight_end(op->record, op->record_number, status);
    op->status = status;
    op->state = OP_DONE;
    if (op->background) op->p2p->background--;
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

/* Where a message of so many bytes is copied from or to directly, or -1. */
static int64_t direct_offset(const struct group *g, const char *buffer, uint64_t nbytes) {
    return nbytes >= DIRECT_BYTES ? symmetric_offset(g, buffer, (int64_t)nbytes) : -1;
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
        struct header h = {op->nbytes, op->tag, direct_offset(m->group, op->buffer, op->nbytes), op->dtype};
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

/* Takes part in copying what peer is at. */
static bool help(struct p2p *m, int peer) {
    bool helped = false;
    for (struct op *op = m->out[peer].unacknowledged; op; op = op->next)
        if (coop_fits(op->nbytes))
            helped |= coop_push(&m->out[peer].channel->coop, op->ticket, m->group->arena[peer], op->buffer, op->nbytes);
    if (helped) ring_p2p_doorbell(m->group, peer);
    return helped;
}

static bool progress_sends(struct p2p *m, int peer, bool waits) {
    struct outgoing *o = &m->out[peer];
    bool moved = waits && o->unacknowledged && help(m, peer);
    while (o->first) {
        struct op *op = o->first;
        uint64_t before = atomic_load_explicit(&o->channel->filled, memory_order_relaxed);
        bool whole = push(m, o, op);
        bool advanced = atomic_load_explicit(&o->channel->filled, memory_order_relaxed) != before;
        if (advanced) ring_p2p_doorbell(m->group, peer), moved = true;
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
        if ((op->peer != peer && op->peer != ANY_SOURCE) || op->tag != h->tag) continue;
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
        if (op->peer == peer || op->peer == ANY_SOURCE) return true;
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

static bool take_header(struct p2p *m, int peer) {
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
    i->reading = true;
    i->moved = 0;
    atomic_store_explicit(&c->emptied, emptied + sizeof i->header, memory_order_release);
    return true;
}

static char *destination(struct incoming *i) {
    if (i->unexpected) return i->unexpected->bytes;
    return i->into && fits(i->into, &i->header) ? i->into->buffer : NULL;
}

/* A symmetric message was copied: is it what was sent, or did the sender have its tensor back meanwhile? */
static bool was_withdrawn(const struct channel *c) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&c->withdrawn, memory_order_relaxed);
}

static bool is_dead(struct p2p *m, int peer) { return sync_marked_gone(m->group, peer) == STATUS_DEAD; }

/* The number that the sender gave to the symmetric message which is being read. */
static uint64_t ticket_of(struct incoming *i) {
    return atomic_load_explicit(&i->channel->copied, memory_order_relaxed) + 1;
}

/* Whether the sender may help to copy. Where ranks share cores, it would only take the receiver's. */
static bool may_cooperate(struct group *g, struct incoming *i, int peer) {
    if (i->into == NULL || peer == g->rank || !coop_fits(i->header.nbytes)) return false;
    return !atomic_load_explicit(&g->oversubscribed, memory_order_relaxed) &&
           direct_offset(g, i->into->buffer, i->header.nbytes) >= 0;
}

/* Copies a symmetric message. False: the sender is still at its share of it. */
static bool copy(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    const char *from = m->group->arena[peer] + i->header.offset;
    char *to = destination(i);
    uint64_t nbytes = i->header.nbytes;
    if (to == NULL) return true;
    if (!i->coop && may_cooperate(m->group, i, peer)) {
        i->coop = true;
        coop_open(&i->channel->coop, ticket_of(i), direct_offset(m->group, to, nbytes));
        if (nbytes >= WAKING_BYTES) ring_p2p_doorbell(m->group, peer);
    }
    if (!i->coop) nt_copy(to, from, nbytes, nt_pays(2 * nbytes));
    else if (!coop_pull(&i->channel->coop, ticket_of(i), to, from, nbytes, is_dead(m, peer))) return false;
    i->coop = false;
    return true;
}

void p2p_revoke_receive(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct group *g = m->group;
    if (!i->coop) return;
    i->coop = false;
    struct coop_copy *j = &i->channel->coop;
    uint64_t number = ticket_of(i);
    if (is_dead(m, peer) || !coop_is_written(j, number)) return;
    if (symcomm_before_waiting) symcomm_before_waiting();
    int64_t end = symcomm_now_ns() + (g->own_process ? SOON_ENOUGH_NS : LONG_ENOUGH_NS);
    while (coop_is_written(j, number) && !is_dead(m, peer) && symcomm_now_ns() < end) usleep(100);
    if (g->own_process && coop_is_written(j, number) && !is_dead(m, peer))
        isolate(i->into->buffer, (int64_t)i->header.nbytes);
}

static void take_symmetric(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    if (!copy(m, peer)) return;
    i->moved = i->header.nbytes;
    if (was_withdrawn(i->channel)) { /* the sender says the same as soon as it can */
        int gone = sync_marked_gone(m->group, peer);
        if (gone) sync_fail(m->group, gone, peer);
        else sync_fail_of(m->group, STATUS_HALF_SENT, m->group->rank, peer);
        i->void_message = true;
        return;
    }
    atomic_fetch_add_explicit(&i->channel->copied, 1, memory_order_release);
}

static void take_bytes(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    struct channel *c = i->channel;
    char *to = destination(i);
    if (i->header.offset >= 0) {
        take_symmetric(m, peer);
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

/* The sender took the message back: who waits for it is told, and the channel says nothing more. */
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

static bool progress_receives(struct p2p *m, int peer) {
    struct incoming *i = &m->in[peer];
    bool moved = false;
    while (!i->void_message) {
        bool fresh = !i->reading;
        if (fresh && !take_header(m, peer)) break;
        uint64_t before = i->moved;
        take_bytes(m, peer);
        bool advanced = fresh || i->moved != before;
        if (advanced) ring_p2p_doorbell(m->group, peer), moved = true;
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

void p2p_progress_first(struct p2p *m, const struct op *op) {
    if (op->is_send) progress_sends(m, op->peer, true);
    else if (op->peer != ANY_SOURCE) progress_receives(m, op->peer);
}

bool p2p_progress(struct p2p *m, bool waits) {
    bool moved = false;
    for (int r = 0; r < m->group->world; r++) {
        moved |= progress_sends(m, r, waits);
        moved |= progress_receives(m, r);
    }
    return moved;
}
