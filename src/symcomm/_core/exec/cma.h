/* Cross-memory attach: one process reads another's memory by system call, which is one copy where staging takes two.
 * Slower than a copy through shared memory, so it pays where one rank would stage for many, all would for all, or both
 * ranks of a large message copy a part of it. */
#pragma once

#include <sys/uio.h>

#include "sync/sync.h"

/* What peers need in order to find out whether they may read this rank's memory. */
void cma_introduce(struct group *g);

/* Whether this process may read that rank's memory, and finds that rank's there. Asked once for each rank. */
bool cma_can_read(struct group *g, int rank);

/* Whether the kernel lets peers read these buffers, of nbytes each: not what a driver has mapped. */
bool cma_is_readable(char *const *buffers, int n, int64_t nbytes);

/* From an address in that rank's memory. What is read is only right if the operation is not void afterwards. */
int cma_read(struct group *g, int rank, char *dst, uint64_t address, int64_t nbytes);

/* For messages, which know in other ways whether their sender has given up. False: not all could be read, or the rank
 * is dead, so that it may be another's. */
bool cma_get(struct group *g, int rank, char *dst, uint64_t address, uint64_t nbytes);

/* A door to a rank's memory that it can shut, in memory that both have mapped. The kernel looks at it when a write
 * begins: before that a writer may be stopped for as long as it likes, after that it is done in a moment. Behind it is
 * a threshold, which is overwritten first: a word at a place that no other process has, also one that was forked, so
 * that nothing is written when the rank is dead and its number another's. */
struct cma_door {
    _Atomic uint64_t address; /* of the threshold, or none that can be written. Only the rank itself writes it */
    uint64_t word_bytes;
    struct iovec target; /* only the writer writes it */
};

/* Its address; 0: there could be none. */
uint64_t cma_make_threshold(void);
void cma_drop_threshold(uint64_t threshold);
void cma_open_door(struct cma_door *door, uint64_t threshold);
void cma_shut_door(struct cma_door *door);
/* False: the door was shut, or not all could be written. */
bool cma_put(struct group *g, int rank, struct cma_door *door, uint64_t address, const char *src, uint64_t nbytes);
