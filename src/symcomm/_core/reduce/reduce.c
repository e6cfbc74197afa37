/* Reductions: picks the kernel for an element type and operation, for the core and for Python. */
#include "module/module.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "reduce/kernels.h"
#include "reduce/reduce.h"

/* --- sets of kernels ----------------------------------------------------------------------------------------- */

/* From how many bytes of each source on a set's kernels for long sums are used. All_reduce of bfloat16 on two cores of
 * a Cascade Lake takes 0.92 times as long without them at 1 KiB, 1.05 at 16 KiB and 1.4 at 256 KiB. */
#define LONG_BYTES 8192

static struct {
    const char *name;
    struct reduce_type types[DT_COUNT];
    const struct reduce_type *of_long; /* what is better for long sums; NULL: nothing */
} sets[REDUCE_SETS];                   /* the sets that this CPU can run; what one lacks, it has of the set before */
static int n_sets, chosen;
static const struct reduce_type *types, *types_of_long; /* of the chosen set */

#define OP_NAME(NAME) #NAME,
static const char *const op_names[RED_COUNT] = {SYMCOMM_REDOPS(OP_NAME)};

static void add_set(const char *name, const struct reduce_type *own, const struct reduce_type *of_long) {
    if (own == NULL) return;
    sets[n_sets].of_long = of_long;
    for (int d = 0; d < DT_COUNT; d++) {
        const int better = n_sets == 0 || own[d].name != NULL;
        sets[n_sets].types[d] = better ? own[d] : sets[n_sets - 1].types[d];
    }
    sets[n_sets++].name = name;
}

static void find_sets(void) {
#if defined(__x86_64__)
    add_set("baseline", symcomm_kernels_baseline(), NULL);
    add_set("avx2", symcomm_kernels_avx2(), NULL);
    add_set("avx512", symcomm_kernels_avx512(), symcomm_kernels_avx512_wide());
#elif defined(__aarch64__)
    add_set("neon", symcomm_kernels_baseline(), NULL);
    add_set("fp16", symcomm_kernels_fp16(), NULL);
    add_set("bf16", symcomm_kernels_bf16(), NULL);
#else
    add_set("baseline", symcomm_kernels_baseline(), NULL);
#endif
}

const char *symcomm_kernel_set(void) { return sets[chosen].name; }

/* Returns 0, or -1 if this CPU has no such set. */
static int choose_set(const char *name) {
    for (int i = 0; i < n_sets; i++) {
        if (strcmp(sets[i].name, name)) continue;
        chosen = i;
        types = sets[i].types, types_of_long = sets[i].of_long;
        return 0;
    }
    return -1;
}

/* --- one reduction ------------------------------------------------------------------------------------------- */

static const struct reduce_entry *entry_of(int dtype, int op) {
    if (dtype < 0 || dtype >= DT_COUNT || op < 0 || op >= RED_COUNT) return NULL;
    const struct reduce_entry *entry = &types[dtype].ops[op];
    return entry->run == NULL ? NULL : entry;
}

/* Toward zero, then wrapped to 64 bits. What no 64-bit integer can hold becomes the nearest one; NaN becomes 0. */
static uint64_t integer_of(double real) {
    if (real != real) return 0;
    if (real >= 0x1p64) return UINT64_MAX;
    if (real >= 0x1p63) return (uint64_t)real;
    if (real <= -0x1p63) return (uint64_t)INT64_MIN;
    return (uint64_t)(int64_t)real;
}

int symcomm_reduce_defined(int dtype, int op) { return entry_of(dtype, op) != NULL; }

static const struct reduce_entry *kernel_for(int dtype, int op, size_t count) {
    if (types_of_long == NULL || types_of_long[dtype].name == NULL) return &types[dtype].ops[op];
    return count * types[dtype].itemsize < LONG_BYTES ? &types[dtype].ops[op] : &types_of_long[dtype].ops[op];
}

int symcomm_reduce(int dtype, int op, void *dst, const void *const *sources, int n_sources, size_t count,
                   double factor) {
    if (entry_of(dtype, op) == NULL || n_sources < 1 || n_sources > SYMCOMM_MAX_SOURCES) return -1;
    int kernel = op;
    struct reduce_scalar scalar = {1, 1};
    if (op == RED_PREMUL_SUM) { /* a NaN without a payload, see bfloat16_encode() */
        scalar = (struct reduce_scalar){factor == factor ? factor : (double)NAN, integer_of(factor)};
    } else if (op == RED_AVG) {
        const uint64_t by = factor > 1 && factor < 0x1p53 ? (uint64_t)factor : (uint64_t)n_sources;
        scalar.real = (double)by;
        if (types[dtype].floating && (by & (by - 1)) == 0) {
            scalar.real = 1.0 / (double)by;
            kernel = RED_MEAN;
        }
    }
    const struct reduce_entry *entry = kernel_for(dtype, kernel, count);
    entry->run(dst, sources, n_sources, count * entry->parts, scalar);
    return 0;
}

/* --- Python -------------------------------------------------------------------------------------------------- */

static int check_pair(int dtype, int op) {
    if (dtype < 0 || dtype >= DT_COUNT) {
        PyErr_Format(PyExc_ValueError, "reduce: dtype must be a number of DType, 0 to %d, got %d.", DT_COUNT - 1,
                     dtype);
        return -1;
    }
    if (op < 0 || op >= RED_COUNT) {
        PyErr_Format(PyExc_ValueError, "reduce: op must be a number of RedOpType, 0 to %d, got %d.", RED_COUNT - 1, op);
        return -1;
    }
    if (!symcomm_reduce_defined(dtype, op)) {
        PyErr_Format(PyExc_ValueError,
                     "reduce: %s is not defined for %s; bitwise operations need integers or bool, "
                     "and complex numbers have no MIN or MAX.",
                     op_names[op], types[dtype].name);
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

static PyObject *py_reduce(PyObject *Py_UNUSED(self), PyObject *args) {
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
    Py_BEGIN_ALLOW_THREADS;
    symcomm_reduce(dtype, op, dst, sources, n_sources, (size_t)count, factor);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* Times calls that may be as short as a microsecond, in a row, with nothing in between. */
static PyObject *py_time_reduce(PyObject *Py_UNUSED(self), PyObject *args) {
    int dtype, op;
    unsigned long long dst;
    PyObject *addresses;
    Py_ssize_t count;
    long repeats;
    if (!PyArg_ParseTuple(args, "iiKOnl:time_reduce", &dtype, &op, &dst, &addresses, &count, &repeats)) return NULL;
    const int copy = op < 0;
    if (!copy && check_pair(dtype, op) < 0) return NULL;
    const void *sources[SYMCOMM_MAX_SOURCES];
    int n_sources = read_sources(addresses, sources);
    if (n_sources < 0) return NULL;
    struct timespec begin, end;
    Py_BEGIN_ALLOW_THREADS;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 0; i < repeats; i++) {
        if (copy) memcpy((void *)(uintptr_t)dst, sources[0], (size_t)count);
        else symcomm_reduce(dtype, op, (void *)(uintptr_t)dst, sources, n_sources, (size_t)count, 0.5);
        __asm__ volatile("" : : : "memory"); /* or the compiler might copy only once */
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    Py_END_ALLOW_THREADS;
    return PyFloat_FromDouble((double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9);
}

static PyObject *py_reduce_defined(PyObject *Py_UNUSED(self), PyObject *args) {
    int dtype, op;
    if (!PyArg_ParseTuple(args, "ii:reduce_defined", &dtype, &op)) return NULL;
    return PyBool_FromLong(symcomm_reduce_defined(dtype, op));
}

static PyObject *py_reduce_tables(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
    PyObject *dtypes = PyTuple_New(DT_COUNT), *ops = PyTuple_New(RED_COUNT);
    if (dtypes == NULL || ops == NULL) goto failed;
    for (int i = 0; i < DT_COUNT; i++) {
        const struct reduce_type *type = &types[i];
        PyObject *item = Py_BuildValue("(sn)", type->name, (Py_ssize_t)type->itemsize);
        if (item == NULL || PyTuple_SetItem(dtypes, i, item) < 0) goto failed;
    }
    for (int i = 0; i < RED_COUNT; i++) {
        PyObject *item = PyUnicode_FromString(op_names[i]);
        if (item == NULL || PyTuple_SetItem(ops, i, item) < 0) goto failed;
    }
    return Py_BuildValue("(NN)", dtypes, ops);
failed:
    Py_XDECREF(dtypes);
    Py_XDECREF(ops);
    return NULL;
}

static PyObject *py_reduce_sets(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
    PyObject *names = PyTuple_New(n_sets);
    for (int i = 0; names != NULL && i < n_sets; i++) {
        PyObject *name = PyUnicode_FromString(sets[i].name);
        if (name == NULL || PyTuple_SetItem(names, i, name) < 0) Py_CLEAR(names);
    }
    return names == NULL ? NULL : Py_BuildValue("(Ns)", names, sets[chosen].name);
}

static int choose_or_raise(const char *name, const char *whose) {
    if (choose_set(name) == 0) return 0;
    char known[64] = "";
    for (int i = 0; i < n_sets; i++) {
        if (i) strcat(known, ", ");
        strcat(known, sets[i].name);
    }
    PyErr_Format(PyExc_ValueError, "%s: the reduction kernels of this CPU are %s, got '%s'.", whose, known, name);
    return -1;
}

static PyObject *py_use_reduce_set(PyObject *Py_UNUSED(self), PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s:use_reduce_set", &name)) return NULL;
    if (choose_or_raise(name, "use_reduce_set") < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    METHOD_AS(
        reduce, py_reduce, METH_VARARGS,
        "(dtype, op, dst, sources, count, factor=1.0): combine `count` elements of each source, as a tree, into dst.\n"
        "dst and sources are addresses; dst may be one of the sources. Releases the interpreter lock."),
    METHOD_AS(
        time_reduce, py_time_reduce, METH_VARARGS,
        "(dtype, op, dst, sources, count, repeats): the seconds that `repeats` calls of reduce() take, one after\n"
        "another; or, if op is -1, `repeats` copies of `count` bytes of the first source. Releases the interpreter lock."),
    METHOD_AS(reduce_defined, py_reduce_defined, METH_VARARGS,
              "(dtype, op): whether that pair of numbers is one that reduce() accepts."),
    {"reduce_tables", py_reduce_tables, METH_NOARGS,
     "((name, itemsize) of every dtype, name of every operation), each at the index that is its number."},
    {"reduce_sets", py_reduce_sets, METH_NOARGS,
     "((name of every set of kernels that this CPU can run, the best one last), name of the one in use)."},
    METHOD_AS(use_reduce_set, py_use_reduce_set, METH_VARARGS,
              "(name): use these kernels from now on, in the whole process. All give the same bits."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_reduce(PyObject *module) {
    if (n_sets == 0) find_sets();
    const char *wanted = getenv("SYMCOMM_KERNELS");
    if (wanted == NULL || *wanted == 0) wanted = sets[n_sets - 1].name;
    if (choose_or_raise(wanted, "SYMCOMM_KERNELS") < 0) return -1;
    return PyModule_AddFunctions(module, functions);
}
