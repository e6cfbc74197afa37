/* The plan executor: one call runs one rank's whole part in a collective.
 *
 * run_whole() is the life of an operation: run the head, arrive, wait for all arrivals and compare signatures, then run
 * the direct or the staged part (symcomm/collectives/plan.py says what these are). If it fails, abandon() returns only
 * once no peer writes into this rank's tensors any more. */
#include "exec/exec.h"

#include "exec/cma.h"
#include "exec/refusal.h"
#include "group/group.h"
#include "group/symmetric.h"
#include "memory/isolate.h"
#include "memory/life.h"
#include "memory/nontemporal.h"
#include "module/module.h"
#include "p2p/p2p.h"
#include "reduce/reduce.h"
#include "reduce/types.h"
#include "sync/sync.h"
#include "sync/wait.h"

#define BLOCK_BYTES 16384 /* bytes of one source or destination before the next is touched: fits L1 with room */

struct run {
    const struct visit *v;
    struct group *g; /* v->group */
    const struct plan *p;
    const struct buffers *b;
    struct deadline deadline;
    bool nontemporal;   /* copies into outputs use non-temporal stores */
    bool attached;      /* inputs that are not symmetric are read by cross-memory attach */
    int64_t out_offset; /* of my output in my arena; -1: peers cannot write to it */
    int half;
};

static struct arrival *arrival_of(const struct run *x, int rank) { return &block_of(x->v, rank)->arrival[x->half]; }

/* Where a rank that lends its tensors, or passes a list of them, writes their addresses. No rank stages anything then,
 * so that is at the start of its staging half. */
static _Atomic uint64_t *addresses_of(struct run *x, int rank) {
    return (_Atomic uint64_t *)(void *)(stage_of(x->v, rank) + x->half * x->g->stage_bytes);
}

static char *peer_input(struct run *x, int rank, int64_t position) {
    int64_t offset = atomic_load_explicit(&arrival_of(x, rank)->in_offset, memory_order_relaxed);
    if (offset == IN_PIECES) {
        int64_t piece = x->p->piece_bytes;
        offset = (int64_t)atomic_load_explicit(&addresses_of(x, rank)[position / piece], memory_order_relaxed);
        position %= piece;
    }
    return x->g->arena[rank] + offset + position;
}

static char *peer_output(struct run *x, int rank, int64_t position) {
    return x->g->arena[rank] + atomic_load_explicit(&arrival_of(x, rank)->out_offset, memory_order_relaxed) + position;
}

static char *resolve(struct run *x, const struct plan_place *at, int64_t turn) {
    int64_t position = at->offset + at->stride * (at->mod ? (turn + at->phase) % at->mod : turn);
    switch (at->space) {
    case SPACE_IN: return x->b->in[at->index] + position;
    case SPACE_OUT: return x->b->out[at->index] + position;
    case SPACE_STAGE: return stage_of(x->v, (int)at->index) + x->half * x->g->stage_bytes + position;
    case SPACE_PEER_IN: return peer_input(x, (int)at->index, position);
    default: return peer_output(x, (int)at->index, position);
    }
}

/* Whether copies to a place use non-temporal stores. What is staged is read again soon. */
static bool is_nontemporal(const struct run *x, int64_t place) {
    return x->nontemporal && x->p->places[place].space != SPACE_STAGE;
}

static bool is_remote(struct run *x, const struct plan_place *at) {
    if (!x->attached || at->space != SPACE_PEER_IN) return false;
    return atomic_load_explicit(&arrival_of(x, (int)at->index)->in_offset, memory_order_relaxed) < 0;
}

static int remote_step(struct run *x, const struct plan_step *s, int64_t nbytes) {
    const struct plan_place *at = &x->p->places[s->src];
    int64_t piece = x->p->attach_bytes;
    _Atomic uint64_t *first = &addresses_of(x, (int)at->index)[at->offset / piece];
    uint64_t address = atomic_load_explicit(first, memory_order_relaxed) + (uint64_t)(at->offset % piece);
    return cma_read(x->v, (int)at->index, resolve(x, &x->p->places[s->dst], 0), address, nbytes);
}

static void copy_step(struct run *x, const struct plan_step *s, int64_t turn, int64_t nbytes) {
    const char *src = resolve(x, &x->p->places[s->src], turn);
    int64_t block = s->n_dst == 1 ? nbytes : BLOCK_BYTES;
    for (int64_t done = 0; done < nbytes; done += block) {
        size_t n = (size_t)(nbytes - done < block ? nbytes - done : block);
        for (int64_t d = s->dst; d < s->dst + s->n_dst; d++) {
            char *dst = resolve(x, &x->p->places[d], turn);
            if (dst != src) nt_copy(dst + done, src + done, n, is_nontemporal(x, d));
        }
    }
}

static void reduce_step(struct run *x, const struct plan_step *s, int64_t turn, int64_t nbytes) {
    const void *src[MAX_WORLD];
    char *dst[MAX_WORLD];
    int dtype = (int)x->p->dtype, item = symcomm_itemsize[dtype];
    for (int64_t i = 0; i < s->n_src; i++) src[i] = resolve(x, &x->p->places[s->src + i], turn);
    for (int64_t i = 0; i < s->n_dst; i++) dst[i] = resolve(x, &x->p->places[s->dst + i], turn);
    int64_t block = s->n_dst == 1 ? nbytes : BLOCK_BYTES;
    for (int64_t done = 0; done < nbytes; done += block) {
        int64_t n = nbytes - done < block ? nbytes - done : block;
        symcomm_reduce(dtype, (int)x->p->redop, dst[0] + done, src, (int)s->n_src, (size_t)(n / item), 1.0);
        for (int64_t d = 1; d < s->n_dst; d++) memcpy(dst[d] + done, dst[0] + done, (size_t)n);
        for (int64_t i = 0; i < s->n_src; i++) src[i] = (const char *)src[i] + n;
    }
}

static int wait_progress(struct run *x, int64_t who, int64_t value) {
    struct condition c = {
        .kind = who < 0 ? WAIT_PROGRESS_ALL : WAIT_PROGRESS_ONE,
        .who = who < 0 ? 0 : (int)who,
        .target = x->g->seq << PLAN_SIGNAL_BITS | (uint64_t)value,
    };
    return sync_wait(x->v, &c, &x->deadline);
}

static int run_step(struct run *x, const struct plan_step *s, int64_t turn, bool last) {
    int64_t nbytes = last ? s->last : s->nbytes;
    int64_t value = s->value + s->value_stride * turn;
    switch (s->op) {
    case OP_COPY:
        if (is_remote(x, &x->p->places[s->src])) return remote_step(x, s, nbytes);
        copy_step(x, s, turn, nbytes);
        return STATUS_OK;
    case OP_REDUCE: reduce_step(x, s, turn, nbytes); return STATUS_OK;
    case OP_SIGNAL: sync_signal(x->v, x->g->seq << PLAN_SIGNAL_BITS | (uint64_t)value); return STATUS_OK;
    default: return wait_progress(x, s->who, value);
    }
}

static int run_part(struct run *x, int part) {
    const struct plan_step *steps = x->p->steps[part];
    for (int64_t i = 0; i < x->p->n_steps[part]; i++) {
        const struct plan_step *s = &steps[i];
        int64_t turns = s->op == OP_LOOP ? s->turns : 1, body = s->op == OP_LOOP ? s->body : 1;
        const struct plan_step *first = s->op == OP_LOOP ? s + 1 : s;
        for (int64_t turn = 0; turn < turns; turn++)
            for (int64_t k = 0; k < body; k++) {
                int status = run_step(x, first + k, turn, turn == turns - 1);
                if (status) return status;
            }
        if (s->op == OP_LOOP) i += body;
    }
    return STATUS_OK;
}

/* The arrival's offset for a list of tensors that lie apart: IN_PIECES, having written where each is; or -1. */
static int64_t offset_of_pieces(struct run *x) {
    const struct buffers *b = x->b;
    int64_t offsets[MAX_WORLD];
    if (!x->p->apart || b->n_in != x->g->world || x->p->stage_bytes < b->n_in * (int64_t)sizeof(uint64_t)) return -1;
    for (int i = 0; i < b->n_in; i++)
        if ((offsets[i] = symmetric_offset(x->g, b->in[i], x->p->piece_bytes)) < 0) return -1;
    for (int i = 0; i < b->n_in; i++)
        atomic_store_explicit(&addresses_of(x, x->g->rank)[i], (uint64_t)offsets[i], memory_order_relaxed);
    return IN_PIECES;
}

/* The arrival's offset for the input, which is one tensor or a list. */
static int64_t input_offset(struct run *x) {
    const struct plan *p = x->p;
    const struct buffers *b = x->b;
    if (b->n_in < 1 || (b->n_in > 1 && p->piece_bytes <= 0)) return -1;
    for (int i = 1; i < b->n_in; i++)
        if (b->in[i] != b->in[0] + i * p->piece_bytes) return offset_of_pieces(x);
    return symmetric_offset(x->g, b->in[0], b->n_in > 1 ? b->n_in * p->piece_bytes : p->in_bytes);
}

static bool satisfies(int64_t needs, int64_t in_offset, int64_t out_offset) {
    return !((needs & NEED_INPUT) && in_offset < 0) && !((needs & NEED_OUTPUT) && out_offset < 0);
}

static uint64_t signature_of(const struct plan *p) {
    return (uint64_t)p->collective | (uint64_t)p->dtype << 8 | (uint64_t)p->redop << 16 | (uint64_t)p->root << 24;
}

static void arrive(struct run *x, uint64_t signature, int64_t in_offset, int64_t out_offset, bool attached) {
    struct control *me = block_of(x->v, x->g->rank);
    struct arrival *a = &me->arrival[x->half];
    if ((x->g->seq & 0xffffffff) == 0) /* a signal of 2^40 operations ago would pass for one of today's */
        atomic_store_explicit(&me->progress, x->g->seq << PLAN_SIGNAL_BITS, memory_order_relaxed);
    atomic_store_explicit(&a->signature, signature, memory_order_relaxed);
    atomic_store_explicit(&a->count, x->p ? (uint64_t)x->p->count : 0, memory_order_relaxed);
    atomic_store_explicit(&a->in_offset, in_offset, memory_order_relaxed);
    atomic_store_explicit(&a->out_offset, out_offset, memory_order_relaxed);
    atomic_store_explicit(&a->attached, attached, memory_order_relaxed);
    atomic_store_explicit(&a->seq, x->g->seq, memory_order_release);
    sync_wake_peers(x->v);
}

/* Whether rank r, which has arrived at this operation, made another call. */
static bool differs(struct run *x, int r) {
    struct arrival *a = arrival_of(x, r);
    return atomic_load_explicit(&a->signature, memory_order_relaxed) != signature_of(x->p) ||
           atomic_load_explicit(&a->count, memory_order_relaxed) != (uint64_t)x->p->count;
}

/* The first rank that has arrived at this operation with another signature, or -1. */
static int find_mismatch(struct run *x) {
    for (int r = 0; r < x->g->world; r++) {
        struct arrival *a = arrival_of(x, r);
        if (atomic_load_explicit(&a->seq, memory_order_acquire) == x->g->seq && differs(x, r)) return r;
    }
    return -1;
}

/* The first rank that has arrived at this operation and refuses its call, or -1. */
static int find_refusal(struct run *x) {
    for (int r = 0; r < x->g->world; r++) {
        struct arrival *a = arrival_of(x, r);
        if (atomic_load_explicit(&a->seq, memory_order_acquire) == x->g->seq &&
            atomic_load_explicit(&a->signature, memory_order_relaxed) == REFUSED_CALL)
            return r;
    }
    return -1;
}

/* Whether all ranks made the same call. A refusal does not fail the group: this operation does not take place, whatever
 * the others called, and the next one may. */
static int compare_calls(void *context) {
    struct run *x = context;
    int other = find_mismatch(x);
    if (other < 0) return STATUS_OK;
    int refused = find_refusal(x);
    if (refused < 0) return sync_fail(x->v, STATUS_MISMATCH, other);
    refusal_keep(x->v, x->g->seq, refused);
    return STATUS_REFUSED;
}

/* A rank that refuses a call, or learns that another did, leaves the operation before it has seen all ranks arrive. It
 * must see that before it writes anything for the next operation, which reuses the arrival and the staging half of the
 * operation before: only then have all ranks left that one. */
static int await_previous(const struct visit *v, struct deadline *deadline) {
    struct group *g = v->group;
    if (!atomic_load_explicit(&g->unawaited, memory_order_relaxed)) return STATUS_OK;
    struct condition c = {.kind = WAIT_ARRIVED_ALL, .target = g->seq};
    int status = sync_wait(v, &c, deadline);
    if (status == STATUS_OK) atomic_store_explicit(&g->unawaited, false, memory_order_relaxed);
    else sync_void(v);
    return status;
}

/* Waits for all arrivals. Two that differ end the wait, even while a third is missing. */
static int await_arrivals(struct run *x) {
    struct condition c = {.kind = WAIT_ARRIVED_ALL, .target = x->g->seq, .check = compare_calls, .context = x};
    int status = sync_wait(x->v, &c, &x->deadline);
    return status ? status : compare_calls(x);
}

/* Finds out whether the direct part can run (every rank's tensors lie where it needs them, or can be read there), and
 * whether some rank skipped its head. */
static void check_arrivals(struct run *x, bool *direct, bool *skipped) {
    bool symmetric = x->p->has_direct, attached = x->p->attach_bytes > 0;
    *skipped = false;
    for (int r = 0; x->p->has_direct && r < x->g->world; r++) {
        struct arrival *a = arrival_of(x, r);
        int64_t needs = x->p->needs[r];
        bool there = satisfies(needs, atomic_load_explicit(&a->in_offset, memory_order_relaxed),
                               atomic_load_explicit(&a->out_offset, memory_order_relaxed));
        bool lent = x->p->attach_bytes && atomic_load_explicit(&a->attached, memory_order_relaxed);
        symmetric = symmetric && there;
        attached = attached && lent;
        if (needs && (there || lent)) *skipped = true;
    }
    *direct = symmetric || attached;
    x->attached = attached && !symmetric;
}

static enum copies way_of_bytes(struct run *x, bool direct) {
    if (direct) return x->attached ? COPIES_ATTACHED : COPIES_DIRECT;
    if (!x->p->has_direct) return COPIES_NO_PLAN;
    struct arrival *mine = arrival_of(x, x->g->rank);
    bool here = satisfies(x->p->needs[x->g->rank], atomic_load_explicit(&mine->in_offset, memory_order_relaxed),
                          atomic_load_explicit(&mine->out_offset, memory_order_relaxed));
    return here ? COPIES_ORDINARY_THERE : COPIES_ORDINARY_HERE;
}

static void note_copies(struct run *x, bool direct) {
    static const uint8_t paths[COPIES_KINDS] = {
        [COPIES_DIRECT] = FLIGHT_DIRECT,
        [COPIES_ATTACHED] = FLIGHT_ATTACHED,
        [COPIES_ORDINARY_HERE] = FLIGHT_ORDINARY_HERE,
        [COPIES_ORDINARY_THERE] = FLIGHT_ORDINARY_THERE,
    };
    enum copies how = way_of_bytes(x, direct);
    struct copy_counts *n = &x->g->copies[how];
    uint64_t calls = atomic_load_explicit(&n->calls, memory_order_relaxed) + 1;
    uint64_t bytes = atomic_load_explicit(&n->bytes, memory_order_relaxed) + x->p->told_bytes;
    atomic_store_explicit(&n->calls, calls, memory_order_relaxed);
    atomic_store_explicit(&n->bytes, bytes, memory_order_relaxed);
    if (how != COPIES_NO_PLAN) flight_add_path(x->g->recording, paths[how]);
}

static int run_body(struct run *x, bool skipped_head) {
    bool direct, someone_skipped;
    int status;
    check_arrivals(x, &direct, &someone_skipped);
    note_copies(x, direct);
    if (direct) {
        /* Once the operation is void, a tensor is its owner's again. */
        if (x->p->writes_outputs && sync_is_void(x->v, x->g->seq)) return sync_aborted(x->v);
        return run_part(x, PLAN_DIRECT);
    }
    if (someone_skipped) {
        if (skipped_head && (status = run_part(x, PLAN_HEAD))) return status;
        sync_signal(x->v, x->g->seq << PLAN_SIGNAL_BITS | PLAN_MIXED_SIGNAL);
        if ((status = wait_progress(x, -1, PLAN_MIXED_SIGNAL))) return status;
    }
    return run_part(x, PLAN_STAGED);
}

/* Finds the pieces of my input, in a list of tensors or in one. Returns whether the kernel lets peers read them. */
static bool find_pieces(struct run *x, char *pieces[MAX_WORLD]) {
    const struct plan *p = x->p;
    if (x->b->n_in < 1) return false;
    bool listed = x->b->n_in == x->g->world && p->piece_bytes == p->attach_bytes;
    for (int i = 0; i < x->g->world; i++) pieces[i] = listed ? x->b->in[i] : x->b->in[0] + i * p->attach_bytes;
    return listed ? cma_is_readable(pieces, x->g->world, p->attach_bytes) : cma_is_readable(pieces, 1, p->in_bytes);
}

/* Prepares an attached run. Returns whether my part is possible: I can read what I need, and peers can read what they
 * need of me. */
static bool attach(struct run *x, int64_t in_offset) {
    struct group *g = x->g;
    const struct plan *p = x->p;
    if (!p->attach_bytes || !g->own_process || (x->nontemporal && !p->attach_large)) return false;
    for (int r = 0; r < g->world; r++)
        if ((p->needs[r] & NEED_INPUT) && !cma_can_read(x->v, r)) return false;
    if (!(p->needs[g->rank] & NEED_INPUT) || in_offset >= 0) return true;
    char *pieces[MAX_WORLD];
    if (!find_pieces(x, pieces)) return false;
    for (int i = 0; i < g->world; i++)
        atomic_store_explicit(&addresses_of(x, g->rank)[i], (uint64_t)(uintptr_t)pieces[i], memory_order_relaxed);
    return true;
}

static int run_whole(struct run *x) {
    struct group *g = x->g;
    const struct plan *p = x->p;
    int status;
    if (has_given_up(g)) return sync_fail(x->v, STATUS_TIMEOUT, g->rank); /* before its turn came */
    int64_t in_offset = input_offset(x);
    if (x->b->n_out == 1) x->out_offset = symmetric_offset(g, x->b->out[0], p->out_bytes);
    bool attached = attach(x, in_offset);
    bool skip_head =
        p->has_direct && p->needs[g->rank] && (attached || satisfies(p->needs[g->rank], in_offset, x->out_offset));
    if (!skip_head && (status = run_part(x, PLAN_HEAD))) return status;
    arrive(x, signature_of(p), in_offset, x->out_offset, attached);
    if ((status = await_arrivals(x))) return status;
    return run_body(x, skip_head);
}

/* Whether no living rank can still write into outputs of the operation that failed here. A rank that made another call
 * notices before it writes. */
static bool is_left(void *context) {
    struct run *x = context;
    for (int r = 0; r < x->g->world; r++) {
        struct arrival *a = arrival_of(x, r);
        if (r == x->g->rank || atomic_load(&a->seq) != x->g->seq || atomic_load(&a->left) == x->g->seq || differs(x, r))
            continue;
        if (!life_has_ended(x->g->life[r])) return false;
    }
    return true;
}

/* The operation has failed here: tells all ranks, and returns when my tensors are mine alone again. A peer that writes
 * to one ends at its next wait, or learns that it must not begin. One that was stopped in the middle would go on when
 * it wakes. It keeps the pages that it knows, and my tensor gets others. */
static void abandon(struct run *x) {
    sync_void(x->v);
    if (!x->p->writes_outputs || x->out_offset < 0) return;
    bool left = wait_briefly(is_left, x, x->g->own_process ? SOON_ENOUGH_NS : LONG_ENOUGH_NS);
    if (!left && x->g->own_process) isolate(x->b->out[0], x->p->out_bytes);
}

static bool fits(const struct group *g, const struct plan *p, const struct buffers *b) {
    return p->world == g->world && p->rank == g->rank &&
           p->stage_bytes <= atomic_load_explicit(&g->reserved_bytes, memory_order_relaxed) && p->n_in <= b->n_in &&
           p->n_out <= b->n_out;
}

static int run_locked(const struct visit *v, const struct plan *p, const struct buffers *b, int64_t timeout) {
    struct group *g = v->group;
    struct control *me = block_of(v, g->rank);
    if (!fits(g, p, b)) return STATUS_PLAN;
    int status = sync_aborted(v);
    bool late = status == STATUS_MISMATCH && atomic_load(&me->abort_seq) == g->seq + 1;
    if (status && !late) return status;
    struct deadline deadline = {.timeout = timeout};
    if (!late && (status = await_previous(v, &deadline))) return status;
    atomic_store_explicit(&g->seq, g->seq + 1, memory_order_release); /* stored by the holder of the lock only */
    struct run x = {.v = v,
                    .g = g,
                    .p = p,
                    .b = b,
                    .deadline = deadline,
                    .out_offset = -1,
                    .half = (int)(g->seq & 1),
                    .nontemporal = nt_pays(p->copied_bytes * (uint64_t)g->world)};
    if (late) {
        atomic_store(&me->arrival[x.half].left, g->seq);
        arrive(&x, signature_of(p), -1, -1, false); /* so that all ranks' errors name this call too */
        return status;
    }
    status = run_whole(&x);
    if (status == STATUS_OK && sync_is_void(v, g->seq)) status = sync_aborted(v);
    if (p->writes_outputs) atomic_store_explicit(&me->arrival[x.half].left, g->seq, memory_order_release);
    if (status == STATUS_REFUSED) atomic_store_explicit(&g->unawaited, true, memory_order_relaxed);
    else if (status != STATUS_OK) abandon(&x);
    return status;
}

static int refuse_locked(const struct visit *v, const char *words, size_t n, int64_t timeout) {
    struct group *g = v->group;
    struct deadline deadline = {.timeout = timeout};
    int status = sync_aborted(v);
    if (status || (status = await_previous(v, &deadline))) return status;
    atomic_store_explicit(&g->seq, g->seq + 1, memory_order_release);
    struct run x = {.v = v, .g = g, .half = (int)(g->seq & 1)};
    refusal_publish(v, g->seq, words, n);
    arrive(&x, REFUSED_CALL, -1, -1, false);
    atomic_store_explicit(&g->unawaited, true, memory_order_relaxed);
    return STATUS_OK;
}

/* Begins a record, with the group's lock held. p: NULL for a call that is refused. */
static struct flight_entry *record(struct group *g, const struct plan *p, uint64_t now, struct origin from,
                                   uint64_t *number) {
    struct flight_facts facts = {.seq = (uint64_t)number_of(g, g->seq + 1),
                                 .signature = p ? signature_of(p) : REFUSED_CALL,
                                 .count = p ? (uint64_t)p->count : 0,
                                 .created = from.created ? from.created : now,
                                 .site = from.site,
                                 .group = g->flight_group,
                                 .path = FLIGHT_STAGED | from.way,
                                 .plan = p ? (uint8_t)p->algorithm : 0,
                                 .exact_site = from.exact_site};
    return flight_begin(g->flight, &facts, number);
}

int64_t exec_run(struct group *g, const struct plan *p, const struct buffers *b, int64_t timeout, struct origin from) {
    struct visit v;
    if (!visit_lock(&v, g)) return STATUS_NESTED;
    int64_t number_of_call = number_of(g, g->seq + 1); /* even if it cannot run, and is not counted */
    uint64_t now = symcomm_ticks(), number = 0;
    atomic_store_explicit(&g->started, now, memory_order_relaxed);
    g->recording = record(g, p, now, from, &number);
    int64_t status = run_locked(&v, p, b, timeout);
    if (status && sync_aborted(&v)) p2p_let_go(&v);
    flight_end(g->recording, number, (int)status);
    g->recording = NULL;
    visit_unlock(&v);
    return status ? status | number_of_call << 8 : 0;
}

int64_t exec_refuse(struct group *g, const char *words, size_t n, int64_t timeout, struct origin from) {
    struct visit v;
    if (!visit_lock(&v, g)) return STATUS_NESTED;
    uint64_t number = 0;
    g->recording = record(g, NULL, symcomm_ticks(), from, &number);
    int status = refuse_locked(&v, words, n, timeout);
    flight_end(g->recording, number, status ? status : STATUS_REFUSED);
    g->recording = NULL;
    visit_unlock(&v);
    return status;
}

bool exec_may_wait(struct group *g) {
    struct visit v;
    if (!atomic_load_explicit(&g->unawaited, memory_order_relaxed) || !visit_begin(&v, g)) return false;
    uint64_t seq = g->seq;
    int here = 0; /* ranks below have arrived */
    while (here < g->world &&
           atomic_load_explicit(&block_of(&v, here)->arrival[seq & 1].seq, memory_order_relaxed) == seq)
        here++;
    visit_end(&v);
    return here < g->world;
}
