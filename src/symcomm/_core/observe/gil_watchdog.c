/* Notices that no thread can get Python's interpreter lock, and says so. Python could not: it would need the lock.
 *
 * A Python thread "beats" now and then, which needs the lock. A thread here, which never takes it, looks at the time of
 * the last beat. If that is too long ago it writes one sentence to a descriptor and into memory that peers can read. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "module/module.h"
#include "os/futex.h"
#include "os/text.h"
#include "os/thread.h"

enum { THREADS = 64, NAME = 28, LABEL = 160, NOTE = 1024 };

struct thread {
    int32_t tid;
    char name[NAME];
};

/* Where peers read what is wrong: the text counts while its length is not 0. It is stored word by word, since a peer
 * may read while it changes. */
enum { WORDS = NOTE / 8 - 1, TEXT = WORDS * 8 };
struct note {
    _Atomic uint64_t length;
    _Atomic uint64_t words[WORDS];
};

static void write_note(struct note *note, const char *text, size_t length) {
    uint64_t words[WORDS] = {0};
    memcpy(words, text, length < TEXT ? length : TEXT);
    for (int i = 0; i < WORDS; i++) atomic_store_explicit(&note->words[i], words[i], memory_order_relaxed);
    atomic_store_explicit(&note->length, length < TEXT ? length : TEXT, memory_order_release);
}

struct gil_watchdog {
    _Atomic int64_t beat; /* when a thread last got the lock */
    _Atomic uint32_t stop;
    int64_t limit;
    int fd;
    struct note *note;
    char label[LABEL];
    pthread_t watcher;
    pthread_mutex_t mutex; /* of what follows */
    int count;
    struct thread threads[THREADS]; /* Python's, the main one first */
};

/* clang-format off */
static const char *name_of_call(long number) {
#define CALL(NAME) case SYS_##NAME: return #NAME;
    switch (number) {
        CALL(read) CALL(write) CALL(futex) CALL(nanosleep) CALL(clock_nanosleep) CALL(ppoll) CALL(pselect6)
        CALL(epoll_pwait) CALL(recvfrom) CALL(recvmsg) CALL(sendto) CALL(sendmsg) CALL(connect) CALL(accept4)
        CALL(wait4) CALL(waitid) CALL(ioctl) CALL(fsync) CALL(flock) CALL(fcntl) CALL(openat) CALL(sched_yield)
        CALL(munmap) CALL(madvise)
#ifdef SYS_poll
        CALL(poll) CALL(select) CALL(epoll_wait) CALL(open)
#endif
        default: return NULL;
    }
}
/* clang-format on */

/* What the kernel says a thread does: -1: it runs; -2: not known; else the number of its system call. */
static long doing_of(int32_t tid) {
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", tid);
    if (!read_text(path, text, sizeof text)) return -2;
    return strncmp(text, "running", 7) == 0 ? -1 : strtol(text, NULL, 10);
}

/* Finds the thread that most likely has the lock. Threads that want it wait on a futex, so it is one that runs, or else
 * the first in another system call. Returns its place, or -1 if all wait on futexes; *doing says what it does. */
static int likely_holder(const struct gil_watchdog *w, long *doing) {
    int best = -1;
    for (int i = 0; i < w->count; i++) {
        long does = doing_of(w->threads[i].tid);
        if (does == -2 || does == SYS_futex) continue;
        if (best >= 0 && does != -1) continue;
        best = i;
        *doing = does;
        if (does == -1) break;
    }
    return best;
}

static int reason(struct gil_watchdog *w, char *text, size_t size) {
    long doing = 0;
    pthread_mutex_lock(&w->mutex);
    int holder = likely_holder(w, &doing);
    struct thread t = holder >= 0 ? w->threads[holder] : (struct thread){0};
    pthread_mutex_unlock(&w->mutex);
    if (holder < 0)
        return snprintf(text, size,
                        "every Python thread waits on a lock (futex), so native code has taken the "
                        "interpreter lock into a wait of its own");
    if (doing == -1)
        return snprintf(text, size, "thread '%s' (%d) most likely holds it: it computes in native code", t.name, t.tid);
    const char *call = name_of_call(doing);
    return snprintf(text, size, "thread '%s' (%d) most likely holds it: it is in the system call %s%s(number %ld)",
                    t.name, t.tid, call ? call : "", call ? " " : "", doing);
}

static void write_line(const struct gil_watchdog *w, const char *text, int length) {
    ssize_t ignored = write(w->fd, text, (size_t)length);
    (void)ignored;
}

static int clip(int length, size_t size) { return length < (int)size ? length : (int)size - 1; }

static void report_stall(struct gil_watchdog *w, int64_t age) {
    char why[256], text[TEXT];
    reason(w, why, sizeof why);
    int n = snprintf(text, sizeof text, "symcomm: %s: no thread could get Python's interpreter lock for %.1f s; %s.\n",
                     w->label, (double)age / 1e9, why);
    n = clip(n, sizeof text);
    write_note(w->note, text, (size_t)n - 1);
    write_line(w, text, n);
}

static void report_end(struct gil_watchdog *w, int64_t age) {
    char text[LABEL + 128];
    atomic_store_explicit(&w->note->length, 0, memory_order_release);
    int n = snprintf(text, sizeof text, "symcomm: %s: the interpreter lock is back after %.1f s.\n", w->label,
                     (double)age / 1e9);
    write_line(w, text, clip(n, sizeof text));
}

static void *watch(void *argument) {
    struct gil_watchdog *w = argument;
    int64_t stalled_at = 0; /* the last beat before a stall; 0: none */
    while (!atomic_load(&w->stop)) {
        futex_wait(&w->stop, 0, w->limit / 4);
        int64_t beat = atomic_load(&w->beat), now = symcomm_now_ns();
        if (stalled_at && beat != stalled_at) {
            report_end(w, beat - stalled_at);
            stalled_at = 0;
        }
        if (!stalled_at && now - beat > w->limit && !atomic_load(&w->stop)) {
            stalled_at = beat;
            report_stall(w, now - beat);
        }
    }
    return NULL;
}

static PyObject *gil_watchdog_start(PyObject *Py_UNUSED(self), PyObject *args) {
    long long limit;
    int fd;
    unsigned long long note;
    const char *label;
    if (!PyArg_ParseTuple(args, "LiKs", &limit, &fd, &note, &label)) return NULL;
    struct gil_watchdog *w = calloc(1, sizeof *w);
    if (w == NULL) return PyErr_NoMemory();
    w->limit = limit;
    w->fd = fd;
    w->note = (struct note *)(uintptr_t)note;
    snprintf(w->label, sizeof w->label, "%s", label);
    pthread_mutex_init(&w->mutex, NULL);
    atomic_store(&w->beat, symcomm_now_ns());
    int error = thread_start(&w->watcher, "symcomm-gil", THREAD_STACK, watch, w);
    if (error) {
        pthread_mutex_destroy(&w->mutex);
        free(w);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromVoidPtr(w);
}

static PyObject *gil_watchdog_beat(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long handle;
    const char *threads;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Ky#", &handle, &threads, &bytes)) return NULL;
    struct gil_watchdog *w = (struct gil_watchdog *)(uintptr_t)handle;
    size_t count = (size_t)bytes / sizeof(struct thread);
    pthread_mutex_lock(&w->mutex);
    w->count = (int)(count < THREADS ? count : THREADS);
    memcpy(w->threads, threads, (size_t)w->count * sizeof(struct thread));
    for (int i = 0; i < w->count; i++) w->threads[i].name[NAME - 1] = 0;
    pthread_mutex_unlock(&w->mutex);
    atomic_store(&w->beat, symcomm_now_ns());
    Py_RETURN_NONE;
}

static PyObject *gil_watchdog_stop(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct gil_watchdog *w = PyLong_AsVoidPtr(arg);
    if (w == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    atomic_store(&w->stop, 1);
    futex_wake(&w->stop, 1);
    Py_BEGIN_ALLOW_THREADS;
    pthread_join(w->watcher, NULL);
    Py_END_ALLOW_THREADS;
    pthread_mutex_destroy(&w->mutex);
    atomic_store_explicit(&w->note->length, 0, memory_order_release);
    free(w);
    Py_RETURN_NONE;
}

static PyObject *gil_watchdog_read(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct note *note = PyLong_AsVoidPtr(arg);
    if (note == NULL) return PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize(NULL, 0);
    uint64_t words[WORDS];
    uint64_t length = atomic_load_explicit(&note->length, memory_order_acquire);
    for (int i = 0; i < WORDS; i++) words[i] = atomic_load_explicit(&note->words[i], memory_order_relaxed);
    return PyBytes_FromStringAndSize((const char *)words, (Py_ssize_t)(length < TEXT ? length : TEXT));
}

static PyMethodDef functions[] = {
    METHOD(gil_watchdog_start, METH_VARARGS,
           "(limit_ns, fd, note, label) -> handle: report when gil_watchdog_beat() was not called for that long."),
    METHOD(gil_watchdog_beat, METH_VARARGS, "(handle, threads): a thread got the lock."),
    METHOD(gil_watchdog_stop, METH_O, "(handle)"),
    METHOD(gil_watchdog_read, METH_O, "(note) -> bytes: what is wrong, empty when nothing is."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_gil_watchdog(PyObject *module) { return PyModule_AddFunctions(module, functions); }
