#include "observe/whereabouts.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "memory/shared_bytes.h"
#include "module/module.h"
#include "os/futex.h"
#include "os/thread.h"

enum { MOST_TEXT = WHEREABOUTS_BYTES - sizeof(struct whereabouts) };

struct answering {
    struct whereabouts *place;
    _Atomic int references; /* of the arena, and of the thread */
    _Atomic bool busy;      /* a thread answers, or is about to */
    bool ended;             /* with the interpreter lock held, as the next one */
};

static _Atomic bool refused; /* the interpreter ends */
static PyObject *callable;   /* (address of the place) -> bytes */

static void release(struct answering *a) {
    if (atomic_fetch_sub(&a->references, 1) == 1) free(a);
}

static bool may_answer(const struct answering *a) { return !refused && !a->ended && callable != NULL; }

/* --- answering: with the interpreter lock held -------------------------------------------------------------------- */

static void write_answer(struct whereabouts *place, const char *text, size_t length, uint32_t number) {
    uint32_t version = atomic_load(&place->version) | 1;
    atomic_store(&place->version, version);
    atomic_thread_fence(memory_order_seq_cst);
    shared_store(place->text, text, length);
    atomic_store(&place->length, (uint32_t)length);
    atomic_store(&place->answered, number);
    atomic_store(&place->version, version + 1);
}

/* The number of the last question that it answers. */
static uint32_t look_up(struct answering *a) {
    uint32_t number = atomic_load(&a->place->asked);
    PyObject *asked = Py_NewRef(callable);
    PyObject *said = PyObject_CallFunction(asked, "K", (unsigned long long)(uintptr_t)a->place);
    char *text = NULL;
    Py_ssize_t length = 0;
    if (said == NULL || PyBytes_AsStringAndSize(said, &text, &length) < 0) PyErr_Clear();
    else if (length <= MOST_TEXT && may_answer(a)) write_answer(a->place, text, (size_t)length, number);
    Py_XDECREF(said);
    Py_DECREF(asked);
    return number;
}

static void *answer(void *argument) {
    struct answering *a = argument;
    PyGILState_STATE state = PyGILState_Ensure(); /* if the interpreter is ending, the thread ends here */
    uint32_t number = 0;
    do {
        if (may_answer(a)) number = look_up(a);
        atomic_store(&a->busy, false);
        /* Those who asked meanwhile found this thread busy. */
    } while (may_answer(a) && atomic_load(&a->place->asked) != number && !atomic_exchange(&a->busy, true));
    PyGILState_Release(state);
    release(a);
    return NULL;
}

/* --- the thread that holds the rank's life ------------------------------------------------------------------------ */

struct answering *answering_make(struct whereabouts *place) {
    struct answering *a = calloc(1, sizeof *a);
    if (a) *a = (struct answering){.place = place, .references = 1};
    return a;
}

void answering_begin(struct answering *a) {
    pthread_t thread;
    if (refused || atomic_exchange(&a->busy, true)) return;
    atomic_fetch_add(&a->references, 1);
    if (thread_start(&thread, "symcomm-where", THREAD_STACK_PYTHON, answer, a) == 0) {
        pthread_detach(thread);
        return;
    }
    atomic_store(&a->busy, false);
    release(a);
}

void answering_end(struct answering *a) {
    a->ended = true;
    release(a);
}

/* --- for Python --------------------------------------------------------------------------------------------------- */

static PyObject *use_whereabouts_callback(PyObject *Py_UNUSED(self), PyObject *wanted) {
    PyObject *before = callable;
    callable = Py_NewRef(wanted);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *refuse_whereabouts(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    refused = true;
    Py_RETURN_NONE;
}

static PyObject *ask_whereabouts(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct whereabouts *place = PyLong_AsVoidPtr(arg);
    if (place == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    uint32_t number = atomic_fetch_add(&place->asked, 1) + 1;
    futex_wake(&place->asked, 1);
    return PyLong_FromUnsignedLong(number);
}

/* The memory may be gone from under the mapping, which only the kernel may find out. */
static PyObject *wake_whereabouts(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct whereabouts *place = PyLong_AsVoidPtr(arg);
    if (place == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    futex_wake(&place->asked, 1);
    Py_RETURN_NONE;
}

static PyObject *read_whereabouts(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    unsigned int number;
    if (!PyArg_ParseTuple(args, "KI", &address, &number)) return NULL;
    struct whereabouts *place = (struct whereabouts *)(uintptr_t)address;
    uint32_t version = atomic_load(&place->version);
    uint32_t length = atomic_load(&place->length);
    if ((version & 1) || length > MOST_TEXT || (int32_t)(atomic_load(&place->answered) - number) < 0) Py_RETURN_NONE;
    char *copy = malloc(length + 1);
    if (copy == NULL) return PyErr_NoMemory();
    shared_load(copy, place->text, length);
    atomic_thread_fence(memory_order_seq_cst);
    bool whole = atomic_load(&place->version) == version;
    PyObject *text = whole ? PyBytes_FromStringAndSize(copy, (Py_ssize_t)length) : Py_NewRef(Py_None);
    free(copy);
    return text;
}

static PyMethodDef functions[] = {
    METHOD(use_whereabouts_callback, METH_O, "(callable): given a place, says in bytes where the rank is."),
    METHOD(refuse_whereabouts, METH_NOARGS, "(): the interpreter ends; no question is answered any more."),
    METHOD(ask_whereabouts, METH_O, "(place) -> the number of the question"),
    METHOD(wake_whereabouts, METH_O, "(place): the number there was raised by other means."),
    METHOD(read_whereabouts, METH_VARARGS, "(place, number) -> bytes, or None while there is no answer"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {CONSTANT(WHEREABOUTS_BYTES), {"WHEREABOUTS_TEXT", MOST_TEXT}, {NULL, 0}};

int symcomm_add_whereabouts(PyObject *module) { return symcomm_add_part(module, functions, constants); }
