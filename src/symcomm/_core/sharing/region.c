#include "sharing/region.h"

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/nontemporal.h"
#include "module/gil.h"
#include "module/module.h"
#include "os/futex.h"
#include "sharing/queue.h"
#include "sync/wait.h"

#define MAGIC 0x53594D5348415245
#define LOOKS 200       /* at most a few microseconds, before the clock is asked */
#define LOOK_NS 20000   /* then the core is offered */
#define OFFER_NS 100000 /* then it is time to sleep */
#define SHORT_COPY (64 << 10)

/* --- readers ------------------------------------------------------------------------------------------------------ */

static bool has_ended(struct region *r, int reader) {
    _Atomic uint32_t *word = &r->readers[reader].life.word;
    return atomic_load(word) == 0 || life_has_ended(word) || life_dumps_core(word);
}

int region_find_gone(struct region *r) {
    uint64_t readers = region_readers(r), left = atomic_load(&r->left) & readers;
    if (left) return __builtin_ctzll(left);
    for (readers |= atomic_load(&r->leaving); readers; readers &= readers - 1)
        if (has_ended(r, __builtin_ctzll(readers))) return __builtin_ctzll(readers);
    return -1;
}

int region_writer_gone(struct region *r) {
    if (atomic_load(&r->closed)) return STATUS_LEFT;
    return life_has_ended(&r->writer.word) || life_dumps_core(&r->writer.word) ? STATUS_DEAD : STATUS_OK;
}

void bell_ring(struct bell *b) {
    atomic_fetch_add(&b->word, 1);
    if (atomic_load(&b->sleepers)) futex_wake(&b->word, INT_MAX);
}

void region_let_go(struct region *r, int part, uint64_t bits) {
    uint64_t before = atomic_fetch_and(&r->parts[part].holders, ~bits);
    if ((before & ~bits) == 0) bell_ring(&r->room);
}

/* A reader's place that is free, or whose user died before it was ready; -1: there is none. Callers hold the region's
 * lock. */
static int claim(struct region *r) {
    uint64_t busy = region_readers(r) | atomic_load(&r->leaving);
    for (int i = 0; i < MOST_READERS; i++) {
        uint32_t word = atomic_load(&r->readers[i].life.word);
        if (!(busy >> i & 1) && (word == 0 || word & LIFE_OWNER_DIED)) return i;
    }
    return -1;
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

struct sleep {
    struct wait wait;
    const struct region_wait *what;
    int culprit;
};

static bool is_over(struct wait *w) {
    const struct region_wait *what = ((struct sleep *)w)->what;
    return what->is_over(what);
}

static int find_gone(struct wait *w, int *culprit) {
    const struct region_wait *what = ((struct sleep *)w)->what;
    return what->find_gone(what, culprit);
}

static int give_up(struct wait *w, int status, int culprit) {
    ((struct sleep *)w)->culprit = culprit;
    return status;
}

static const struct wait_kind for_region = {
    .is_over = is_over, .find_gone = find_gone, .give_up = give_up, .dozes = true};

static bool look(const struct region_wait *what, int64_t start) {
    for (int i = 0; i < LOOKS; i++, cpu_relax())
        if (what->is_over(what)) return true;
    for (int64_t now; (now = symcomm_now_ns()) < start + OFFER_NS;) {
        if (what->is_over(what)) return true;
        if (now < start + LOOK_NS) cpu_relax();
        else sched_yield();
    }
    return what->is_over(what);
}

int region_wait(struct region_wait *what, int64_t timeout, int *culprit) {
    *culprit = -1;
    if (what->is_over(what)) return STATUS_OK;
    if (timeout <= 0) {
        int status = what->find_gone(what, culprit);
        return what->is_over(what) ? STATUS_OK : status ? status : STATUS_TIMEOUT;
    }
    int status = STATUS_OK;
    int64_t start = symcomm_now_ns();
    struct sleep s = {
        .wait = {.kind = &for_region,
                 .bell = &what->bell->word,
                 .sleepers = &what->bell->sleepers,
                 .missing = -1,
                 .deadline = start + timeout},
        .what = what,
        .culprit = -1,
    };
    WITHOUT_GIL({
        if (!look(what, start)) status = wait_loop(&s.wait);
    });
    *culprit = s.culprit;
    return status;
}

/* --- for Python --------------------------------------------------------------------------------------------------- */

/* region_start(address, kind, nonce, pid): makes the control block of a new region, whose bytes are all zero. */
static PyObject *region_start(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, kind;
    const char *nonce;
    Py_ssize_t n;
    long long pid;
    if (!PyArg_ParseTuple(args, "KKy#L", &address, &kind, &nonce, &n, &pid)) return NULL;
    struct region *r = region_at(address);
    if (n != (Py_ssize_t)sizeof r->nonce) return PyErr_Format(PyExc_ValueError, "a nonce has 16 bytes");
    memcpy(r->nonce, nonce, sizeof r->nonce);
    atomic_store(&r->writer_pid, pid);
    r->kind = kind;
    for (int i = 0; i < REGION_PARTS; i++) atomic_store(&r->parts[i].holders, PART_IS_FREE);
    atomic_thread_fence(memory_order_release);
    r->magic = MAGIC;
    Py_RETURN_NONE;
}

static PyObject *region_claim(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    return r ? PyLong_FromLong(claim(r)) : NULL;
}

/* region_ready(address, reader, pid): the reader lives, and the writer may take it in. */
static PyObject *region_ready(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int reader;
    long long pid;
    if (!PyArg_ParseTuple(args, "KiL", &address, &reader, &pid)) return NULL;
    struct region *r = region_at(address);
    atomic_store(&r->readers[reader].pid, pid);
    atomic_fetch_or(&r->ready, (uint64_t)1 << reader);
    bell_ring(&r->room);
    Py_RETURN_NONE;
}

static PyObject *region_leave(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int reader;
    if (!PyArg_ParseTuple(args, "Ki", &address, &reader)) return NULL;
    struct region *r = region_at(address);
    atomic_fetch_or(&r->left, (uint64_t)1 << reader);
    bell_ring(&r->room);
    bell_ring(&r->news); /* for another waiting thread of this reader */
    Py_RETURN_NONE;
}

/* region_gone(address) -> (reader, whether it died while it was sent messages), or None: the reader to drop next.
 */
static PyObject *region_gone(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    if (r == NULL) return NULL;
    int gone = region_find_gone(r);
    if (gone < 0) Py_RETURN_NONE;
    bool said = (atomic_load(&r->left) | atomic_load(&r->leaving)) >> gone & 1;
    return Py_BuildValue("iO", gone, said ? Py_False : Py_True);
}

/* Sends a reader nothing more. Its place is free for others once it has ended, and so holds nothing. */
static void drop(struct region *r, int reader) {
    uint64_t bit = (uint64_t)1 << reader;
    atomic_fetch_or(&r->leaving, bit);
    atomic_fetch_and(&r->active, ~bit);
    atomic_fetch_and(&r->ready, ~bit);
    atomic_fetch_and(&r->left, ~bit);
    queue_forget(r, bit);
    if (!has_ended(r, reader)) return;
    for (int i = 0; i < REGION_PARTS; i++)
        if (atomic_load_explicit(&r->parts[i].holders, memory_order_relaxed) & bit) region_let_go(r, i, bit);
    atomic_store(&r->readers[reader].life.word, 0);
    atomic_fetch_and(&r->leaving, ~bit);
}

/* region_drop(address, reader) -> its process id */
static PyObject *region_drop(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int reader;
    if (!PyArg_ParseTuple(args, "Ki", &address, &reader)) return NULL;
    struct region *r = region_at(address);
    long long pid = atomic_load(&r->readers[reader].pid);
    drop(r, reader);
    return PyLong_FromLongLong(pid);
}

/* region_facts(address) -> a dict of what the control block says. */
static PyObject *region_facts(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    if (r == NULL) return NULL;
    uint64_t ready = atomic_load(&r->ready), active = atomic_load(&r->active), all = ready | active;
    PyObject *readers = PyDict_New();
    for (; readers && all; all &= all - 1) {
        int i = __builtin_ctzll(all);
        uint64_t next = active >> i & 1 ? atomic_load(&r->readers[i].next) : atomic_load(&r->head);
        PyObject *key = PyLong_FromLong(i);
        PyObject *value = Py_BuildValue("LK", (long long)atomic_load(&r->readers[i].pid), (unsigned long long)next);
        if (key == NULL || value == NULL || PyDict_SetItem(readers, key, value) < 0) Py_CLEAR(readers);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    if (readers == NULL) return NULL;
    return Py_BuildValue("{sKsLsNsKsNsN}", "kind", (unsigned long long)(r->magic == MAGIC ? r->kind : 0), "writer",
                         (long long)atomic_load(&r->writer_pid), "nonce",
                         PyBytes_FromStringAndSize((const char *)r->nonce, sizeof r->nonce), "head",
                         (unsigned long long)atomic_load(&r->head), "closed",
                         PyBool_FromLong(atomic_load(&r->closed) != 0), "readers", readers);
}

static PyObject *region_close(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    if (r == NULL) return NULL;
    atomic_store(&r->closed, 1);
    bell_ring(&r->news);
    bell_ring(&r->room); /* for another waiting thread of the writer */
    Py_RETURN_NONE;
}

static bool has_rung(const struct region_wait *w) { return atomic_load(&w->region->room.word) != (uint32_t)w->a; }

int region_reader_gone(const struct region_wait *w, int *culprit) {
    *culprit = region_find_gone(w->region);
    return *culprit < 0 && !atomic_load(&w->region->closed) ? STATUS_OK : STATUS_LEFT;
}

/* region_await_room(address, seen, timeout_ns) -> status: waits until a reader has released something, has come or is
 * gone.
 */
static PyObject *region_await_room(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, seen;
    long long timeout;
    int culprit;
    if (!PyArg_ParseTuple(args, "KKL", &address, &seen, &timeout)) return NULL;
    struct region *r = region_at(address);
    struct region_wait w = {
        .region = r, .is_over = has_rung, .find_gone = region_reader_gone, .bell = &r->room, .a = seen};
    int status = region_wait(&w, timeout, &culprit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return PyLong_FromLong(status);
}

/* region_room(address) -> what to hand to region_await_room() */
static PyObject *region_room(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    return r ? PyLong_FromUnsignedLong(atomic_load(&r->room.word)) : NULL;
}

/* region_news(address) -> what to hand to queue_await() */
static PyObject *region_news(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    return r ? PyLong_FromUnsignedLong(atomic_load(&r->news.word)) : NULL;
}

/* --- parts -------------------------------------------------------------------------------------------------------- */

/* part_release(address, part, reader) */
static PyObject *part_release(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int part, reader;
    if (!PyArg_ParseTuple(args, "Kii", &address, &part, &reader)) return NULL;
    region_let_go(region_at(address), part, (uint64_t)1 << reader);
    Py_RETURN_NONE;
}

/* part_take_back(address, part) -> whether no reader holds the part. Then none can take it any more. */
static PyObject *part_take_back(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int part;
    if (!PyArg_ParseTuple(args, "Ki", &address, &part)) return NULL;
    uint64_t nobody = 0;
    return PyBool_FromLong(
        atomic_compare_exchange_strong(&region_at(address)->parts[part].holders, &nobody, PART_IS_FREE));
}

/* copy_in(to, from, bytes), of which there may be many */
static PyObject *copy_in(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long to, from;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "KKn", &to, &from, &n)) return NULL;
    struct caller c;
    gil_enter(&c, n < SHORT_COPY);
    nt_copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, (size_t)n, nt_pays((uint64_t)n));
    gil_leave(&c);
    Py_RETURN_NONE;
}

/* map_private(fd, offset, bytes) -> address: writes to it stay in this process. */
static PyObject *map_private(PyObject *Py_UNUSED(self), PyObject *args) {
    int fd;
    long long offset, bytes;
    if (!PyArg_ParseTuple(args, "iLL", &fd, &offset, &bytes)) return NULL;
    void *at = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, offset);
    if (at == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromVoidPtr(at);
}

#define PAGE_IS_THERE ((uint64_t)3 << 62) /* in memory, or swapped out */
#define PAGE_IS_SHARED ((uint64_t)1 << 61)

static bool some_are_own(int fd, uint64_t first, uint64_t end) {
    uint64_t facts[1024];
    for (uint64_t page = first; page < end;) {
        size_t want = end - page < 1024 ? end - page : 1024;
        ssize_t got = pread(fd, facts, want * sizeof *facts, (off_t)(page * sizeof *facts));
        if (got < (ssize_t)sizeof *facts) return true;
        for (ssize_t i = 0; i < got / (ssize_t)sizeof *facts; i++)
            if (facts[i] & PAGE_IS_THERE && !(facts[i] & PAGE_IS_SHARED)) return true;
        page += (uint64_t)got / sizeof *facts;
    }
    return false;
}

/* has_own_pages(address, bytes) -> whether this process has written to a private mapping. True if the kernel does not
 * tell. */
static PyObject *has_own_pages(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &bytes)) return NULL;
    bool some = true;
    WITHOUT_GIL({
        const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC); /* one that is kept would be a parent's in a fork */
        if (fd >= 0) {
            some = some_are_own(fd, address / page, (address + bytes + page - 1) / page);
            close(fd);
        }
    });
    return PyBool_FromLong(some);
}

static PyMethodDef methods[] = {
    METHOD(region_start, METH_VARARGS, "(address, kind, nonce, pid)"),
    METHOD(region_claim, METH_O, "(address) -> a reader's place, or -1"),
    METHOD(region_ready, METH_VARARGS, "(address, reader, pid)"),
    METHOD(region_leave, METH_VARARGS, "(address, reader)"),
    METHOD(region_gone, METH_O, "(address) -> (reader, whether it died), or None"),
    METHOD(region_drop, METH_VARARGS, "(address, reader) -> its process id"),
    METHOD(region_facts, METH_O, "(address) -> dict"),
    METHOD(region_close, METH_O, "(address)"),
    METHOD(region_room, METH_O, "(address) -> what the writer's bell shows"),
    METHOD(region_news, METH_O, "(address) -> what the readers' bell shows"),
    METHOD(region_await_room, METH_VARARGS, "(address, what the bell showed, timeout_ns) -> status"),
    METHOD(part_release, METH_VARARGS, "(address, part, reader)"),
    METHOD(part_take_back, METH_VARARGS, "(address, part) -> whether no reader holds it"),
    METHOD(copy_in, METH_VARARGS, "(to, from, bytes)"),
    METHOD(map_private, METH_VARARGS, "(fd, offset, bytes) -> address"),
    METHOD(has_own_pages, METH_VARARGS, "(address, bytes) -> whether this process has written there"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    {"REGION_QUEUE", QUEUE},
    {"REGION_BOARD", BOARD},
    {"REGION_CONTROL_BYTES", sizeof(struct region)},
    {"REGION_READERS", MOST_READERS},
    {"REGION_PARTS", REGION_PARTS},
    {"REGION_WRITER_LIFE", offsetof(struct region, writer)},
    {"REGION_FIRST_LIFE", offsetof(struct region, readers) + offsetof(struct region_reader, life)},
    {"REGION_READER_BYTES", sizeof(struct region_reader)},
    {NULL, 0},
};

int symcomm_add_region(PyObject *module) { return symcomm_add_part(module, methods, constants); }
