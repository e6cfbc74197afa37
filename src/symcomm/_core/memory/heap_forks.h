/* Which forked children still live. Forks are numbered from 1. Memory that was in use at a fork is the child's, too.
 *
 * A child holds one end of a pipe. By that the kernel says when the child, and all that it forked, have ended or become
 * another program. All functions are called with the heap's lock held. */
#pragma once

#include <stdint.h>

void heap_forks_before(void);
void heap_forks_in_parent(void);
void heap_forks_in_child(void);
/* How many there were. */
uint32_t heap_forks_count(void);
/* The last one whose child lives, as of the last look; 0: none does. What was made before it may not be reused. */
uint32_t heap_forks_newest(void);
void heap_forks_look(void);
