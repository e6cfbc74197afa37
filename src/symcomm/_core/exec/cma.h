/* Cross-memory attach: one process reads another's memory by system call, which is one copy where staging takes two.
 * Each such copy is slower than one through shared memory. So it pays if one rank would stage for many, if all would
 * for all, or if both ranks of a large message copy a part of it. */
#pragma once

#include <sys/uio.h>

#include "sync/fail.h"

/* Publishes what peers need to find out whether they may read this rank's memory. */
void cma_introduce(const struct visit *v);

/* Whether this process may read that rank's memory, and the pid is that rank's. Found out once for each rank. */
bool cma_can_read(const struct visit *v, int rank);

/* Whether the kernel lets peers read these buffers, of nbytes each. It refuses memory that a driver has mapped. */
bool cma_is_readable(char *const *buffers, int n, int64_t nbytes);

/* Reads from an address in that rank's memory. The bytes are right only if the operation is not void afterwards. */
int cma_read(const struct visit *v, int rank, char *dst, uint64_t address, int64_t nbytes);

/* The same for messages, which check by themselves whether their sender has given up. False: not all could be read, or
 * the rank is dead and its pid may be another process's. */
bool cma_get(struct group *g, int rank, char *dst, uint64_t address, uint64_t nbytes);

/* A rank's permission to write into its memory, which it can revoke; in memory that both have mapped. The kernel reads
 * it as a write begins: a writer may be stopped before that for any time, and is done in a moment after it. Each write
 * begins with a guard word of the rank's, at an address that no other process has, not even a forked one: if the rank
 * is dead and its pid reused, the write fails there and has changed nothing. */
struct cma_grant {
    _Atomic uint64_t address; /* of the guard word; one that cannot be written to revokes it. Only the rank sets it */
    uint64_t word_bytes;
    struct iovec target; /* only the writer writes it */
};

/* Makes a guard word. Returns its address, or 0 if it could not. */
uint64_t cma_make_guard(void);
void cma_drop_guard(uint64_t guard);
void cma_grant_writes(struct cma_grant *grant, uint64_t guard);
void cma_revoke_writes(struct cma_grant *grant);
/* False: the grant was revoked, or not all could be written. */
bool cma_put(struct group *g, int rank, struct cma_grant *grant, uint64_t address, const char *src, uint64_t nbytes);
