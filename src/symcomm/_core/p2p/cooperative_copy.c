#include "p2p/cooperative_copy.h"

#include "memory/nontemporal.h"
#include "os/thread.h"

#define PIECE_BYTES (64 * 1024)     /* a few microseconds: at the end one rank waits for the other's last piece */
#define ATTACHED_BYTES (256 * 1024) /* the same for pieces that take a system call each */
#define COUNT_BITS 20               /* of pieces: 64 GiB */
#define COUNT_MASK (((uint64_t)1 << COUNT_BITS) - 1)
#define FAILED COUNT_MASK /* instead of a number of pieces */
#define BACK ((uint64_t)1)
#define FRONT ((uint64_t)1 << COUNT_BITS)
#define NUMBER_SHIFT (2 * COUNT_BITS) /* the bits above tell apart all messages that are on their way at once */

static uint64_t back_of(uint64_t claims) { return claims & COUNT_MASK; }
static uint64_t front_of(uint64_t claims) { return claims >> COUNT_BITS & COUNT_MASK; }
static bool is_of(uint64_t claims, uint64_t number) { return (claims ^ number << NUMBER_SHIFT) >> NUMBER_SHIFT == 0; }
static uint64_t piece_bytes(const struct coop_message *t) { return t->attached ? ATTACHED_BYTES : PIECE_BYTES; }
static uint64_t pieces_of(const struct coop_message *t) { return (t->nbytes + piece_bytes(t) - 1) / piece_bytes(t); }

bool coop_fits(uint64_t nbytes) { return nbytes >= COOP_BYTES && nbytes / PIECE_BYTES < COUNT_MASK - 1; }

/* Takes one more piece for a side. before: the claims until then. False: none is left, or another message is next. */
static bool claim(const struct coop_message *t, uint64_t side, uint64_t *before) {
    uint64_t pieces = pieces_of(t);
    *before = atomic_load_explicit(&t->copy->claims, memory_order_acquire);
    do {
        if (!is_of(*before, t->number) || front_of(*before) + back_of(*before) >= pieces) return false;
    } while (!atomic_compare_exchange_weak_explicit(&t->copy->claims, before, *before + side, memory_order_acq_rel,
                                                    memory_order_acquire));
    return true;
}

static uint64_t pushed(const struct coop_message *t, uint64_t pieces) { return t->number << COUNT_BITS | pieces; }

/* Whether the sender has copied all that it has claimed. */
static bool is_pushed(const struct coop_message *t, uint64_t claims) {
    uint64_t all = pushed(t, back_of(claims));
    return back_of(claims) == 0 || atomic_load_explicit(&t->copy->pushed, memory_order_acquire) == all;
}

/* Whether the sender could not write into the receiver's memory, and tries no more. */
static bool has_failed(const struct coop_message *t) {
    return atomic_load_explicit(&t->copy->pushed, memory_order_acquire) == pushed(t, FAILED);
}

/* --- the receiver ----------------------------------------------------------------------------------------------- */

void coop_open(const struct coop_message *t, int64_t to, uint64_t guard) {
    struct coop_copy *j = t->copy;
    if (t->attached) cma_grant_writes(&j->grant, guard);
    atomic_store_explicit(&j->to, to, memory_order_relaxed);
    atomic_store_explicit(&j->claims, t->number << NUMBER_SHIFT, memory_order_release);
}

static bool pull_piece(const struct coop_message *t, uint64_t piece) {
    uint64_t size = piece_bytes(t), at = piece * size, n = t->nbytes - at < size ? t->nbytes - at : size;
    if (t->attached) return cma_get(t->g, t->peer, t->mine + at, (uint64_t)(uintptr_t)t->theirs + at, n);
    nt_copy(t->mine + at, t->theirs + at, n, nt_pays(2 * t->nbytes));
    return true;
}

enum coop_state coop_pull(const struct coop_message *t, bool sender_is_dead) {
    uint64_t claims, pieces = pieces_of(t);
    bool all = true;
    while (claim(t, FRONT, &claims)) all = all && pull_piece(t, front_of(claims));
    if (!all) return COOP_LOST;
    if (is_pushed(t, claims)) return COOP_WHOLE;
    if (!sender_is_dead && !has_failed(t)) return COOP_WAITS;
    for (uint64_t piece = pieces - back_of(claims); piece < pieces; piece++)
        if (!pull_piece(t, piece)) return COOP_LOST;
    return COOP_WHOLE;
}

bool coop_is_written(const struct coop_message *t) {
    return !is_pushed(t, atomic_load_explicit(&t->copy->claims, memory_order_acquire)) && !has_failed(t);
}

/* --- the sender ------------------------------------------------------------------------------------------------- */

static bool push_piece(const struct coop_message *t, int64_t to, uint64_t piece) {
    uint64_t size = piece_bytes(t), at = piece * size, n = t->nbytes - at < size ? t->nbytes - at : size;
    if (t->attached) return cma_put(t->g, t->peer, &t->copy->grant, (uint64_t)to + at, t->mine + at, n);
    nt_copy(t->theirs + to + at, t->mine + at, n, nt_pays(2 * t->nbytes));
    return true;
}

bool coop_push(const struct coop_message *t) {
    struct coop_copy *j = t->copy;
    uint64_t claims = atomic_load_explicit(&j->claims, memory_order_acquire), pieces = pieces_of(t);
    if (!is_of(claims, t->number)) return false;
    /* Read before a piece is claimed: a thread that is stopped after that may find the next message's place here. */
    int64_t to = atomic_load_explicit(&j->to, memory_order_relaxed);
    if (t->attached) atomic_store_explicit(&j->pusher, thread_id(), memory_order_relaxed);
    bool any = false;
    while (!has_failed(t) && claim(t, BACK, &claims)) {
        bool done = push_piece(t, to, pieces - 1 - back_of(claims));
        atomic_store_explicit(&j->pushed, pushed(t, done ? back_of(claims) + 1 : FAILED), memory_order_release);
        any = true;
    }
    return any;
}
