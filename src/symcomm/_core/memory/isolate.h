/* Takes parts of this rank's arena, to which a stopped peer may still write, out of the shared memory. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* How long a rank first waits for peers that write to its memory: processes may be stopped, threads are only slow. */
#define SOON_ENOUGH_NS 1000000000
#define LONG_ENOUGH_NS 10000000000

/* Gives these bytes, and all that shares a page with them, other memory with the same contents at the same address.
 * Peers keep the old pages: from then on neither side sees what the other writes. This lasts as long as the arena.
 * False: there was no memory. */
bool isolate(char *at, int64_t nbytes);
/* Whether any of these bytes was isolated. Such memory is not symmetric any more. */
bool is_isolated(const char *at, int64_t nbytes);
/* Whether `at` is isolated; `end` moves to where that changes, if it does before. For forked children, which have no
 * other threads. */
bool isolated_part(const char *at, char **end);
/* The addresses are used for something else. */
void isolate_forget(const char *at, int64_t nbytes);
