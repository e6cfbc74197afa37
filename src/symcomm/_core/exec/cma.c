/* See exec/cma.h. */
#include "exec/cma.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "memory/life.h"
#include "module/module.h"
#include "sync/fail.h"

#define AT_ONCE (16 << 20) /* bytes read between two looks at the group: some milliseconds */
#define MAX_PROBED 256     /* buffers: two places of each make one system call of at most 1,024 */

enum { UNKNOWN, READABLE, REFUSED };

void cma_introduce(const struct visit *v) {
    struct control *me = block_of(v, v->group->rank);
    uint64_t token = 0;
    if (getrandom(&token, sizeof token, GRND_NONBLOCK) != sizeof token) token = 0;
    atomic_store(&me->token, token);
    atomic_store(&me->token_address, (uint64_t)(uintptr_t)&me->token);
}

static ssize_t read_from(pid_t pid, void *dst, uint64_t address, size_t nbytes) {
    struct iovec local = {dst, nbytes}, remote = {(void *)(uintptr_t)address, nbytes}; /* NOLINT: the peer's address */
    return process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

/* The thread whose death the kernel marks in the rank's life. Until then no other thread gets its number. */
static pid_t owner_of(struct group *g, int rank) {
    return (pid_t)(atomic_load_explicit(g->life[rank], memory_order_acquire) & FUTEX_TID_MASK);
}

bool cma_can_read(const struct visit *v, int rank) {
    struct group *g = v->group;
    if (!g->own_process || rank == g->rank) return rank == g->rank;
    struct control *peer = block_of(v, rank);
    if (g->readable[rank] == UNKNOWN && atomic_load(&peer->state) == CONTROL_IN_USE) { /* it has introduced itself */
        uint64_t token = 0, expected = atomic_load(&peer->token);
        ssize_t got = read_from(owner_of(g, rank), &token, atomic_load(&peer->token_address), sizeof token);
        /* Another token: a process of another pid namespace has that number here. */
        g->readable[rank] = got == sizeof token && expected && token == expected ? READABLE : REFUSED;
    }
    return g->readable[rank] == READABLE;
}

bool cma_is_readable(char *const *buffers, int n, int64_t nbytes) {
    struct iovec ends[2 * MAX_PROBED];
    char bytes[2 * MAX_PROBED];
    if (n < 1 || n > MAX_PROBED || nbytes < 1) return false;
    for (int i = 0; i < n; i++) {
        ends[2 * i] = (struct iovec){buffers[i], 1};
        ends[2 * i + 1] = (struct iovec){buffers[i] + nbytes - 1, 1};
    }
    struct iovec local = {bytes, (size_t)(2 * n)};
    return process_vm_readv(getpid(), &local, 1, ends, (unsigned long)(2 * n), 0) == 2 * n;
}

int cma_read(const struct visit *v, int rank, char *dst, uint64_t address, int64_t nbytes) {
    struct group *g = v->group;
    for (int64_t done = 0; done < nbytes;) {
        size_t n = (size_t)(nbytes - done < AT_ONCE ? nbytes - done : AT_ONCE);
        ssize_t got = read_from(owner_of(g, rank), dst + done, address + (uint64_t)done, n);
        int error = got < 0 ? errno : got == 0 ? EFAULT : 0;
        /* If it is gone, we may have read another process's memory. */
        int gone = error == ESRCH ? STATUS_DEAD : sync_marked_gone(v, rank);
        if (gone) return sync_fail(v, gone, rank);
        if (sync_is_void(v, g->seq)) return sync_aborted(v); /* the tensor is its owner's again */
        if (error && error != EINTR) return sync_fail(v, STATUS_UNREADABLE, rank);
        if (got > 0) done += got;
    }
    return STATUS_OK;
}

bool cma_get(struct group *g, int rank, char *dst, uint64_t address, uint64_t nbytes) {
    pid_t owner = owner_of(g, rank);
    for (uint64_t done = 0; done < nbytes;) {
        size_t n = (size_t)(nbytes - done < AT_ONCE ? nbytes - done : AT_ONCE);
        ssize_t got = read_from(owner, dst + done, address + done, n);
        /* The kernel marks a life before it can reuse the pid. */
        if (got <= 0 || life_has_ended(g->life[rank]) || owner_of(g, rank) != owner) return false;
        done += (uint64_t)got;
    }
    return true;
}

#define TRIES 16
#define USER_PAGES ((uint64_t)0x3ffffffff) /* below 64 TiB, where x86-64 puts next to nothing by itself */
#define NOWHERE (~(uint64_t)7)             /* not even a process that has mapped address 0 can write there */

uint64_t cma_make_guard(void) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), random;
    for (int i = 0; i < TRIES; i++) {
        if (getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random) return 0;
        void *wanted = (void *)(uintptr_t)((random & USER_PAGES) * page); /* NOLINT: an address */
        void *at = mmap(wanted, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) continue;
        if (at == wanted && madvise(at, page, MADV_DONTFORK) == 0) return (uint64_t)(uintptr_t)at;
        munmap(at, page);
    }
    return 0;
}

void cma_drop_guard(uint64_t guard) {
    if (guard) munmap((void *)(uintptr_t)guard, (size_t)sysconf(_SC_PAGESIZE)); /* NOLINT: an address */
}

void cma_grant_writes(struct cma_grant *grant, uint64_t guard) {
    grant->word_bytes = sizeof(uint64_t);
    atomic_store(&grant->address, guard ? guard : NOWHERE);
}

void cma_revoke_writes(struct cma_grant *grant) { atomic_store(&grant->address, NOWHERE); }

/* The kernel reads both, guard and target, as the call begins, and writes to them in this order. */
_Static_assert(offsetof(struct cma_grant, target) == sizeof(struct iovec), "a grant is two iovecs");

bool cma_put(struct group *g, int rank, struct cma_grant *grant, uint64_t address, const char *src, uint64_t nbytes) {
    uint64_t word = 0;
    struct iovec local[2] = {{&word, sizeof word}, {(void *)(uintptr_t)src, nbytes}}; /* NOLINT: only read */
    grant->target = (struct iovec){(void *)(uintptr_t)address, nbytes};               /* NOLINT: the peer's */
    const struct iovec *remote = (const struct iovec *)(const void *)grant;
    return process_vm_writev(owner_of(g, rank), local, 2, remote, 2, 0) == (ssize_t)(sizeof word + nbytes);
}
