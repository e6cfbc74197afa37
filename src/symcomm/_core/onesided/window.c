/* One-sided windows: a piece of each rank's memory that the others write to, and a count of signals for each pair of
 * ranks.
 *
 * A put is one copy into the peer's memory. A signal after it has release order, the wait that takes it acquire order,
 * so a rank that took a signal sees all that its sender put before. */
#include "group/group.h"
#include "module/arguments.h"
#include "module/gil.h"
#include "module/module.h"
#include "onesided/signals.h"
#include "reduce/types.h"
#include "sync/fail.h"
#include "torch/tensor.h"

#define LONG_COPY (64 << 10) /* bytes; a shorter copy takes less than 20 times as long as releasing the lock */

struct segment { /* of one rank */
    char *address;
    int64_t count; /* elements */
    int dtype;
    char *words; /* one for each sender, then the sleepers' */
};

struct window {
    struct group *group;
    PyObject *tensor; /* a function that returns this rank's tensor, or None once that is gone */
    int64_t words_bytes;
    struct segment segments[];
};

static const char WINDOW[] = "symcomm.window";

static void drop_window(PyObject *capsule) {
    struct window *w = PyCapsule_GetPointer(capsule, WINDOW);
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
    Py_DECREF(w->tensor);
    PyMem_Free(w);
}

/* Tells autograd that this rank's tensor has changed. */
static void note_change(const struct window *w) {
    PyObject *tensor = PyObject_CallNoArgs(w->tensor);
    if (tensor) tensors_change(tensor);
    else PyErr_Clear();
    Py_XDECREF(tensor);
}

static PyObject *make_window(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *segments, *tensor;
    struct group *g;
    long long words_bytes;
    if (!PyArg_ParseTuple(args, "O&O!LO", convert_group, &g, &PyTuple_Type, &segments, &words_bytes, &tensor))
        return NULL;
    if (PyTuple_Size(segments) != g->world) return PyErr_Format(PyExc_ValueError, "one segment per rank");
    struct window *w = PyMem_Calloc(1, sizeof *w + (size_t)g->world * sizeof w->segments[0]);
    if (w == NULL) return PyErr_NoMemory();
    w->group = g;
    w->words_bytes = words_bytes;
    for (int r = 0; r < g->world; r++) {
        unsigned long long address, words;
        long long count;
        if (!PyArg_ParseTuple(PyTuple_GetItem(segments, r), "KLiK", &address, &count, &w->segments[r].dtype, &words))
            goto failed;
        if (words == 0 || count < 0 || w->segments[r].dtype < 0 || w->segments[r].dtype >= DT_COUNT) {
            PyErr_SetString(PyExc_ValueError, "not a segment of a window");
            goto failed;
        }
        w->segments[r].address = (char *)(uintptr_t)address;
        w->segments[r].count = count;
        w->segments[r].words = (char *)(uintptr_t)words;
    }
    PyObject *capsule = PyCapsule_New(w, WINDOW, drop_window);
    if (capsule == NULL) goto failed;
    PyCapsule_SetContext(capsule, Py_NewRef(g->object));
    w->tensor = Py_NewRef(tensor);
    return capsule;
failed:
    PyMem_Free(w);
    return NULL;
}

static struct counter counter_of(const struct window *w, int owner, int sender) {
    char *words = w->segments[owner].words;
    return (struct counter){
        .word = (_Atomic uint32_t *)(void *)words + sender,
        .sleepers = (_Atomic uint32_t *)(void *)(words + w->words_bytes),
    };
}

/* Why nothing can be given to a peer: the group was aborted, or the peer is gone. */
static int unreachable(const struct visit *v, int peer) {
    int status = sync_aborted(v);
    return status || peer == v->group->rank ? status : sync_marked_gone(v, peer);
}

/* A rank that leaves, or whose group fails, keeps its window's memory until no peer can be in here any more. A thread
 * that was stopped here may go on much later. Its write is lost then, which it learns by looking again. */
static int write_segment(struct window *w, int peer, int64_t start, const char *from, int64_t nbytes) {
    struct visit visit;
    if (!visit_begin(&visit, w->group)) return STATUS_ABORTED;
    _Atomic uint32_t *putting = &block_of(&visit, w->group->rank)->putting;
    atomic_fetch_add(putting, 1);
    int status = unreachable(&visit, peer);
    if (status == STATUS_OK && nbytes) {
        memmove(w->segments[peer].address + start, from, (size_t)nbytes);
        atomic_thread_fence(memory_order_seq_cst);
        status = unreachable(&visit, peer);
    }
    atomic_fetch_sub(putting, 1);
    visit_end(&visit);
    return status;
}

static int send_signal(struct window *w, int peer) {
    struct visit visit;
    if (!visit_begin(&visit, w->group)) return STATUS_ABORTED;
    int status = unreachable(&visit, peer);
    struct counter c = counter_of(w, peer, w->group->rank);
    if (status == STATUS_OK) counter_add(&c);
    visit_end(&visit);
    return status;
}

/* A rank, or -1. */
static int rank_of(const struct window *w, PyObject *number) {
    if (!PyLong_Check(number)) return -1;
    long rank = PyLong_AsLong(number);
    if (rank == -1 && PyErr_Occurred()) PyErr_Clear();
    return rank >= 0 && rank < w->group->world ? (int)rank : -1;
}

/* window_put(window, tensor, peer, offset in elements) -> status; None: nothing was written, Python has to look. */
static PyObject *window_put(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) {
    if (n != 4) return PyErr_Format(PyExc_TypeError, "window_put takes 4 arguments, got %zd", n);
    struct window *w = PyCapsule_GetPointer(args[0], WINDOW);
    if (w == NULL) return NULL;
    struct tensor_view view;
    int peer = rank_of(w, args[2]);
    if (peer < 0 || !PyLong_Check(args[3]) || !tensor_view(args[1], &view)) Py_RETURN_NONE;
    int64_t offset = PyLong_AsLongLong(args[3]);
    if (offset == -1 && PyErr_Occurred()) PyErr_Clear();
    const struct segment *segment = &w->segments[peer];
    if (view.dtype != segment->dtype || offset < 0 || view.count > segment->count ||
        offset > segment->count - view.count)
        Py_RETURN_NONE;
    int64_t size = symcomm_itemsize[view.dtype], nbytes = view.count * size;
    int status;
    count_call(&w->group->puts, false, false);
    if (peer == w->group->rank) note_change(w);
    WITHOUT_GIL_UNLESS(nbytes < LONG_COPY, status = write_segment(w, peer, offset * size, view.address, nbytes));
    return PyLong_FromLong(status);
}

/* window_write(window, peer, offset, address, nbytes) -> status: for bytes that Python has checked. */
static PyObject *window_write(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule;
    int peer, status;
    long long offset, nbytes;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OiLKL", &capsule, &peer, &offset, &address, &nbytes)) return NULL;
    struct window *w = PyCapsule_GetPointer(capsule, WINDOW);
    if (w == NULL) return NULL;
    if (peer < 0 || peer >= w->group->world || nbytes < 0 || offset < 0 ||
        offset + nbytes > w->segments[peer].count * symcomm_itemsize[w->segments[peer].dtype])
        return PyErr_Format(PyExc_ValueError, "not inside the window of rank %d", peer);
    count_call(&w->group->puts, true, false);
    if (peer == w->group->rank) note_change(w);
    WITHOUT_GIL(status = write_segment(w, peer, offset, (const char *)(uintptr_t)address, nbytes));
    return PyLong_FromLong(status);
}

static PyObject *window_signal(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) {
    struct window *w = n == 2 ? PyCapsule_GetPointer(args[0], WINDOW) : NULL;
    if (w == NULL) return n == 2 ? NULL : PyErr_Format(PyExc_TypeError, "window_signal takes 2 arguments");
    int peer = rank_of(w, args[1]);
    if (peer < 0) Py_RETURN_NONE;
    return PyLong_FromLong(send_signal(w, peer));
}

/* window_wait(window, peer, timeout_ns=0) -> status, None: Python has to look. counter_take() says what 0 means. */
static PyObject *window_wait(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n) {
    struct window *w = n == 2 || n == 3 ? PyCapsule_GetPointer(args[0], WINDOW) : NULL;
    if (w == NULL) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "window_wait takes 2 or 3 arguments");
    int peer = rank_of(w, args[1]), status;
    int64_t timeout = n == 3 ? PyLong_AsLongLong(args[2]) : 0;
    if (PyErr_Occurred()) return NULL;
    struct visit visit;
    if (peer < 0) Py_RETURN_NONE;
    if (!visit_begin(&visit, w->group)) return PyLong_FromLong(STATUS_ABORTED);
    struct counter c = counter_of(w, w->group->rank, peer);
    WITHOUT_GIL_UNLESS(true, status = counter_take(&visit, &c, peer, timeout));
    visit_end(&visit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    if (status == STATUS_OK) note_change(w);
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    METHOD(make_window, METH_VARARGS,
           "(group, ((address, count, dtype, words), ...), words_bytes, tensor()) -> window"),
    METHOD(window_put, METH_FASTCALL, "(window, tensor, peer, offset) -> status, or None when Python must look"),
    METHOD(window_write, METH_VARARGS, "(window, peer, offset, address, nbytes) -> status"),
    METHOD(window_signal, METH_FASTCALL, "(window, peer) -> status, or None when Python must look"),
    METHOD(window_wait, METH_FASTCALL, "(window, peer, timeout_ns=0) -> status, or None when Python must look"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_window(PyObject *module) { return PyModule_AddFunctions(module, methods); }
