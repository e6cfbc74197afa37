#include "memory/life.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "module/module.h"
#include "observe/whereabouts.h"
#include "os/futex.h"
#include "os/text.h"
#include "os/thread.h"
#include "sync/cores.h"

struct watch {
    struct robust_list_head head;
    struct life *life;
    struct whereabouts *asked; /* in an arena, or the next field; a change of its first word wakes the thread */
    _Atomic uint32_t own[4];
    struct answering *answering; /* NULL: no process can ask */
    _Atomic bool stop;
    _Atomic uint32_t started;
    int error;
    pthread_t thread;
};

static bool status_says_dumping(uint32_t tid) {
    char path[32], text[4096];
    snprintf(path, sizeof path, "/proc/%u/status", tid);
    return read_text(path, text, sizeof text) && strstr(text, "\nCoreDumping:\t1") != NULL;
}

#define LOOK_NS 20000000 /* between looks at one owner, by any rank: one takes about 20 us; we promise 100 ms */

/* A process that dumps core never runs again, but the kernel marks its word only after the dump, which takes seconds.
 * So the first rank that notices sets the mark for all. */
bool life_dumps_core(_Atomic uint32_t *word) {
    struct life *life = life_of(word);
    uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
    uint64_t owned = atomic_load_explicit(&life->pid_namespace, memory_order_relaxed);
    if ((seen & FUTEX_TID_MASK) == 0 || owned == 0 || owned != thread_namespace()) return false;
    int64_t now = symcomm_now_ns(), last = atomic_load_explicit(&life->looked, memory_order_relaxed);
    if (now >= last && now - last < LOOK_NS) return false;
    if (!atomic_compare_exchange_strong(&life->looked, &last, now) || !status_says_dumping(seen & FUTEX_TID_MASK))
        return false;
    return atomic_compare_exchange_strong(word, &seen, seen | LIFE_OWNER_DIED);
}

static void answer_until_stopped(struct watch *w) {
    for (;;) {
        uint32_t seen = atomic_load(&w->asked->asked);
        if (atomic_load(&w->stop)) return;
        if (w->answering && seen != atomic_load(&w->asked->answered)) answering_begin(w->answering);
        futex_wait(&w->asked->asked, seen, 3600LL * 1000000000);
    }
}

static void *hold_life(void *argument) {
    struct watch *w = argument;
    w->head.list.next = &w->life->entry;
    w->head.futex_offset = (long)offsetof(struct life, word);
    w->head.list_op_pending = NULL;
    w->life->entry.next = &w->head.list;
    atomic_store_explicit(&w->life->pid_namespace, thread_namespace(), memory_order_relaxed);
    atomic_store(&w->life->word, (uint32_t)syscall(SYS_gettid));
    w->error = syscall(SYS_set_robust_list, &w->head, sizeof w->head) ? errno : 0;
    atomic_store(&w->started, 1);
    futex_wake(&w->started, 1);
    if (w->error) return NULL;
    answer_until_stopped(w);
    w->head.list.next = &w->head.list; /* the thread ends without a mark */
    atomic_store(&w->life->word, 0);
    return NULL;
}

static void drop(struct watch *w) {
    if (w->answering) answering_end(w->answering);
    free(w);
}

static PyObject *life_start(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long life, asked = 0;
    if (!PyArg_ParseTuple(args, "K|K", &life, &asked)) return NULL;
    struct watch *w = calloc(1, sizeof *w);
    if (w == NULL) return PyErr_NoMemory();
    w->life = (struct life *)(uintptr_t)life;
    w->asked = asked ? (struct whereabouts *)(uintptr_t)asked : (struct whereabouts *)(void *)w->own;
    if (asked && (w->answering = answering_make(w->asked)) == NULL) {
        free(w);
        return PyErr_NoMemory();
    }
    int error = thread_start(&w->thread, "symcomm-life", THREAD_STACK, hold_life, w);
    if (error) {
        drop(w);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    while (!atomic_load(&w->started)) futex_wait(&w->started, 0, 10000000);
    if (w->error) { /* peers would not notice our death */
        pthread_join(w->thread, NULL);
        errno = w->error;
        drop(w);
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, "set_robust_list");
    }
    cores_publish(w->life);
    return PyLong_FromVoidPtr(w);
}

static PyObject *life_stop(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct watch *w = PyLong_AsVoidPtr(arg);
    if (w == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    atomic_store(&w->stop, true);
    atomic_fetch_add(&w->asked->asked, 1);
    futex_wake(&w->asked->asked, 1);
    Py_BEGIN_ALLOW_THREADS;
    pthread_join(w->thread, NULL);
    Py_END_ALLOW_THREADS;
    drop(w);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(life_start, METH_VARARGS,
           "(life, whereabouts=0): mark this process alive there until it ends or life_stop(), and answer questions."),
    METHOD(life_stop, METH_O, "(handle): the word becomes 0 instead of 'owner died'."),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    {"LIFE_WORD", offsetof(struct life, word)},
    {"LIFE_WAITS", offsetof(struct life, cpu) + offsetof(struct cpu_usage, looked)},
    CONSTANT(LIFE_OWNER_DIED),
    {NULL, 0},
};

int symcomm_add_life(PyObject *module) { return symcomm_add_part(module, methods, constants); }
