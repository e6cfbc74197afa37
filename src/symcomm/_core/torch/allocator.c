/* Puts torch's CPU tensors into the shared heap: torch's own Allocator, with two methods replaced.
 *
 * torch's class is C++. Ours has a copy of its table of methods, so what we do not replace stays torch's. Python finds
 * torch's addresses by their symbols; wrap_allocator() tries them with one allocation before torch sees our
 * allocator. */
#include <stdatomic.h>
#include <stdbool.h>

#include "memory/heap.h"
#include "module/module.h"

/* c10::DataPtr. Methods return it through a pointer that the caller passes, as C does for a struct of this size. */
struct data_ptr {
    void *data;
    void (*deleter)(void *context);
    void *context;
    int16_t device;
};

struct allocator {
    void **methods;
};

/* The table of methods of c10::Allocator, and the two words before it that name the class. */
enum { ALLOCATE = 2, IS_SIMPLE_DATA_PTR, RAW_DELETER, COPY_DATA, N_METHODS, BEFORE = 2 };

static struct allocator *torchs;
static void *table[BEFORE + N_METHODS];
static struct allocator ours = {table + BEFORE};
static struct data_ptr (*torchs_allocate)(struct allocator *self, size_t bytes);
static void (*torchs_deleter)(void *context);
static _Atomic size_t least; /* bytes: smaller tensors are ordinary */

/* Returns torch's ProfiledCPUMemoryReporter, through which its profiler counts allocations; NULL if not found. */
static void *(*reporter)(void);
static void (*report_new)(void *self, void *at, size_t bytes);
static void (*report_gone)(void *self, void *at);

static void release(void *context) {
    if (!heap_owns(context)) {
        torchs_deleter(context);
        return;
    }
    if (reporter) report_gone(reporter(), context);
    heap_free(context);
}

static struct data_ptr allocate(struct allocator *Py_UNUSED(self), size_t bytes) {
    heap_tick();
    void *at = bytes >= least ? heap_allocate(bytes) : NULL;
    if (at == NULL) {
        struct data_ptr ordinary = torchs_allocate(torchs, bytes);
        ordinary.deleter = release; /* raw_deleter() promises one deleter for all */
        return ordinary;
    }
    if (reporter) report_new(reporter(), at, bytes);
    return (struct data_ptr){at, release, at, (int16_t)0xff00}; /* the CPU, which has no index */
}

static void (*raw_deleter(const struct allocator *Py_UNUSED(self)))(void *) { return release; }

/* Whether one allocation looks as we expect. */
static bool is_understood(struct allocator *theirs, void *is_simple_data_ptr) {
    if (theirs->methods[IS_SIMPLE_DATA_PTR] != is_simple_data_ptr) return false;
    void (*(*deleter_of)(const struct allocator *))(void *) = theirs->methods[RAW_DELETER];
    torchs_allocate = theirs->methods[ALLOCATE];
    torchs_deleter = deleter_of(theirs);
    struct data_ptr sample = torchs_allocate(theirs, 64);
    bool is_right = sample.data && sample.context == sample.data && sample.deleter == torchs_deleter &&
                    sample.device == (int16_t)0xff00;
    if (is_right) torchs_deleter(sample.context);
    return is_right;
}

static PyObject *wrap_allocator(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long theirs, is_simple, get_reporter, new, gone;
    if (!PyArg_ParseTuple(args, "KKKKK", &theirs, &is_simple, &get_reporter, &new, &gone)) return NULL;
    if (torchs == NULL) {
        struct allocator *found = (void *)(uintptr_t)theirs;
        if (!is_understood(found, (void *)(uintptr_t)is_simple)) Py_RETURN_NONE;
        memcpy(table, found->methods - BEFORE, sizeof table);
        ours.methods[ALLOCATE] = (void *)allocate;
        ours.methods[RAW_DELETER] = (void *)raw_deleter;
        torchs = found;
    }
    bool can_report = get_reporter && new &&gone;
    report_new = (void *)(uintptr_t) new;
    report_gone = (void *)(uintptr_t)gone;
    reporter = can_report ? (void *)(uintptr_t)get_reporter : NULL;
    return PyLong_FromVoidPtr(&ours);
}

static PyObject *open_heap(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long base;
    long long bytes, offset;
    int fd;
    if (!PyArg_ParseTuple(args, "KLiL", &base, &bytes, &fd, &offset)) return NULL;
    errno = heap_open((char *)(uintptr_t)base, bytes, fd, offset);
    return errno ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyObject *set_heap_least(PyObject *Py_UNUSED(self), PyObject *bytes) {
    size_t wanted = PyLong_AsSize_t(bytes);
    if (PyErr_Occurred()) return NULL;
    least = wanted;
    Py_RETURN_NONE;
}

static PyObject *py_heap_stats(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored)) {
    struct heap_stats s = heap_stats();
    return Py_BuildValue("(LLLLLL)", (long long)s.live, (long long)s.idle, (long long)s.held, (long long)s.most,
                         (long long)s.served, (long long)s.full);
}

static PyObject *in_heap(PyObject *Py_UNUSED(self), PyObject *address) {
    void *at = PyLong_AsVoidPtr(address);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(heap_owns(at));
}

static PyMethodDef methods[] = {
    METHOD(wrap_allocator, METH_VARARGS,
           "(torch's Allocator, its is_simple_data_ptr, functions of its memory reporter or 0: get, New, Delete) -> "
           "address of ours, or None where torch's is not as we know it"),
    METHOD(open_heap, METH_VARARGS, "(address, bytes, fd, offset in the file)"),
    METHOD(set_heap_least, METH_O, "(bytes): tensors of fewer bytes are ordinary"),
    METHOD_AS(heap_stats, py_heap_stats, METH_NOARGS, "() -> (live, idle, held by children, most, served, full)"),
    METHOD(in_heap, METH_O, "(address) -> whether it lies in the heap"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_allocator(PyObject *module) { return PyModule_AddFunctions(module, methods); }
