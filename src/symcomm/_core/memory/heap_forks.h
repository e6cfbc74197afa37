/* Which forked children still live. Forks are numbered from 1. Memory in use at a fork belongs to the child as well.
 *
 * A child holds one end of a pipe. When it closes, the child and all its own children have ended or become other
 * programs. All functions are called with the heap's lock held. */
#pragma once

#include <stdint.h>

void heap_forks_before(void);
void heap_forks_in_parent(void);
void heap_forks_in_child(void);
/* How many forks there were. */
uint32_t heap_forks_count(void);
/* The last fork whose child lives, as of the last look; 0: none does. Memory older than that fork may not be reused. */
uint32_t heap_forks_newest(void);
void heap_forks_look(void);
