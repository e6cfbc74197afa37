/* Memory that ranks share, and the word by which the kernel itself tells the others that a rank died. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory/isolate.h"
#include "module/module.h"
#include "sync/cores.h"
#include "sync/sync.h"

struct watch {
    struct robust_list_head head;
    struct life *life;
    _Atomic uint32_t stop;
    _Atomic uint32_t started;
    int error;
    pthread_t thread;
};

/* The inode of this process's pid namespace; 0 when /proc is not there, or belongs to another one. */
static uint64_t pid_namespace(void) {
    static _Atomic uint64_t known;
    static _Atomic int of_pid;
    int pid = getpid();
    if (atomic_load(&of_pid) == pid) return atomic_load(&known);
    struct stat facts = {0};
    char link[16] = {0};
    bool ours = readlink("/proc/self", link, sizeof link - 1) > 0 && atoi(link) == pid &&
                stat("/proc/self/ns/pid", &facts) == 0;
    atomic_store(&known, ours ? facts.st_ino : 0);
    atomic_store(&of_pid, pid);
    return ours ? facts.st_ino : 0;
}

static bool status_says_dumping(uint32_t tid) {
    char path[32], text[4096];
    snprintf(path, sizeof path, "/proc/%u/status", tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    return strstr(text, "\nCoreDumping:\t1") != NULL;
}

#define LOOK_NS 20000000 /* of all ranks together, at one owner: a read takes about 20 us, and 100 ms are promised */

/* A process that dumps core never runs again, but the kernel marks its word only after the dump, which takes seconds.
 * Whoever finds out first sets the mark for everybody. */
bool symcomm_dumps_core(_Atomic uint32_t *word) {
    struct life *life = life_of(word);
    uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
    if ((seen & FUTEX_TID_MASK) == 0 || life->pid_namespace == 0 || life->pid_namespace != pid_namespace())
        return false;
    int64_t now = symcomm_now_ns(), last = atomic_load_explicit(&life->looked, memory_order_relaxed);
    if (now >= last && now - last < LOOK_NS) return false;
    if (!atomic_compare_exchange_strong(&life->looked, &last, now) || !status_says_dumping(seen & FUTEX_TID_MASK))
        return false;
    return atomic_compare_exchange_strong(word, &seen, seen | LIFE_OWNER_DIED);
}

static void *hold_life(void *argument) {
    struct watch *w = argument;
    w->head.list.next = &w->life->entry;
    w->head.futex_offset = (long)offsetof(struct life, word);
    w->head.list_op_pending = NULL;
    w->life->entry.next = &w->head.list;
    w->life->pid_namespace = pid_namespace();
    atomic_store(&w->life->word, (uint32_t)syscall(SYS_gettid));
    w->error = syscall(SYS_set_robust_list, &w->head, sizeof w->head) ? errno : 0;
    atomic_store(&w->started, 1);
    symcomm_futex_wake(&w->started, 1);
    if (w->error) return NULL;
    while (!atomic_load(&w->stop)) symcomm_futex_wait(&w->stop, 0, 3600LL * 1000000000);
    w->head.list.next = &w->head.list; /* ends in peace */
    atomic_store(&w->life->word, 0);
    return NULL;
}

static PyObject *life_start(PyObject *self, PyObject *arg) {
    (void)self;
    void *address = PyLong_AsVoidPtr(arg);
    if (address == NULL && PyErr_Occurred()) return NULL;
    struct watch *w = calloc(1, sizeof *w);
    if (w == NULL) return PyErr_NoMemory();
    w->life = address;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, hold_life, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(w);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    while (!atomic_load(&w->started)) symcomm_futex_wait(&w->started, 0, 10000000);
    if (w->error) { /* nobody would notice our death */
        pthread_join(w->thread, NULL);
        errno = w->error;
        free(w);
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, "set_robust_list");
    }
    cores_publish(w->life);
    return PyLong_FromVoidPtr(w);
}

static PyObject *life_stop(PyObject *self, PyObject *arg) {
    (void)self;
    struct watch *w = PyLong_AsVoidPtr(arg);
    if (w == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    atomic_store(&w->stop, 1);
    symcomm_futex_wake(&w->stop, 1);
    Py_BEGIN_ALLOW_THREADS;
    pthread_join(w->thread, NULL);
    Py_END_ALLOW_THREADS;
    free(w);
    Py_RETURN_NONE;
}

static PyObject *map_shared(PyObject *self, PyObject *args) {
    (void)self;
    int fd;
    long long bytes;
    if (!PyArg_ParseTuple(args, "iL", &fd, &bytes)) return NULL;
    void *at = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    madvise(at, (size_t)bytes, MADV_DONTDUMP);
    return PyLong_FromVoidPtr(at);
}

static PyObject *unmap(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return NULL;
    cores_forget((const char *)(uintptr_t)address, bytes); /* before it is gone */
    if (munmap((void *)(uintptr_t)address, (size_t)bytes)) return PyErr_SetFromErrno(PyExc_OSError);
    isolate_forget((const char *)(uintptr_t)address, bytes);
    Py_RETURN_NONE;
}

static PyObject *advise_huge(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return NULL;
    return PyBool_FromLong(madvise((void *)(uintptr_t)address, (size_t)bytes, MADV_HUGEPAGE) == 0);
}

#define NODES 1024
#define MPOL_PREFERRED 1 /* linux/mempolicy.h */

/* New pages of a shared mapping come from one NUMA node while that has some, whoever touches them first. */
static PyObject *prefer_node(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long bytes;
    int node;
    if (!PyArg_ParseTuple(args, "KLi", &address, &bytes, &node)) return NULL;
    if (node < 0 || node >= NODES - 1) Py_RETURN_FALSE;
    const int bits = 8 * (int)sizeof(unsigned long);
    unsigned long mask[NODES / (8 * sizeof(unsigned long))] = {0};
    mask[node / bits] = 1UL << (node % bits);
    return PyBool_FromLong(
        syscall(SYS_mbind, (void *)(uintptr_t)address, (size_t)bytes, MPOL_PREFERRED, mask, NODES, 0) == 0);
}

/* Make sure that pages exist (create != 0), so that running out of memory is an error here and not a signal later;
 * or give them back to the kernel. */
static PyObject *set_pages(PyObject *self, PyObject *args) {
    (void)self;
    int fd, create, failed;
    long long offset, bytes;
    if (!PyArg_ParseTuple(args, "iLLp", &fd, &offset, &bytes, &create)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    do failed = fallocate(fd, create ? 0 : FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
    while (failed && errno == EINTR);
    Py_END_ALLOW_THREADS;
    if (failed) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_is_isolated(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return NULL;
    return PyBool_FromLong(is_isolated((const char *)(uintptr_t)address, bytes));
}

static PyObject *peek(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
    return PyBytes_FromStringAndSize((const char *)(uintptr_t)address, bytes);
}

static PyObject *poke(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    const char *data;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Ky#", &address, &data, &bytes)) return NULL;
    memcpy((void *)(uintptr_t)address, data, (size_t)bytes);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"life_start", life_start, METH_O,
     "life_start(address): mark this process alive there until it ends or life_stop()."},
    {"life_stop", life_stop, METH_O, "life_stop(handle): the word becomes 0 instead of 'owner died'."},
    {"map_shared", map_shared, METH_VARARGS, "map_shared(fd, bytes) -> address"},
    {"unmap", unmap, METH_VARARGS, "unmap(address, bytes)"},
    {"advise_huge", advise_huge, METH_VARARGS, "advise_huge(address, bytes) -> whether the kernel took the advice"},
    {"prefer_node", prefer_node, METH_VARARGS,
     "prefer_node(address, bytes, node) -> whether new pages will come from there"},
    {"set_pages", set_pages, METH_VARARGS, "set_pages(fd, offset, bytes, create)"},
    {"is_isolated", py_is_isolated, METH_VARARGS,
     "is_isolated(address, bytes) -> whether a stopped peer's writes were shut out there"},
    {"peek", peek, METH_VARARGS, "peek(address, bytes) -> bytes"},
    {"poke", poke, METH_VARARGS, "poke(address, bytes)"},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_shm(PyObject *module) {
    PyModule_AddIntConstant(module, "LIFE_WORD", (long)offsetof(struct life, word));
    PyModule_AddIntConstant(module, "LIFE_OWNER_DIED", LIFE_OWNER_DIED);
    return PyModule_AddFunctions(module, methods);
}
