/* The shared heap: memory for ordinary tensors in this rank's arena, so that peers read them in place.
 *
 * It hands out whole pages of one range of the arena. Beyond what malloc guarantees:
 *   - A range whose pages isolate() replaced is never handed out again.
 *   - It holds no more memory than the program held in the last second or two. It keeps freed pages that long, to
 *     spare the next tensor page faults, and then gives them back to the kernel.
 *   - A forked child keeps what it was forked with: its own writes are its own, and what the parent frees is not reused
 *     while the child lives. The child's new tensors are ordinary ones, until it opens a heap in an arena of its own.
 *
 * Any thread may call any function; none waits for anything but the heap's own lock. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct heap_stats {
    int64_t live, idle, held, most; /* bytes: in use; freed and kept; freed, but a forked child has them; most in use */
    int64_t served, full;           /* allocations made here, and those for which there was no room */
};

/* Opens the heap over a range of a shared mapping of `fd`, which must stay mapped forever. Returns 0, or an errno. */
int heap_open(char *base, int64_t bytes, int fd, int64_t offset);
/* NULL: the heap is not open here, or has no such free range. */
void *heap_allocate(size_t bytes);
/* Whether an address lies in the heap, or in one that this process inherited by fork(). */
bool heap_owns(const void *at);
void heap_free(void *at);
/* Gives back pages that have been idle for long enough. Cheap enough to call at every allocation of any kind. */
void heap_tick(void);
struct heap_stats heap_stats(void);
