#include "p2p/cooperative_copy.h"

#include "memory/nontemporal.h"

#define PIECE_BYTES (64 * 1024) /* a few microseconds: at the end one waits for the other's */
#define COUNT_BITS 20           /* of pieces: 64 GiB */
#define COUNT_MASK (((uint64_t)1 << COUNT_BITS) - 1)
#define BACK ((uint64_t)1)
#define FRONT ((uint64_t)1 << COUNT_BITS)
#define NUMBER_SHIFT (2 * COUNT_BITS) /* what is left for it tells all messages apart that are on their way at once */

static uint64_t back_of(uint64_t claims) { return claims & COUNT_MASK; }
static uint64_t front_of(uint64_t claims) { return claims >> COUNT_BITS & COUNT_MASK; }
static bool is_of(uint64_t claims, uint64_t number) { return (claims ^ number << NUMBER_SHIFT) >> NUMBER_SHIFT == 0; }
static uint64_t pieces_of(uint64_t nbytes) { return (nbytes + PIECE_BYTES - 1) / PIECE_BYTES; }

bool coop_fits(uint64_t nbytes) { return nbytes >= COOP_BYTES && pieces_of(nbytes) <= COUNT_MASK; }

static void copy_piece(char *to, const char *from, uint64_t nbytes, uint64_t piece) {
    uint64_t start = piece * PIECE_BYTES, n = nbytes - start < PIECE_BYTES ? nbytes - start : PIECE_BYTES;
    nt_copy(to + start, from + start, n, nt_pays(2 * nbytes));
}

/* Takes one more piece for a side. before: the claims until then. False: none is left, or another message's turn. */
static bool claim(struct coop_copy *j, uint64_t number, uint64_t pieces, uint64_t side, uint64_t *before) {
    *before = atomic_load_explicit(&j->claims, memory_order_acquire);
    do {
        if (!is_of(*before, number) || front_of(*before) + back_of(*before) >= pieces) return false;
    } while (!atomic_compare_exchange_weak_explicit(&j->claims, before, *before + side, memory_order_acq_rel,
                                                    memory_order_acquire));
    return true;
}

/* Whether the sender has copied all that it has claimed. */
static bool is_pushed(struct coop_copy *j, uint64_t number, uint64_t claims) {
    uint64_t all = number << COUNT_BITS | back_of(claims);
    return back_of(claims) == 0 || atomic_load_explicit(&j->pushed, memory_order_acquire) == all;
}

/* --- the receiver ----------------------------------------------------------------------------------------------- */

void coop_open(struct coop_copy *j, uint64_t number, int64_t to) {
    atomic_store_explicit(&j->to, to, memory_order_relaxed);
    atomic_store_explicit(&j->claims, number << NUMBER_SHIFT, memory_order_release);
}

bool coop_pull(struct coop_copy *j, uint64_t number, char *to, const char *from, uint64_t nbytes, bool sender_is_dead) {
    uint64_t pieces = pieces_of(nbytes), claims;
    while (claim(j, number, pieces, FRONT, &claims)) copy_piece(to, from, nbytes, front_of(claims));
    if (is_pushed(j, number, claims)) return true;
    if (!sender_is_dead) return false;
    for (uint64_t piece = pieces - back_of(claims); piece < pieces; piece++) copy_piece(to, from, nbytes, piece);
    return true;
}

bool coop_is_written(struct coop_copy *j, uint64_t number) {
    return !is_pushed(j, number, atomic_load_explicit(&j->claims, memory_order_acquire));
}

/* --- the sender ------------------------------------------------------------------------------------------------- */

bool coop_push(struct coop_copy *j, uint64_t number, char *arena, const char *from, uint64_t nbytes) {
    uint64_t claims = atomic_load_explicit(&j->claims, memory_order_acquire), pieces = pieces_of(nbytes);
    if (!is_of(claims, number)) return false;
    /* Before a piece is claimed: whoever is stopped after that may find the next message's place here. */
    char *to = arena + atomic_load_explicit(&j->to, memory_order_relaxed);
    bool any = false;
    while (claim(j, number, pieces, BACK, &claims)) {
        copy_piece(to, from, nbytes, pieces - 1 - back_of(claims));
        atomic_store_explicit(&j->pushed, number << COUNT_BITS | (back_of(claims) + 1), memory_order_release);
        any = true;
    }
    return any;
}
