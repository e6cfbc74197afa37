/* At a fixed place of every arena: the word by which the kernel itself tells the others that a rank died, and what the
 * rank says about the cores that it uses. */
#pragma once

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_CORES 1024

/* What a rank tells the others of its host: which cores it may use, and how its long waits ended. */
struct cpu_usage {
    _Atomic uint64_t cores[MOST_CORES / 64]; /* that the thread which waits for peers may run on */
    _Atomic uint64_t quota_of;               /* the control group whose quota is the tightest, by its inode */
    /* Thousandths of a core that its processes may use together; 0: no limit. */
    _Atomic uint64_t quota;
    _Atomic uint32_t joined, left;           /* counts of groups: a rank that has left all its groups needs no core */
    _Alignas(64) _Atomic int32_t core;       /* one plus the core of its last long wait; 0: not known */
    _Atomic uint64_t looked, yielded, slept; /* see struct wait_counts */
};

/* At a fixed place of every arena. A robust list entry: when the thread that registered it ends for whatever reason,
 * SIGKILL included, the kernel sets FUTEX_OWNER_DIED in `word`. Peers learn of a death by reading memory. */
struct life {
    struct robust_list entry;
    _Atomic uint32_t word;
    _Atomic uint64_t pid_namespace; /* in which the word's thread id is the owner's; 0: unknown */
    _Atomic int64_t looked;         /* when a rank last asked the kernel whether the owner dumps core */
    _Alignas(64) struct cpu_usage cpu;
};

static inline struct life *life_of(_Atomic uint32_t *word) {
    return (struct life *)(void *)((char *)word - offsetof(struct life, word));
}

/* In the word of a life: the kernel's FUTEX_OWNER_DIED. */
#define LIFE_OWNER_DIED 0x40000000u

static inline bool life_has_ended(_Atomic uint32_t *word) {
    return atomic_load_explicit(word, memory_order_acquire) & LIFE_OWNER_DIED;
}

/* Whether the owner of a life that is not marked dumps core; asks the kernel now and then. */
bool life_dumps_core(_Atomic uint32_t *word);
