#include "memory/heap.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/heap_forks.h"
#include "memory/isolate.h"
#include "memory/page_ranges.h"
#include "os/clock.h"

#define WINDOW_MS 1000 /* how long idle pages are kept; the peak of use is remembered for up to twice that */
#define SWEEP_MS 100   /* between two looks for idle pages to give back */

struct heap {
    char *base;
    int64_t bytes;
    int64_t page; /* the system's */
    int fd;       /* of the mapping, and where the heap begins in it; forked children need them */
    int64_t offset;
    struct page_ranges ranges;
    struct heap_stats stats;
    int64_t most[2]; /* peak use in this window and in the one before */
    uint32_t window; /* when this one began */
    uint32_t held;   /* freed ranges that forked children have, linked by `next` */
    struct heap *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct heap *_Atomic current;
static struct heap *inherited; /* heaps of the processes that this one was forked from; only forks change it */
static _Atomic uint32_t swept;
static _Atomic bool restless; /* there are pages to give back sooner or later */

static uint32_t now_ms(void) {
    struct timespec t; /* every allocation asks; the coarse clock costs a quarter of the fine one */
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint32_t)((int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000);
}

static char *address_of(const struct heap *h, uint32_t range) { return h->base + range * h->page; }

static int64_t bytes_of(const struct heap *h, uint32_t range) { return h->ranges.page[range].pages * h->page; }

static uint32_t range_at(const struct heap *h, const void *at) { return (uint32_t)(((char *)at - h->base) / h->page); }

static bool within(const struct heap *h, const void *at) {
    return h != NULL && (uintptr_t)at - (uintptr_t)h->base < (uintptr_t)h->bytes;
}

/* Peak use within the last window or two. */
static int64_t recent_peak(struct heap *h, uint32_t now) {
    uint32_t windows = (now - h->window) / WINDOW_MS;
    if (windows > 0) {
        h->most[1] = windows == 1 ? h->most[0] : h->stats.live;
        h->most[0] = h->stats.live;
        h->window += windows * WINDOW_MS;
    }
    if (h->stats.live > h->most[0]) h->most[0] = h->stats.live;
    if (h->stats.live > h->stats.most) h->stats.most = h->stats.live;
    return h->most[0] > h->most[1] ? h->most[0] : h->most[1];
}

/* Gives a range's pages to the kernel. The lock is released meanwhile: the range is in no list, so no one else takes
 * it. */
static void give_pages_back(struct heap *h, uint32_t range) {
    int64_t bytes = bytes_of(h, range);
    h->stats.idle -= bytes;
    pthread_mutex_unlock(&lock);
    bool gone = madvise(address_of(h, range), (size_t)bytes, MADV_REMOVE) == 0;
    pthread_mutex_lock(&lock);
    if (!gone) h->stats.idle += bytes;
    page_ranges_give(&h->ranges, range, gone ? CLEAN : KEPT, now_ms());
}

/* Takes a freed range back. Memory that a stopped peer may still write to is lost for good. */
static void take_back(struct heap *h, uint32_t range, uint32_t now) {
    int64_t bytes = bytes_of(h, range);
    if (is_isolated(address_of(h, range), bytes)) {
        madvise(address_of(h, range), (size_t)bytes, MADV_DONTNEED);
        return;
    }
    h->stats.idle += bytes;
    page_ranges_give(&h->ranges, range, KEPT, now);
}

static void hold(struct heap *h, uint32_t range) {
    h->ranges.page[range].next = h->held;
    h->held = range;
}

static bool a_child_has(const struct heap *h, uint32_t range) {
    return h->ranges.page[range].stamp < heap_forks_newest();
}

/* Children may have ended since. */
static void take_back_held(struct heap *h, uint32_t now) {
    uint32_t list = h->held;
    heap_forks_look();
    h->held = 0;
    for (uint32_t next; list; list = next) {
        next = h->ranges.page[list].next;
        if (a_child_has(h, list)) {
            hold(h, list);
        } else {
            h->stats.held -= bytes_of(h, list);
            take_back(h, list, now);
        }
    }
}

static void sweep(struct heap *h, uint32_t now) {
    if (now - swept < SWEEP_MS) return;
    swept = now;
    if (heap_forks_newest()) take_back_held(h, now);
    uint32_t list = page_ranges_take_stale(&h->ranges, now - WINDOW_MS);
    for (uint32_t next; list; list = next) {
        next = h->ranges.page[list].next;
        give_pages_back(h, list);
    }
    restless = h->stats.idle + h->stats.held > 0;
}

static uint32_t take(struct heap *h, uint32_t pages) {
    uint32_t range = page_ranges_take(&h->ranges, KEPT, pages, heap_forks_count());
    if (range) h->stats.idle -= pages * h->page;
    return range ? range : page_ranges_take(&h->ranges, CLEAN, pages, heap_forks_count());
}

void *heap_allocate(size_t bytes) {
    struct heap *h = current;
    if (h == NULL || bytes > (size_t)h->bytes) return NULL;
    uint32_t pages = bytes ? (uint32_t)((bytes - 1) / (size_t)h->page) + 1 : 1, now = now_ms();
    pthread_mutex_lock(&lock);
    sweep(h, now);
    uint32_t range = take(h, pages);
    if (range) {
        h->stats.served++;
        h->stats.live += pages * h->page;
        int64_t most = recent_peak(h, now);
        for (uint32_t spare; h->stats.live + h->stats.idle > most;) {
            if ((spare = page_ranges_take_largest(&h->ranges)) == 0) break;
            give_pages_back(h, spare);
        }
    } else {
        h->stats.full++;
    }
    pthread_mutex_unlock(&lock);
    return range ? address_of(h, range) : NULL;
}

static struct heap *heap_of(const void *at) {
    if (within(current, at)) return current;
    for (struct heap *h = inherited; h; h = h->next)
        if (within(h, at)) return h;
    return NULL;
}

bool heap_owns(const void *at) { return heap_of(at) != NULL; }

static void free_here(struct heap *h, uint32_t range) {
    uint32_t now = now_ms();
    pthread_mutex_lock(&lock);
    h->stats.live -= bytes_of(h, range);
    if (a_child_has(h, range)) {
        h->stats.held += bytes_of(h, range);
        hold(h, range);
    } else {
        take_back(h, range, now);
    }
    restless = true;
    sweep(h, now);
    pthread_mutex_unlock(&lock);
}

void heap_free(void *at) {
    struct heap *h = heap_of(at);
    if (h == NULL) return;
    if (h == current) free_here(h, range_at(h, at));
    else madvise(at, (size_t)bytes_of(h, range_at(h, at)), MADV_DONTNEED); /* pages that this child has written */
}

void heap_tick(void) {
    struct heap *h = current;
    if (h == NULL || !restless || now_ms() - swept < SWEEP_MS) return;
    pthread_mutex_lock(&lock);
    sweep(h, now_ms());
    pthread_mutex_unlock(&lock);
}

struct heap_stats heap_stats(void) {
    struct heap *h = current;
    pthread_mutex_lock(&lock);
    struct heap_stats stats = h ? h->stats : (struct heap_stats){0};
    pthread_mutex_unlock(&lock);
    return stats;
}

static void before_fork(void) {
    pthread_mutex_lock(&lock);
    if (current) heap_forks_before();
}

static void after_fork_in_parent(void) {
    if (current) heap_forks_in_parent();
    pthread_mutex_unlock(&lock);
}

/* In a forked child: it reads what is there, and its writes stay its own. If that is impossible, it may not write. */
static void make_private(struct heap *h) {
    for (char *at = h->base, *end = h->base + h->bytes, *next; at < end; at = next) {
        next = end;
        if (isolated_part(at, &next)) continue; /* already has pages of its own */
        int64_t offset = h->offset + (at - h->base);
        int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap(at, (size_t)(next - at), PROT_READ | PROT_WRITE, flags, h->fd, offset) == MAP_FAILED)
            mprotect(at, (size_t)(next - at), PROT_READ);
    }
}

static void after_fork_in_child(void) {
    struct heap *h = current;
    if (h != NULL) {
        heap_forks_in_child();
        make_private(h);
        h->next = inherited;
        inherited = h;
        current = NULL;
    }
    pthread_mutex_init(&lock, NULL);
}

int heap_open(char *base, int64_t bytes, int fd, int64_t offset) {
    static bool watches_forks;
    if (current) return EBUSY;
    struct heap *h = calloc(1, sizeof *h);
    if (h == NULL) return ENOMEM;
    *h = (struct heap){.base = base, .bytes = bytes, .fd = fd, .offset = offset, .window = now_ms()};
    h->page = sysconf(_SC_PAGESIZE);
    int error = page_ranges_open(&h->ranges, (uint32_t)(bytes / h->page)) ? 0 : errno;
    if (!error && !watches_forks) error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (error) {
        free(h);
        return error;
    }
    watches_forks = true;
    current = h;
    return 0;
}
