/* Signal pads: words of symmetric memory by which ranks tell each other "done".
 *
 * A signal is a word that goes from 0 to 1 (put) and back (wait). Word `world * channel + source` of the destination's
 * pad belongs to one pair of ranks on one channel; no other rank touches it. A put waits until the previous signal was
 * taken. Behind the words, at `pad_bytes`, another word counts the threads that sleep on this pad: if it is 0, a put
 * need not enter the kernel. Words that are written by other means are seen within a slice.
 *
 * Windows (onesided/window.c) count: a signal adds one to the word, at once, and a wait takes one away. */
#include "onesided/signals.h"

#include "group/group.h"
#include "module/arguments.h"
#include "module/gil.h"
#include "module/module.h"
#include "os/futex.h"
#include "sync/wait.h"

struct signal {
    _Atomic uint32_t *word;
    _Atomic uint32_t *sleepers; /* of the pad the word lies in */
    uint32_t from, to;          /* what the word must be, and what it becomes */
    bool counted;               /* instead of those two: the word must not be 0, and becomes one less */
};

static struct signal signal_at(char *pad, int64_t pad_bytes, int64_t slot, bool put) {
    return (struct signal){
        .word = (_Atomic uint32_t *)(void *)pad + slot,
        .sleepers = (_Atomic uint32_t *)(void *)(pad + pad_bytes),
        .from = put ? 0 : 1,
        .to = put ? 1 : 0,
    };
}

static bool is_ready(const struct signal *s, uint32_t word) { return s->counted ? word != 0 : word == s->from; }

static bool flip(const struct signal *s) {
    uint32_t expected = s->from;
    if (s->counted) {
        expected = atomic_load_explicit(s->word, memory_order_relaxed);
        while (expected)
            if (atomic_compare_exchange_weak_explicit(s->word, &expected, expected - 1, memory_order_acq_rel,
                                                      memory_order_relaxed))
                return true;
        return false;
    }
    return atomic_compare_exchange_strong_explicit(s->word, &expected, s->to, memory_order_acq_rel,
                                                   memory_order_relaxed);
}

static void wake(const struct signal *s) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(s->sleepers, memory_order_relaxed)) futex_wake(s->word, INT32_MAX);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

struct signal_wait {
    struct wait wait;
    const struct signal *signal;
};

static const struct signal *signal_of(const struct wait *w) { return ((const struct signal_wait *)w)->signal; }

static bool is_over(struct wait *w) { return flip(signal_of(w)); }

/* Never returns a value that would end the wait: another thread may flip the word back before this one sleeps. */
static uint32_t publish(struct wait *w) {
    const struct signal *s = signal_of(w);
    uint32_t word = atomic_load_explicit(s->word, memory_order_relaxed);
    return !is_ready(s, word) ? word : s->counted ? 0 : s->to;
}

static int find_gone(struct wait *w, int *culprit) {
    *culprit = w->missing;
    return w->missing == w->visit->group->rank ? STATUS_OK : sync_gone(w->visit, w->missing);
}

/* Callers say what failed, and with which peer. */
static int give_up(struct wait *w, int status, int culprit) {
    (void)w, (void)culprit;
    return status;
}

static const struct wait_kind for_signal = {
    .is_over = is_over, .publish = publish, .find_gone = find_gone, .give_up = give_up, .what = WAITS_FOR_SIGNAL};

/* Flips the word when it is our turn, and wakes those who wait for that. */
static int await_flip(const struct visit *v, const struct signal *s, int peer, int64_t deadline) {
    struct signal_wait w = {
        .wait = {.kind = &for_signal,
                 .visit = v,
                 .bell = s->word,
                 .sleepers = s->sleepers,
                 .missing = peer,
                 .deadline = deadline},
        .signal = s,
    };
    int status = STATUS_OK;
    bool done = false;
    for (int i = 0, looks = spins_now(v->group); i < looks && !(done = flip(s)); i++) cpu_relax();
    if (!done) status = wait_loop(&w.wait);
    if (status == STATUS_OK && !s->counted) wake(s); /* no thread waits for a count to fall */
    return status;
}

void counter_add(const struct counter *c) {
    struct signal s = {.word = c->word, .sleepers = c->sleepers};
    atomic_fetch_add_explicit(s.word, 1, memory_order_release);
    wake(&s);
}

int counter_take(const struct visit *v, const struct counter *c, int peer, int64_t timeout) {
    struct group *g = v->group;
    struct signal s = {.word = c->word, .sleepers = c->sleepers, .counted = true};
    /* Ranks that are threads need the lock to signal us. */
    int looks = timeout >= 0 && g->own_process ? spins_now(g) : 0;
    bool done = flip(&s);
    for (int i = 0; i < looks && !(done = done || flip(&s)); i++) cpu_relax();
    if (done) return STATUS_OK;
    if (timeout <= 0) {
        int status = sync_aborted(v);
        if (!status && peer != g->rank) status = sync_marked_gone(v, peer);
        return flip(&s) ? STATUS_OK : status ? status : STATUS_TIMEOUT;
    }
    return await_flip(v, &s, peer, symcomm_now_ns() + timeout);
}

struct pads {
    struct group *group;
    int64_t bytes;
    char *of[]; /* per rank */
};

static int put(const struct visit *v, const struct pads *p, int peer, int64_t channel, int64_t deadline) {
    struct signal s = signal_at(p->of[peer], p->bytes, p->group->world * channel + p->group->rank, true);
    return await_flip(v, &s, peer, deadline);
}

static int take(const struct visit *v, const struct pads *p, int peer, int64_t channel, int64_t deadline) {
    struct signal s = signal_at(p->of[p->group->rank], p->bytes, p->group->world * channel + peer, false);
    return await_flip(v, &s, peer, deadline);
}

/* Signals every peer, then waits for every peer's signal. Starts with the next rank, so that not all use one pad at
 * once. */
static int barrier(const struct visit *v, const struct pads *p, int64_t channel, int64_t deadline, int *culprit) {
    struct group *g = p->group;
    for (int phase = 0; phase < 2; phase++)
        for (int i = 1; i < g->world; i++) {
            int peer = *culprit = (g->rank + i) % g->world;
            int status = phase == 0 ? put(v, p, peer, channel, deadline) : take(v, p, peer, channel, deadline);
            if (status != STATUS_OK) return status;
        }
    return STATUS_OK;
}

/* --- Python -------------------------------------------------------------------------------------------------- */

static const char PADS[] = "symcomm.pads";

static void drop_pads(PyObject *capsule) {
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
    PyMem_Free(PyCapsule_GetPointer(capsule, PADS));
}

static PyObject *make_pads(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *addresses;
    struct group *g;
    long long bytes;
    if (!PyArg_ParseTuple(args, "O&O!L", convert_group, &g, &PyTuple_Type, &addresses, &bytes)) return NULL;
    if (PyTuple_Size(addresses) != g->world) return PyErr_Format(PyExc_ValueError, "one address per rank");
    struct pads *p = PyMem_Calloc(1, sizeof *p + (size_t)g->world * sizeof p->of[0]);
    if (p == NULL) return PyErr_NoMemory();
    p->group = g, p->bytes = bytes;
    bool good = to_addresses(addresses, p->of) == g->world;
    for (int r = 0; good && r < g->world; r++) good = p->of[r] != NULL;
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a signal pad cannot be at address 0");
    PyObject *capsule = good ? PyCapsule_New(p, PADS, drop_pads) : NULL;
    if (capsule) PyCapsule_SetContext(capsule, Py_NewRef(g->object)); /* the pads use the group's memory */
    else PyMem_Free(p);
    return capsule;
}

/* (pads, peer, channel, timeout_ns); ranges were checked by the caller. */
static PyObject *signal_one(PyObject *const *args, Py_ssize_t n,
                            int (*act)(const struct visit *, const struct pads *, int, int64_t, int64_t)) {
    if (n != 4) return PyErr_Format(PyExc_TypeError, "signals take 4 arguments, got %zd", n);
    struct pads *p = PyCapsule_GetPointer(args[0], PADS);
    int peer = (int)PyLong_AsLong(args[1]);
    int64_t channel = PyLong_AsLongLong(args[2]), timeout = PyLong_AsLongLong(args[3]);
    if (p == NULL || PyErr_Occurred()) return NULL;
    int status;
    struct visit visit;
    if (!visit_begin(&visit, p->group)) return PyLong_FromLong(STATUS_LEFT);
    WITHOUT_GIL(status = act(&visit, p, peer, channel, symcomm_now_ns() + timeout));
    visit_end(&visit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return PyLong_FromLong(status);
}

static PyObject *signal_put(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) {
    return signal_one(args, n, put);
}

static PyObject *signal_take(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) {
    return signal_one(args, n, take);
}

static PyObject *signal_barrier(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule;
    long long channel, timeout;
    if (!PyArg_ParseTuple(args, "OLL", &capsule, &channel, &timeout)) return NULL;
    struct pads *p = PyCapsule_GetPointer(capsule, PADS);
    if (p == NULL) return NULL;
    int culprit = p->group->rank, status;
    struct visit visit;
    if (!visit_begin(&visit, p->group)) return Py_BuildValue("ii", STATUS_LEFT, culprit);
    WITHOUT_GIL(status = barrier(&visit, p, channel, symcomm_now_ns() + timeout, &culprit));
    visit_end(&visit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return Py_BuildValue("ii", status, culprit);
}

/* A rank that sees the new words sees all earlier writes. */
static PyObject *write_words(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    unsigned int value;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "KIn", &address, &value, &count)) return NULL;
    _Atomic uint32_t *words = (_Atomic uint32_t *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < count; i++) atomic_store_explicit(&words[i], value, memory_order_release);
    if (count == 1) futex_wake(words, INT32_MAX);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(make_pads, METH_VARARGS, "(group, addresses, bytes) -> pads; a sleepers word follows each pad"),
    METHOD(signal_put, METH_FASTCALL, "(pads, peer, channel, timeout_ns) -> status"),
    METHOD(signal_take, METH_FASTCALL, "(pads, peer, channel, timeout_ns) -> status"),
    METHOD(signal_barrier, METH_VARARGS, "(pads, channel, timeout_ns) -> (status, culprit)"),
    METHOD(write_words, METH_VARARGS, "(address, value, count)"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_signals(PyObject *module) { return PyModule_AddFunctions(module, methods); }
