/* A group as one rank's process has it. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "group/control.h"
#include "group/status.h"
#include "group/visit.h"

struct flight_entry;

/* How many calls took which path. Counted with the interpreter lock held. */
struct ways {
    _Atomic uint64_t taken[2][2];  /* by [Python checked it][it was queued] */
    _Atomic uint64_t by_waiter[2]; /* queued ones that their waiter ran; counted without that lock */
};

/* How the bytes of collectives travelled, and why some were copied through staging areas. */
enum copies {
    COPIES_NO_PLAN, /* no other way would be faster for so many bytes, or there is none */
    COPIES_DIRECT,
    COPIES_ATTACHED, /* read out of a peer's ordinary memory */
    COPIES_ORDINARY_HERE,
    COPIES_ORDINARY_THERE, /* this rank's tensors are symmetric, but a peer's are not */
    COPIES_KINDS
};

/* Only the thread that runs a collective counts, and there is one at a time. */
struct copy_counts {
    _Atomic uint64_t calls, bytes;
};

/* How waits ended that took longer than the first looks. */
struct wait_counts {
    _Atomic uint64_t looked;  /* while the rank kept its core and went on looking */
    _Atomic uint64_t yielded; /* while it offered the core to others */
    _Atomic uint64_t slept;
};

/* Fields are constant once the group is made, or atomic, unless their comment names who may use them. */
struct group {
    int rank, world;
    struct blocks *blocks;      /* what the ranks share: reached through a visit, see group/visit.h */
    _Atomic uint64_t seq;       /* of the last operation */
    _Atomic int64_t unnumbered; /* how many of these were not the program's; it counts its own from 1 */
    _Atomic uint64_t started;   /* when the last operation began, in ticks */
    int64_t stage_bytes;
    _Atomic int64_t reserved_bytes; /* of each half of my own stage: how many bytes have pages */
    char **arena;                   /* per rank: where this process has mapped it */
    int64_t arena_bytes;            /* size of my own */
    _Atomic uint32_t **life;        /* per rank */
    _Atomic uint8_t *readable;      /* per rank: whether its memory can be read, see exec/cma.c */
    int spin;                       /* most first looks of a wait */
    _Atomic int spin_now;           /* how many now: fewer if ranks share cores and peers do not answer soon */
    /* How long to go on looking after those, keeping the core or offering it, before sleeping; see sync/backoff.h. */
    int64_t poll_ns, yield_ns;
    _Atomic int64_t timeout;     /* ns, of calls that do not say otherwise */
    _Atomic int64_t next_review; /* when to count cores and ranks again */
    _Atomic bool oversubscribed; /* there were more ranks than cores then */
    _Atomic bool needs_core;     /* this group counts its rank among those that need a core */
    struct wait_counts waits;
    bool own_process;                      /* no other rank of the group is a thread of this process */
    bool forked;                           /* this is a child's copy: the rank is its parent */
    void *kept;                            /* a Python object that lives as long as the group: interpreter lock */
    struct flight *flight;                 /* the rank's recorder, see observe/flight.h */
    uint32_t flight_group;                 /* this group's number there */
    struct flight_entry *recording;        /* of the operation that runs: for the thread that runs it */
    struct dispatch_cache *dispatch_cache; /* plans by kind of call, see exec/dispatch_cache.c: interpreter lock */
    struct p2p *p2p;                       /* point-to-point messages, see p2p/p2p.c */
    void *object;                          /* the native.Group that owns this struct */
    /* Of asynchronous operations, which are numbered as they are queued: the last that has ended, and the last that its
     * waiter gave up. */
    _Atomic uint64_t ended, given_up;
    _Atomic bool unawaited;                  /* this rank left the last operation before it saw all ranks arrive */
    _Atomic(struct refusals *) refusals;     /* the last ones of peers, see exec/refusal.c; NULL: none yet */
    struct worker *_Atomic worker;           /* runs asynchronous operations, see exec/async.c; NULL until first used */
    struct ways collectives, messages, puts; /* statistics */
    struct copy_counts copies[COPIES_KINDS];
};

/* The number of an operation in errors and records. */
static inline int64_t number_of(const struct group *g, uint64_t seq) {
    return (int64_t)seq - atomic_load_explicit(&g->unnumbered, memory_order_relaxed);
}

/* How many first looks a wait takes now. Atomic, since several threads of a rank may wait for messages at once. */
static inline int spins_now(const struct group *g) { return atomic_load_explicit(&g->spin_now, memory_order_relaxed); }

/* Whether an operation that has not ended was given up: it and all before it have no more time. */
static inline bool has_given_up(const struct group *g) { return atomic_load(&g->given_up) > atomic_load(&g->ended); }

/* No read-modify-write: only the thread with the interpreter lock counts. */
static inline void count_call(struct ways *w, bool slow_path, bool is_queued) {
    _Atomic uint64_t *n = &w->taken[slow_path][is_queued];
    atomic_store_explicit(n, atomic_load_explicit(n, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* --- its life: group/group.c -------------------------------------------------------------------------------------- */

/* The parts of a group; arrays have an entry per rank. */
struct group_parts {
    int rank, world;
    char *const *controls, *const *stages, *const *arenas, *const *lives, *const *channels;
    int64_t stage_bytes, arena_bytes;
    struct flight *flight;
    unsigned flight_group;
    bool own_process;
    int spin;
    int64_t poll_ns, yield_ns, timeout;
    uint64_t operations; /* how many count as done */
};

/* NULL: no memory. */
struct group *group_make(const struct group_parts *p);
/* Ends the operations that still run on it, and its threads. None of those threads may call this. */
void group_stop(struct group *g);
void group_free(struct group *g);
/* This rank takes no further part. */
void group_leave(struct group *g);
/* In a forked child, which has the group's memory but is not the rank: nothing that it does reaches the other ranks. */
void group_forked(struct group *g);
/* Waits until no peer is in the middle of a put into an aborted group. Returns whether that is so. */
bool group_await_puts(struct group *g);
/* Announces that this rank is about to run its next operation. Returns whether all other ranks are too. Announced
 * numbers only grow, and each rank runs its operation whatever it sees, so seeing one late costs only time. */
bool group_announce(struct group *g, int looks);
