/* Parts of this rank's arena that a stopped peer may still write to, taken out of what is shared. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* How long a rank waits for peers that write to its memory before it does that: processes may be stopped, threads only
 * be slow. */
#define SOON_ENOUGH_NS 1000000000
#define LONG_ENOUGH_NS 10000000000

/* Gives these bytes, and what shares a page with them, other memory with the same contents at the same address. Peers
 * that have the arena mapped keep the old pages: nothing they write is seen here any more, and nothing that is written
 * here by them. It is for the rest of the arena's life. False: there was no memory. */
bool isolate(char *at, int64_t nbytes);
/* Whether any of these bytes was isolated. Such memory is not symmetric any more. */
bool is_isolated(const char *at, int64_t nbytes);
/* Whether `at` is isolated; `end` moves to where that changes, if it does before. For forked children, which have no
 * other threads. */
bool isolated_part(const char *at, char **end);
/* The addresses are used for something else. */
void isolate_forget(const char *at, int64_t nbytes);
