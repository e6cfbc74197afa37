#include "memory/isolate.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct range {
    uintptr_t start, end;
};

static struct range *ranges;
static _Atomic int n_ranges; /* nearly always 0, and most callers look at nothing else */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool add_range(struct range new) {
    struct range *more = realloc(ranges, sizeof *ranges * (size_t)(n_ranges + 1));
    if (more == NULL) return false;
    ranges = more;
    ranges[n_ranges] = new;
    atomic_fetch_add(&n_ranges, 1);
    return true;
}

static bool replace_pages(struct range r) {
    size_t n = r.end - r.start;
    void *at = (void *)r.start; /* NOLINT: an address is what it is */
    void *copy = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return false;
    memcpy(copy, at, n);
    if (mremap(copy, n, n, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED) return true;
    munmap(copy, n);
    return false;
}

bool isolate(char *at, int64_t nbytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)at;
    struct range r = {start & ~(page - 1), (start + (uintptr_t)nbytes + page - 1) & ~(page - 1)};
    pthread_mutex_lock(&lock);
    bool done = add_range(r); /* first, so that it no longer counts as symmetric */
    if (done && !(done = replace_pages(r))) atomic_fetch_sub(&n_ranges, 1);
    pthread_mutex_unlock(&lock);
    return done;
}

bool is_isolated(const char *at, int64_t nbytes) {
    if (atomic_load_explicit(&n_ranges, memory_order_acquire) == 0) return false;
    uintptr_t start = (uintptr_t)at, end = start + (uintptr_t)nbytes;
    bool found = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_ranges && !found; i++) found = start < ranges[i].end && ranges[i].start < end;
    pthread_mutex_unlock(&lock);
    return found;
}

static uintptr_t nearer(uintptr_t from, uintptr_t border, uintptr_t end) {
    return from < border && border < end ? border : end;
}

bool isolated_part(const char *at, char **end) {
    uintptr_t from = (uintptr_t)at, to = (uintptr_t)*end;
    bool inside = false;
    for (int i = 0; i < n_ranges; i++) {
        inside = inside || (ranges[i].start <= from && from < ranges[i].end);
        to = nearer(from, ranges[i].end, nearer(from, ranges[i].start, to));
    }
    *end = (char *)to; /* NOLINT: an address is what it is */
    return inside;
}

void isolate_forget(const char *at, int64_t nbytes) {
    uintptr_t start = (uintptr_t)at, end = start + (uintptr_t)nbytes;
    pthread_mutex_lock(&lock);
    for (int i = n_ranges - 1; i >= 0; i--)
        if (ranges[i].start >= start && ranges[i].end <= end)
            ranges[i] = ranges[n_ranges - 1], atomic_fetch_sub(&n_ranges, 1);
    pthread_mutex_unlock(&lock);
}
