/* Reductions: picks the kernel for an element type and operation; and the same for Python. */
#include "common.h"

#include "reduce.h"
#include "reduce_kernels.h"

static const struct reduce_entry *entry_of(int dtype, int op) {
    if (dtype < 0 || dtype >= DT_COUNT || op < 0 || op >= RED_COUNT) return NULL;
    const struct reduce_entry *entry = &symcomm_reduce_types[dtype].ops[op];
    return entry->run == NULL ? NULL : entry;
}

/* Toward zero, then wrapped to 64 bits; what no 64-bit integer can hold becomes the nearest, and NaN zero. */
static uint64_t integer_of(double real) {
    if (real != real) return 0;
    if (real >= 0x1p64) return UINT64_MAX;
    if (real >= 0x1p63) return (uint64_t)real;
    if (real <= -0x1p63) return (uint64_t)INT64_MIN;
    return (uint64_t)(int64_t)real;
}

int symcomm_reduce_defined(int dtype, int op) { return entry_of(dtype, op) != NULL; }

/* One reduction, with all that depends on its type and operation already chosen. */
struct reduction {
    const struct reduce_type *type;
    int op; /* RED_MEAN for some AVG */
    int n_sources;
    struct reduce_scalar scalar;
};

/* Block by block, elements become float32, are combined as such, and are rounded once at the end.
 * PREMUL_SUM scales every source before the sum, AVG and MEAN scale after it. */
static void reduce_widened(const struct reduction *r, char *dst, const void *const *sources, size_t first,
                           size_t count) {
    enum { BLOCK = 1024 }; /* two blocks of 4 KiB stay in any L1 cache */
    float total[BLOCK], next[BLOCK];
    const void *const pair[] = {total, next};
    const struct reduce_entry *ops = symcomm_reduce_types[DT_FLOAT32].ops;
    const int scale_before = r->op == RED_PREMUL_SUM, scale_after = r->op == RED_AVG || r->op == RED_MEAN;
    reduce_kernel *run = ops[r->op].run, *combine = scale_before || scale_after ? ops[RED_SUM].run : run;
    const struct reduce_scalar one = {1, 1};
    for (size_t start = first; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        for (int s = 0; s < r->n_sources; s++) {
            float *into = s == 0 ? total : next;
            r->type->widen(into, (const char *)sources[s] + start * r->type->itemsize, length);
            if (scale_before) run(into, &pair[s > 0], 1, length, r->scalar);
            if (s > 0) combine(total, pair, 2, length, one);
        }
        if (scale_after) run(total, pair, 1, length, r->scalar);
        r->type->narrow(dst + start * r->type->itemsize, total, length);
    }
}

int symcomm_reduce(int dtype, int op, void *dst, const void *const *sources, int n_sources, size_t count,
                   double factor) {
    if (entry_of(dtype, op) == NULL || n_sources < 1 || n_sources > SYMCOMM_MAX_SOURCES) return -1;
    struct reduction r = {&symcomm_reduce_types[dtype], op, n_sources, {1, 1}};
    if (op == RED_PREMUL_SUM) r.scalar = (struct reduce_scalar){factor, integer_of(factor)};
    if (op == RED_AVG) r.scalar.real = n_sources;
    if (op == RED_AVG && r.type->floating && (n_sources & (n_sources - 1)) == 0) {
        r.op = RED_MEAN;
        r.scalar.real = 1.0 / n_sources;
    }
    const struct reduce_entry *entry = &r.type->ops[r.op];
    size_t lanes = r.type->lanes, whole = lanes ? count / lanes : 0;
    if (whole > 0) entry->run(dst, sources, n_sources, whole * entry->parts, r.scalar);
    if (whole * lanes < count) reduce_widened(&r, dst, sources, whole * lanes, count);
    return 0;
}

int symcomm_scale(int dtype, void *dst, const void *src, size_t count, double factor) {
    return symcomm_reduce(dtype, RED_PREMUL_SUM, dst, &src, 1, count, factor);
}

int symcomm_multiply(int dtype, void *dst, const void *a, const void *b, size_t count) {
    const void *sources[] = {a, b};
    return symcomm_reduce(dtype, RED_PRODUCT, dst, sources, 2, count, 1);
}

/* --- Python -------------------------------------------------------------------------------------------------- */

static int check_pair(int dtype, int op) {
    if (dtype < 0 || dtype >= DT_COUNT) {
        PyErr_Format(PyExc_ValueError, "reduce: dtype must be a number of DType, 0 to %d, got %d.", DT_COUNT - 1, dtype);
        return -1;
    }
    if (op < 0 || op >= RED_COUNT) {
        PyErr_Format(PyExc_ValueError, "reduce: op must be a number of RedOpType, 0 to %d, got %d.", RED_COUNT - 1, op);
        return -1;
    }
    if (!symcomm_reduce_defined(dtype, op)) {
        PyErr_Format(PyExc_ValueError, "reduce: %s is not defined for %s; bitwise operations need integers or bool, "
                     "and complex numbers have no MIN or MAX.",
                     symcomm_reduce_op_names[op], symcomm_reduce_types[dtype].name);
        return -1;
    }
    return 0;
}

/* Fills `sources` from a sequence of addresses; returns how many, or -1 with an exception set. */
static int read_sources(PyObject *sequence, const void **sources) {
    Py_ssize_t n = PySequence_Size(sequence);
    if (n < 0) return -1;
    if (n < 1 || n > SYMCOMM_MAX_SOURCES) {
        PyErr_Format(PyExc_ValueError, "reduce: sources must be 1 to %d addresses, got %zd.", SYMCOMM_MAX_SOURCES, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *address = PySequence_GetItem(sequence, i);
        if (address == NULL) return -1;
        sources[i] = PyLong_AsVoidPtr(address);
        Py_DECREF(address);
        if (PyErr_Occurred()) return -1;
    }
    return (int)n;
}

static PyObject *py_reduce(PyObject *self, PyObject *args) {
    (void)self;
    int dtype, op;
    PyObject *dst_address, *addresses;
    Py_ssize_t count;
    double factor = 1;
    if (!PyArg_ParseTuple(args, "iiOOn|d:reduce", &dtype, &op, &dst_address, &addresses, &count, &factor)) return NULL;
    if (check_pair(dtype, op) < 0) return NULL;
    if (count < 0) return PyErr_Format(PyExc_ValueError, "reduce: count must be 0 or more, got %zd.", count);
    void *dst = PyLong_AsVoidPtr(dst_address);
    if (dst == NULL && PyErr_Occurred()) return NULL;
    const void *sources[SYMCOMM_MAX_SOURCES];
    int n_sources = read_sources(addresses, sources);
    if (n_sources < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    symcomm_reduce(dtype, op, dst, sources, n_sources, (size_t)count, factor);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_reduce_defined(PyObject *self, PyObject *args) {
    (void)self;
    int dtype, op;
    if (!PyArg_ParseTuple(args, "ii:reduce_defined", &dtype, &op)) return NULL;
    return PyBool_FromLong(symcomm_reduce_defined(dtype, op));
}

static PyObject *py_reduce_tables(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    PyObject *dtypes = PyTuple_New(DT_COUNT), *ops = PyTuple_New(RED_COUNT);
    if (dtypes == NULL || ops == NULL) goto failed;
    for (int i = 0; i < DT_COUNT; i++) {
        const struct reduce_type *type = &symcomm_reduce_types[i];
        PyObject *item = Py_BuildValue("(sn)", type->name, (Py_ssize_t)type->itemsize);
        if (item == NULL || PyTuple_SetItem(dtypes, i, item) < 0) goto failed;
    }
    for (int i = 0; i < RED_COUNT; i++) {
        PyObject *item = PyUnicode_FromString(symcomm_reduce_op_names[i]);
        if (item == NULL || PyTuple_SetItem(ops, i, item) < 0) goto failed;
    }
    return Py_BuildValue("(NN)", dtypes, ops);
failed:
    Py_XDECREF(dtypes);
    Py_XDECREF(ops);
    return NULL;
}

static PyMethodDef functions[] = {
    {"reduce", py_reduce, METH_VARARGS,
     "reduce(dtype, op, dst, sources, count, factor=1.0): combine `count` elements of each source, in order, into dst.\n"
     "dst and sources are addresses; dst may be one of the sources. Releases the interpreter lock."},
    {"reduce_defined", py_reduce_defined, METH_VARARGS,
     "reduce_defined(dtype, op): whether that pair of numbers is one that reduce() accepts."},
    {"reduce_tables", py_reduce_tables, METH_NOARGS,
     "((name, itemsize) of every dtype, name of every operation), each at the index that is its number."},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_reduce(PyObject *module) { return PyModule_AddFunctions(module, functions); }
