/* Keeps account of which pages of a stretch of memory are in use. Touches no page and takes no lock.
 *
 * Free ranges are *kept* (their pages hold memory) or *clean* (they have been given back). Neighbours of one kind
 * merge. The first and the last page of a free range know its length, so merging costs the same however many pages
 * there are.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum page_state { USED = 1, KEPT, CLEAN };

struct page {
    uint32_t pages;      /* of the range that begins here; of a free range, also at its last page */
    uint32_t next, prev; /* in its bin; 0: none */
    uint32_t stamp;      /* free: when it was freed; in use: the last fork before it was made */
    uint8_t state;       /* right at the first and the last page of every range */
};

enum { BINS = 128 }; /* four sizes to a doubling */

struct page_ranges {
    struct page *page; /* page 0 and the one behind the last are never free, so neighbours need no checks */
    uint32_t count;
    uint32_t bin[2][BINS];         /* first range of each size; [0]: kept, [1]: clean */
    uint64_t filled[2][BINS / 64]; /* which bins have any */
};

bool page_ranges_open(struct page_ranges *r, uint32_t count);
/* Takes `pages` from a free range of that kind; 0: there is none so large. */
uint32_t page_ranges_take(struct page_ranges *r, enum page_state kind, uint32_t pages, uint32_t stamp);
/* Gives back a range in use. */
void page_ranges_give(struct page_ranges *r, uint32_t first, enum page_state kind, uint32_t stamp);
/* Takes whole kept ranges, whose pages the caller gives back: the largest, or (linked by `next`) all that were freed
 * before `stamp`. 0: there is none. */
uint32_t page_ranges_take_largest(struct page_ranges *r);
uint32_t page_ranges_take_stale(struct page_ranges *r, uint32_t stamp);
