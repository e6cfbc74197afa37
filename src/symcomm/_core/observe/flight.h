/* The flight recorder: a ring of a rank's last operations, in its arena, where others can read it even if the rank is
 * stuck or dead. symcomm/memory/flight.py lays it out and reads it. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#include "os/clock.h"

/* How the bytes travelled; the bits above (enum flight_way) say how the call was run. */
enum flight_path {
    FLIGHT_STAGED,
    FLIGHT_DIRECT,
    FLIGHT_MESSAGE,
    FLIGHT_ATTACHED,
    FLIGHT_ATTACHED_MESSAGE = FLIGHT_MESSAGE | 4,
    FLIGHT_ORDINARY_HERE = 8, /* staged, since this rank's tensors were not symmetric, or only a peer's */
    FLIGHT_ORDINARY_THERE,
    FLIGHT_PATHS = 0x0f
};
enum flight_way {
    FLIGHT_SLOW_PATH = 0x10, /* Python checked the tensors and found the plan; otherwise the core did */
    FLIGHT_QUEUED = 0x20,    /* the group's own thread ran it, or (messages) was there to; otherwise the caller's */
};

struct flight_entry {           /* one cache line; times in ticks */
    _Atomic uint64_t number;    /* of the operation among all of this rank's, from 1; 0: being written */
    _Atomic uint64_t seq;       /* in its group; of messages, per group and direction */
    _Atomic uint64_t signature; /* collective, dtype, operation, root; of a message: direction, dtype, -, peer */
    _Atomic uint64_t count;     /* elements as the ranks compare them; of a message: bytes */
    _Atomic uint64_t created;
    _Atomic uint64_t finished; /* 0: not yet */
    /* Microseconds that the caller waited for all to arrive, after the first looks; 0: less than 100. */
    _Atomic uint32_t waited;
    _Atomic uint32_t site;      /* where the call was made: a number in the table of sites, 0: not known */
    _Atomic uint32_t group;     /* which group: a number in the table of groups */
    _Atomic uint8_t status;     /* enum status, once finished */
    _Atomic uint8_t path;       /* enum flight_path | enum flight_way */
    _Atomic uint8_t plan;       /* the algorithm: a number in symcomm.collectives.plan.ALGORITHMS */
    _Atomic uint8_t exact_site; /* 1: of this very call; 0: of the first call of this kind */
};

struct flight {
    _Atomic uint64_t next;
    _Atomic uint64_t capacity; /* a power of two; 0: nothing is recorded */
    uint64_t pad[510];
    struct flight_entry entries[];
};

/* What is known of an operation when it begins; see struct flight_entry. */
struct flight_facts {
    uint64_t seq, signature, count, created;
    uint32_t site, group;
    uint8_t path, plan, exact_site;
};

/* Where an operation comes from. */
struct origin {
    uint64_t created; /* ticks; 0: now */
    uint32_t site;
    uint8_t exact_site;
    uint8_t way; /* enum flight_way */
};

_Static_assert(sizeof(struct flight_entry) == 64, "an entry is one cache line");
_Static_assert(sizeof(struct flight) == 4096, "entries start at a page");

/* A new entry, with its number; NULL when nothing is recorded. */
static inline struct flight_entry *flight_begin(struct flight *f, const struct flight_facts *facts, uint64_t *number) {
    uint64_t capacity = f ? atomic_load_explicit(&f->capacity, memory_order_relaxed) : 0;
    if (capacity == 0) return NULL;
    uint64_t n = atomic_fetch_add_explicit(&f->next, 1, memory_order_relaxed);
    struct flight_entry *e = &f->entries[n & (capacity - 1)];
    atomic_store_explicit(&e->number, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&e->seq, facts->seq, memory_order_relaxed);
    atomic_store_explicit(&e->signature, facts->signature, memory_order_relaxed);
    atomic_store_explicit(&e->count, facts->count, memory_order_relaxed);
    atomic_store_explicit(&e->created, facts->created, memory_order_relaxed);
    atomic_store_explicit(&e->finished, 0, memory_order_relaxed);
    atomic_store_explicit(&e->waited, 0, memory_order_relaxed);
    atomic_store_explicit(&e->site, facts->site, memory_order_relaxed);
    atomic_store_explicit(&e->group, facts->group, memory_order_relaxed);
    atomic_store_explicit(&e->status, 0, memory_order_relaxed);
    atomic_store_explicit(&e->path, facts->path, memory_order_relaxed);
    atomic_store_explicit(&e->plan, facts->plan, memory_order_relaxed);
    atomic_store_explicit(&e->exact_site, facts->exact_site, memory_order_relaxed);
    atomic_store_explicit(&e->number, *number = n + 1, memory_order_release);
    return e;
}

/* Adds how the bytes travel, once that is known. Only the thread that runs the operation calls this. */
static inline void flight_add_path(struct flight_entry *e, int path) {
    if (e == NULL) return;
    int before = atomic_load_explicit(&e->path, memory_order_relaxed);
    atomic_store_explicit(&e->path, (uint8_t)(before | path), memory_order_relaxed);
}

/* The same, unless another operation has taken the entry's place. */
static inline void flight_add_path_of(struct flight_entry *e, uint64_t number, int path) {
    if (e && atomic_load_explicit(&e->number, memory_order_relaxed) == number) flight_add_path(e, path);
}

/* Notes that the operation has ended, unless so many came since that another has taken the entry's place. */
static inline void flight_end(struct flight_entry *e, uint64_t number, int status) {
    if (e == NULL || atomic_load_explicit(&e->number, memory_order_relaxed) != number) return;
    atomic_store_explicit(&e->status, (uint8_t)status, memory_order_relaxed);
    atomic_store_explicit(&e->finished, symcomm_ticks(), memory_order_release);
}
