/* Cross-memory attach: one process reads another's memory by system call, which is one copy where staging takes two.
 * Slower than a copy through shared memory, so it pays where one rank would stage for many, or all would for all. */
#pragma once

#include "sync/sync.h"

/* What peers need in order to find out whether they may read this rank's memory. */
void cma_introduce(struct group *g);

/* Whether this process may read that rank's memory, and finds that rank's there. Asked once for each rank. */
bool cma_can_read(struct group *g, int rank);

/* Whether the kernel lets peers read these buffers, of nbytes each: not what a driver has mapped. */
bool cma_is_readable(char *const *buffers, int n, int64_t nbytes);

/* From an address in that rank's memory. What is read is only right if the operation is not void afterwards. */
int cma_read(struct group *g, int rank, char *dst, uint64_t address, int64_t nbytes);
