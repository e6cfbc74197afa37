#include "memory/page_ranges.h"

#include <string.h>
#include <sys/mman.h>

#define LOOKS 16 /* how many ranges of the smallest possible bin are tried */

bool page_ranges_open(struct page_ranges *r, uint32_t count) {
    memset(r, 0, sizeof *r);
    size_t bytes = ((size_t)count + 1) * sizeof *r->page;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return false;
    r->page = at;
    r->count = count;
    r->page[0] = (struct page){.pages = 1, .state = USED};
    r->page[count].state = USED;
    r->page[1] = (struct page){.pages = count - 1, .state = USED};
    page_ranges_give(r, 1, CLEAN, 0);
    return true;
}

/* 1, 2, 3, 4, then four sizes to each doubling. */
static int bin_of(uint32_t pages) {
    if (pages < 4) return (int)pages;
    int log = 31 - __builtin_clz(pages);
    return 4 * (log - 1) + (int)(pages >> (log - 2) & 3);
}

static void link_range(struct page_ranges *r, uint32_t first, enum page_state kind, uint32_t pages, uint32_t stamp) {
    int k = kind == CLEAN, b = bin_of(pages);
    struct page *p = &r->page[first];
    *p = (struct page){.pages = pages, .next = r->bin[k][b], .stamp = stamp, .state = (uint8_t)kind};
    if (pages > 1) r->page[first + pages - 1] = (struct page){.pages = pages, .state = (uint8_t)kind};
    if (p->next) r->page[p->next].prev = first;
    r->bin[k][b] = first;
    r->filled[k][b / 64] |= 1ULL << (b % 64);
}

static void unlink_range(struct page_ranges *r, uint32_t first) {
    struct page *p = &r->page[first];
    int k = p->state == CLEAN, b = bin_of(p->pages);
    if (p->next) r->page[p->next].prev = p->prev;
    if (p->prev) r->page[p->prev].next = p->next;
    else if ((r->bin[k][b] = p->next) == 0) r->filled[k][b / 64] &= ~(1ULL << (b % 64));
}

static uint32_t first_filled(const struct page_ranges *r, int k, int from) {
    for (int word = from / 64; word < BINS / 64; word++) {
        uint64_t bits = r->filled[k][word];
        if (word == from / 64) bits &= ~0ULL << (from % 64);
        if (bits) return r->bin[k][64 * word + __builtin_ctzll(bits)];
    }
    return 0;
}

/* Ranges of larger bins are all large enough; of those in the size's own bin, some may be. */
static uint32_t find_range(const struct page_ranges *r, int k, uint32_t pages) {
    int b = bin_of(pages), looks = LOOKS;
    for (uint32_t at = r->bin[k][b]; at && looks; at = r->page[at].next, looks--)
        if (r->page[at].pages >= pages) return at;
    return b + 1 < BINS ? first_filled(r, k, b + 1) : 0;
}

/* Marks the last page as well: freeing the next range looks at it. */
static void mark_used(struct page_ranges *r, uint32_t first, uint32_t pages, uint32_t stamp) {
    r->page[first + pages - 1].state = USED;
    r->page[first] = (struct page){.pages = pages, .stamp = stamp, .state = USED};
}

uint32_t page_ranges_take(struct page_ranges *r, enum page_state kind, uint32_t pages, uint32_t stamp) {
    uint32_t first = find_range(r, kind == CLEAN, pages);
    if (first == 0) return 0;
    uint32_t rest = r->page[first].pages - pages, freed = r->page[first].stamp;
    unlink_range(r, first);
    if (rest) link_range(r, first + pages, kind, rest, freed);
    mark_used(r, first, pages, stamp);
    return first;
}

uint32_t page_ranges_take_largest(struct page_ranges *r) {
    for (int b = BINS - 1; b > 0; b--)
        if (r->bin[0][b]) {
            uint32_t first = r->bin[0][b];
            unlink_range(r, first);
            mark_used(r, first, r->page[first].pages, 0);
            return first;
        }
    return 0;
}

uint32_t page_ranges_take_stale(struct page_ranges *r, uint32_t stamp) {
    uint32_t taken = 0;
    for (int b = 0; b < BINS; b++)
        for (uint32_t at = r->bin[0][b], next; at; at = next) {
            next = r->page[at].next;
            if ((int32_t)(r->page[at].stamp - stamp) >= 0) continue;
            unlink_range(r, at);
            mark_used(r, at, r->page[at].pages, 0);
            r->page[at].next = taken;
            taken = at;
        }
    return taken;
}

void page_ranges_give(struct page_ranges *r, uint32_t first, enum page_state kind, uint32_t stamp) {
    uint32_t pages = r->page[first].pages, after = first + pages;
    if (r->page[after].state == kind) {
        pages += r->page[after].pages;
        unlink_range(r, after);
    }
    if (r->page[first - 1].state == kind) {
        uint32_t before = r->page[first - 1].pages;
        first -= before;
        pages += before;
        unlink_range(r, first);
    }
    link_range(r, first, kind, pages, stamp);
}
