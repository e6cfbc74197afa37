/* Memory that one process writes and others of its host read: what queues and boards have in common.
 *
 * It begins with a control block, in which writer and readers say that they live and what they hold. Payloads lie
 * behind it in *parts*, ranges that the writer chooses. The writer lends a part to readers: each has a bit in the
 * part's `holders`, which it clears when it releases the part. The holders of all parts are in a table at a fixed
 * place, so that a reader that looks at a part too late touches no payload.
 *
 * One side decides on each word: the writer takes readers in and drops them, and a dead reader keeps its bits until the
 * writer notices. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "group/status.h"
#include "memory/life.h"

#define REGION_READERS 64
#define REGION_PARTS 1024
#define PART_IS_FREE ((uint64_t)1 << 63) /* readers of boards look at parts at any time */
#define MOST_READERS 63                  /* that bit is not a reader's */

enum region_kind { QUEUE = 1, BOARD = 2 };

struct region_reader {
    struct life life;
    _Alignas(64) _Atomic uint64_t next; /* number of the message to read next */
    _Atomic int64_t pid;
};

struct part {
    _Atomic uint64_t holders;
    _Atomic uint64_t number; /* of the message or version in it */
    _Atomic uint64_t offset, nbytes;
};

struct bell {
    _Alignas(64) _Atomic uint32_t word, sleepers;
};

struct region {
    uint64_t magic; /* written last */
    uint8_t nonce[16];
    _Atomic int64_t writer_pid;
    uint64_t kind; /* QUEUE or BOARD */
    struct life writer;
    _Alignas(64) _Atomic uint64_t ready; /* a bit for each reader: it wants to be taken in */
    _Atomic uint64_t active;             /* it is sent messages */
    _Atomic uint64_t left;               /* it wants no more messages */
    _Atomic uint64_t leaving;            /* it is sent no more, and may still hold parts */
    _Alignas(64) _Atomic uint64_t head;  /* of a queue: how many messages there were; of a board: see board.c */
    _Atomic uint32_t closed;             /* by the writer */
    struct bell news, room;              /* readers sleep on the first, the writer on the second */
    struct region_reader readers[REGION_READERS];
    struct part parts[REGION_PARTS];
    _Alignas(64) char slots[]; /* of a queue */
};

static inline struct region *region_at(unsigned long long address) { return (struct region *)(uintptr_t)address; }

void region_let_go(struct region *r, int part, uint64_t bits);

void bell_ring(struct bell *b);

/* Readers that are taken in, or want to be. */
static inline uint64_t region_readers(struct region *r) { return atomic_load(&r->ready) | atomic_load(&r->active); }

/* For the writer: the reader to drop first, or -1. */
int region_find_gone(struct region *r);
/* For a reader: STATUS_OK, or how the writer is gone. */
int region_writer_gone(struct region *r);

/* Waits until `is_over`, or until `find_gone` finds that the other side is gone. Releases the interpreter lock. */
struct region_wait {
    struct region *region;
    bool (*is_over)(const struct region_wait *w);
    int (*find_gone)(const struct region_wait *w, int *culprit);
    struct bell *bell;
    uint64_t a, b; /* what those two compare */
};
/* The writer's `find_gone`. STATUS_LEFT also if another thread has closed its end. */
int region_reader_gone(const struct region_wait *w, int *culprit);
/* Returns the status, and who is gone in *culprit. timeout: ns; 0: only look. */
int region_wait(struct region_wait *w, int64_t timeout, int *culprit);
