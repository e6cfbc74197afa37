/* Many small pieces of memory in one call: copied together, or added source by source. */
#include <stdlib.h>

#include "common.h"
#include "reduce.h"
#include "types.h"

/* A list of integers as an array that the caller frees; NULL with an exception set when it is not one of `length`. */
static uint64_t *integers_of(PyObject *list, Py_ssize_t length, const char *name) {
    if (!PyList_Check(list) || PyList_Size(list) != length) {
        PyErr_Format(PyExc_ValueError, "%s must be a list of %zd integers.", name, length);
        return NULL;
    }
    uint64_t *values = malloc(((size_t)length + 1) * sizeof *values);
    if (values == NULL) return (uint64_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < length; i++) {
        values[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(list, i));
        if (values[i] == (uint64_t)-1 && PyErr_Occurred()) {
            free(values);
            return NULL;
        }
    }
    return values;
}

static PyObject *py_pack(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    PyObject *address_list, *size_list;
    if (!PyArg_ParseTuple(args, "KOO:pack", &address, &address_list, &size_list)) return NULL;
    Py_ssize_t n = PyList_Check(address_list) ? PyList_Size(address_list) : 0;
    uint64_t *addresses = integers_of(address_list, n, "pack: addresses");
    uint64_t *sizes = addresses ? integers_of(size_list, n, "pack: sizes") : NULL;
    if (sizes != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        char *to = (char *)(uintptr_t)address;
        for (Py_ssize_t i = 0; i < n; i++) {
            if (sizes[i]) memcpy(to, (const void *)(uintptr_t)addresses[i], sizes[i]); /* empty tensors have no address */
            to += sizes[i];
        }
        Py_END_ALLOW_THREADS;
    }
    PyObject *result = sizes == NULL ? NULL : Py_NewRef(Py_None);
    free(addresses);
    free(sizes);
    return result;
}

/* Reads the addresses of every source into one table, source after source. */
static uint64_t *table_of(PyObject *sources, Py_ssize_t n_sources, Py_ssize_t n) {
    uint64_t *table = malloc(((size_t)(n_sources * n) + 1) * sizeof *table);
    if (table == NULL) return (uint64_t *)PyErr_NoMemory();
    for (Py_ssize_t s = 0; s < n_sources; s++) {
        uint64_t *row = integers_of(PyList_GetItem(sources, s), n, "add_many: each of sources");
        if (row == NULL) {
            free(table);
            return NULL;
        }
        memcpy(table + s * n, row, (size_t)n * sizeof *row);
        free(row);
    }
    return table;
}

static void add_all(int dtype, const uint64_t *into, const uint64_t *table, int n_sources, const uint64_t *counts,
                    size_t n) {
    const void *sources[SYMCOMM_MAX_SOURCES];
    for (size_t i = 0; i < n; i++) {
        if (counts[i] == 0) continue;
        for (int s = 0; s < n_sources; s++) sources[s] = (const void *)(uintptr_t)table[(size_t)s * n + i];
        symcomm_reduce(dtype, RED_SUM, (void *)(uintptr_t)into[i], sources, n_sources, counts[i], 1);
    }
}

static PyObject *py_add_many(PyObject *self, PyObject *args) {
    (void)self;
    int dtype;
    PyObject *into_list, *source_lists, *count_list;
    if (!PyArg_ParseTuple(args, "iOOO:add_many", &dtype, &into_list, &source_lists, &count_list)) return NULL;
    Py_ssize_t n = PyList_Check(into_list) ? PyList_Size(into_list) : 0;
    Py_ssize_t n_sources = PyList_Check(source_lists) ? PyList_Size(source_lists) : 0;
    if (n_sources < 1 || n_sources > SYMCOMM_MAX_SOURCES)
        return PyErr_Format(PyExc_ValueError, "add_many: sources must be 1 to %d lists, got %zd.", SYMCOMM_MAX_SOURCES,
                            n_sources);
    if (!symcomm_reduce_defined(dtype, RED_SUM))
        return PyErr_Format(PyExc_ValueError, "add_many: dtype must be a number of DType, got %d.", dtype);
    uint64_t *into = integers_of(into_list, n, "add_many: destinations");
    uint64_t *counts = into ? integers_of(count_list, n, "add_many: counts") : NULL;
    uint64_t *table = counts ? table_of(source_lists, n_sources, n) : NULL;
    if (table != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        add_all(dtype, into, table, (int)n_sources, counts, (size_t)n);
        Py_END_ALLOW_THREADS;
    }
    PyObject *result = table == NULL ? NULL : Py_NewRef(Py_None);
    free(into);
    free(counts);
    free(table);
    return result;
}

static PyMethodDef functions[] = {
    {"pack", py_pack, METH_VARARGS,
     "pack(dst, addresses, sizes): copy pieces of memory of `sizes` bytes, one after the other, to dst.\n"
     "Releases the interpreter lock."},
    {"add_many", py_add_many, METH_VARARGS,
     "add_many(dtype, destinations, sources, counts): destinations[i] becomes the sum of counts[i] elements of\n"
     "sources[0][i], sources[1][i] ... in that order. All are addresses. Releases the interpreter lock."},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_pack(PyObject *module) { return PyModule_AddFunctions(module, functions); }
