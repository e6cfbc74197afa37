/* The shared heap: memory for ordinary tensors out of this rank's arena, so that peers read them where they are.
 *
 * It hands out whole pages of one range of the arena. What it guarantees, beside being malloc:
 *   - A range whose pages isolate() replaced is never handed out again.
 *   - It holds no more memory than the program itself held in the last second or two. It keeps freed pages that long
 * for the next tensor, which spares it page faults, and then gives them back to the kernel.
 *   - A forked child keeps what it was forked with: its own writes are its own, and what the parent frees is not reused
 *     while the child lives. The child's new tensors are ordinary ones, until it opens a heap in an arena of its own.
 *
 * All functions may be called by any thread, and none of them waits for anything but the heap's own lock. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct heap_stats {
    int64_t live, idle, held, most; /* bytes: in use; freed and kept; freed, but a forked child has them; most in use */
    int64_t served, full;           /* allocations made here, and those there was no room for */
};

/* Opens the heap over a range of a shared mapping of `fd`, which must stay mapped for ever. Returns 0, or an errno. */
int heap_open(char *base, int64_t bytes, int fd, int64_t offset);
/* NULL: the heap is not open here, or has no such range. */
void *heap_allocate(size_t bytes);
/* Whether it lies in the heap, or in one that this process was forked with. */
bool heap_owns(const void *at);
void heap_free(void *at);
/* Gives back idle pages whose time has come. Cheap enough to be called at every allocation of any kind. */
void heap_tick(void);
struct heap_stats heap_stats(void);
