/* How ranks of a group tell each other how far they are, and wait for each other.
 *
 * Every rank has one control block per group, in its own arena, which all peers have mapped. Only the owner
 * writes it, except for the doorbell, the `sleeping` word and the abort words, which are for others to write. */
#ifndef SYMCOMM_SYNC_H
#define SYMCOMM_SYNC_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "memory/life.h"
#include "os/futex.h"

#define CALL_BYTES 384 /* of a rank's words about its call */
#define VOTE_BYTES 768 /* of its vote: two sets of MAX_WORLD ranks, and where its part of a new group lies */
#define MAX_WORLD 1024 /* ranks of a group; also places in a step of a plan */

struct arrival { /* one cache line: the flag and all that others must know */
    _Atomic uint64_t seq;
    _Atomic uint64_t signature; /* collective, dtype, operation, root */
    _Atomic uint64_t count;
    _Atomic int64_t in_offset; /* of my tensors in my arena; -1: not symmetric */
    _Atomic int64_t out_offset;
    _Atomic uint64_t left; /* seq, once the owner writes no more into peers' tensors; kept where plans do that */
    /* 1: my tensors that the plan needs can be read, and I can read those that it needs of others. */
    _Atomic uint64_t attached;
    uint64_t pad;
};

/* A few words of one rank for all others, written by turns into two places: whoever dies while it writes leaves the
 * words before. */
struct record {
    _Atomic uint32_t version; /* how often it was written; the last words are in place version % 2 */
    _Atomic uint32_t length[2];
};

struct control {
    struct arrival arrival[2];               /* by seq % 2: a fast rank may arrive again before a slow one has looked */
    _Alignas(64) _Atomic uint64_t progress;  /* seq << PLAN_SIGNAL_BITS | signal */
    _Alignas(64) _Atomic uint64_t announced; /* the operation that the owner is about to run in its caller's thread */
    _Alignas(64) _Atomic uint32_t doorbell;  /* futex */
    _Atomic uint32_t sleeping;               /* 1: the owner sleeps until the condition below holds */
    _Atomic uint32_t wait_kind;
    _Atomic int32_t wait_who;
    _Atomic uint64_t wait_target;
    _Alignas(64) _Atomic uint32_t p2p_doorbell; /* futex: a message, room for one, or an acknowledgement came */
    _Atomic uint32_t p2p_sleepers;
    /* Of a thread of the owner that sleeps for a message: 2 * (peer + 2) + is_send; 0: none. */
    _Atomic int32_t p2p_awaits;
    _Alignas(64) _Atomic uint32_t putting; /* threads of the owner that write into peers' windows */
    _Alignas(64) _Atomic uint64_t abort;   /* 0, or packed cause: see fail() */
    _Atomic uint64_t abort_seq;
    _Atomic uint64_t voided; /* ~ of the first operation that some rank left in failure: it only grows. 0: none */
    _Alignas(64) _Atomic uint32_t state; /* enum control_state */
    _Atomic uint8_t departed[MAX_WORLD]; /* written by others: rank r will not touch this block again */
    _Atomic uint64_t agreed; /* rank 0's, for all to write: where the agreement of survivors stands (group/shrink.py) */
    _Atomic uint64_t token, token_address; /* a random number and where the owner has it, see exec/cma.c */
    struct record call, vote;
    char call_text[2][CALL_BYTES]; /* what this rank was doing, once something went wrong */
    char vote_text[2][VOTE_BYTES];
};

enum control_state { CONTROL_EMPTY, CONTROL_IN_USE, CONTROL_LEFT };

enum status {
    STATUS_OK = 0,
    STATUS_MISMATCH = 1,    /* culprit made another call than origin */
    STATUS_DEAD = 2,        /* culprit died */
    STATUS_LEFT = 3,        /* culprit destroyed the group */
    STATUS_TIMEOUT = 4,     /* origin's deadline passed while it waited for culprit */
    STATUS_ABORTED = 5,     /* origin called abort() */
    STATUS_PLAN = 6,        /* the plan does not fit the group: a bug */
    STATUS_INTERRUPTED = 7, /* a Python signal handler raised (Ctrl-C) */
    STATUS_HALF_SENT = 8,   /* origin gave up a message to culprit when part of it was on its way */
    STATUS_UNREADABLE = 10, /* origin could not read culprit's tensor */
    STATUS_NESTED = 9,      /* a signal handler called it while its own thread is in another operation of the group */
};

struct flight_entry;

/* How many calls took which way. Each is counted where it comes in, with the interpreter lock held. */
struct ways {
    _Atomic uint64_t taken[2][2]; /* by [Python looked at it][another thread runs it] */
};

/* Waits that were not over within the first looks, by how they ended. */
struct wait_counts {
    _Atomic uint64_t looked;  /* while the rank kept its core and went on looking */
    _Atomic uint64_t yielded; /* while it offered the core to others */
    _Atomic uint64_t slept;
};

struct group {
    int rank, world;
    _Atomic uint64_t seq;     /* of the last operation */
    _Atomic uint64_t started; /* when it began, in ticks */
    struct control **control; /* per rank */
    char **stage;             /* per rank, two halves of stage_bytes */
    int64_t stage_bytes;
    _Atomic int64_t reserved_bytes; /* of each half of my own: how far its pages exist */
    char **arena;                   /* per rank: where this process has mapped it */
    int64_t arena_bytes;            /* size of my own */
    _Atomic uint32_t **life;        /* per rank */
    uint8_t *readable;              /* per rank: what exec/cma.c has found out */
    int spin;                       /* the first looks of a wait, at most */
    _Atomic int spin_now;           /* at present: fewer where ranks share cores and peers do not answer soon */
    /* Then, before sleeping: how long to keep a core and look, or to offer it; see sync/backoff.h. */
    int64_t poll_ns, yield_ns;
    _Atomic int64_t next_review; /* when to count cores and ranks again */
    _Atomic bool oversubscribed; /* there were more ranks than cores then */
    _Atomic bool needs_core;     /* the rank counts as one that may need a core for it */
    struct wait_counts waits;
    _Atomic int64_t slices; /* that waits have slept, for asking about signals now and then */
    bool own_process;       /* no other rank of the group is a thread of this process */
    bool forked;            /* this is a child's copy: the rank is its parent */
    _Atomic bool leaving;   /* group_leave() was called: nothing new begins */
    /* It was called by a thread in the middle of a call, at whose end the rank departs. */
    _Atomic bool departs_late;
    _Atomic bool left;                       /* departed: shared memory is not touched any more */
    _Atomic int visitors;                    /* calls that use the memory without the lock, see struct visit */
    struct control *own_block;               /* the shared one, after departing until all ranks have */
    struct control *own_copy;                /* private: what the group looks at from then on */
    pthread_mutex_t lock;                    /* one operation at a time */
    void *kept;                              /* what it held on to, once it is dropped */
    _Atomic(const void *) holder;            /* names the thread that holds it */
    struct flight *flight;                   /* the rank's recorder, see observe/flight.h */
    uint32_t flight_group;                   /* this group's number there */
    struct flight_entry *recording;          /* of the operation that holds the lock */
    struct dispatch_cache *dispatch_cache;   /* plans by kind of call, see exec/dispatch_cache.c */
    struct p2p *p2p;                         /* point-to-point messages, see p2p/p2p.c */
    void *capsule;                           /* the Python object that owns this struct */
    struct worker *worker;                   /* runs asynchronous operations, see exec/async.c; NULL until first used */
    struct ways collectives, messages, puts; /* statistics */
};

/* How often a wait that begins now looks first. Several threads of a rank may wait at once, for messages. */
static inline int spins_now(const struct group *g) { return atomic_load_explicit(&g->spin_now, memory_order_relaxed); }

enum wait_kind { WAIT_ARRIVED_ALL, WAIT_PROGRESS_ALL, WAIT_PROGRESS_ONE };

struct condition {
    enum wait_kind kind;
    int who;
    uint64_t target;
    int next;                    /* all ranks below are known to satisfy it */
    int (*check)(void *context); /* asked while sleeping: STATUS_OK, or why to stop; NULL: nothing to ask */
    void *context;
};

/* When to give up. Most waits are over before it matters, so the clock is not looked at until one takes longer. */
struct deadline {
    int64_t timeout; /* ns; 0: none */
    int64_t at;      /* ns, CLOCK_MONOTONIC; 0: not known yet */
};

/* Wait until it holds, the deadline passes, a missing rank dies, or someone aborts. */
int sync_wait(struct group *g, struct condition *c, struct deadline *deadline);

/* Publish my progress and wake whoever slept for it. */
void sync_signal(struct group *g, uint64_t progress);
void sync_wake_peers(struct group *g);

/* Make every rank's pending and later waits fail with this cause; the first cause wins. Returns the winning status. */
int sync_fail(struct group *g, int status, int culprit);
int sync_fail_of(struct group *g, int status, int culprit, int origin); /* what another rank could not tell itself */
int sync_aborted(struct group *g);

/* Asked while a call of the main thread sleeps: nonzero when a signal handler raised. NULL elsewhere. */
extern _Thread_local int (*symcomm_interrupted)(void);

/* Called when a wait turns into sleep: the number of the place in the program that made the call, or 0. NULL: known. */
extern _Thread_local uint32_t (*symcomm_call_site)(void);
void symcomm_note_call_site(struct flight_entry *e);

/* Called before a wait that may last. NULL when there is nothing to do then. */
extern _Thread_local void (*symcomm_before_waiting)(void);
void symcomm_lock(pthread_mutex_t *lock);

/* STATUS_OK, STATUS_DEAD or STATUS_LEFT */
int sync_gone(struct group *g, int rank);
int sync_marked_gone(struct group *g, int rank); /* the same as far as memory tells, for those who do not wait */

/* Operation g->seq has failed on this rank, whose abort word says why. Every rank is told before the caller gets its
 * tensors back, also by those who were only told themselves: the first one may have died while it told the others. */
void sync_void(struct group *g);
/* Whether some rank has left operation `seq` in failure; what was read before is as it was if none has. */
bool sync_is_void(struct group *g, uint64_t seq);

/* A call that uses the group's memory without its lock. They may nest, by way of signal handlers and finalizers. */
struct visit {
    struct group *group;
    struct visit *outer;
};

/* False: the group is being left, and the call must not begin. */
bool visit_begin(struct visit *v, struct group *g);
void visit_end(struct visit *v);

/* Leaves the group, on which no operation begins any more: ends this process's waits, returns when other threads' calls
 * have ended, and lets go of the shared memory, or has the last call of this very thread do so when it ends. */
void leave_group(struct group *g);
/* At the end of a call, with no lock held: does what leave_group() left to it. */
void leave_late(struct group *g);

void dispatch_cache_drop(struct group *g);

/* No read-modify-write: nobody else counts while the caller has the interpreter lock. */
static inline void count_call(struct ways *w, bool slow_path, bool is_queued) {
    _Atomic uint64_t *n = &w->taken[slow_path][is_queued];
    atomic_store_explicit(n, atomic_load_explicit(n, memory_order_relaxed) + 1, memory_order_relaxed);
}

#endif
