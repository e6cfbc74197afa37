/* Isolates parts of this rank's arena from stopped peers, which may still write to them. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* How long a rank first waits for peers that write to its memory: processes may be stopped, threads are only slow. */
#define SOON_ENOUGH_NS 1000000000
#define LONG_ENOUGH_NS 10000000000

/* Replaces the pages of these bytes by private copies, at the same address. Peers keep the old pages: from then on
 * neither side sees what the other writes, for as long as the arena lives. False: there was no memory. */
bool isolate(char *at, int64_t nbytes);
/* Whether any of these bytes was isolated, and so is not symmetric any more. */
bool is_isolated(const char *at, int64_t nbytes);
/* Whether `at` is isolated. If that changes before `end`, `end` moves there. For forked children, which have no other
 * threads. */
bool isolated_part(const char *at, char **end);
/* Forgets addresses that will be used for something else. */
void isolate_forget(const char *at, int64_t nbytes);
