/* Handles many small tensors in one call: packs them into one buffer, or adds them up source by source. */
#include <stdlib.h>

#include "module/module.h"
#include "reduce/reduce.h"
#include "reduce/types.h"
#include "torch/tensor.h"

static size_t bytes_of(const struct tensor_view *view) { return (size_t)view->count * symcomm_itemsize[view->dtype]; }

static struct tensor_view *new_views(Py_ssize_t count) {
    struct tensor_view *views = malloc(((size_t)count + 1) * sizeof *views);
    if (views == NULL) PyErr_NoMemory();
    return views;
}

static PyObject *py_pack(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    PyObject *tensors;
    if (!PyArg_ParseTuple(args, "KO!:pack", &address, &PyList_Type, &tensors)) return NULL;
    Py_ssize_t n = PyList_Size(tensors);
    struct tensor_view *views = new_views(n);
    if (views == NULL) return NULL;
    Py_ssize_t seen = 0;
    while (seen < n && tensor_view(PyList_GetItem(tensors, seen), &views[seen])) seen++;
    if (seen == n) {
        Py_BEGIN_ALLOW_THREADS;
        char *to = (char *)(uintptr_t)address;
        for (Py_ssize_t i = 0; i < n; i++) {
            size_t size = bytes_of(&views[i]);
            if (size) memcpy(to, views[i].address, size); /* an empty tensor has no address */
            to += size;
        }
        Py_END_ALLOW_THREADS;
    }
    free(views);
    return PyBool_FromLong(seen == n);
}

/* Views tensor i of the results and of every list into column[0 .. n_lists]. Returns whether the core can add them: it
 * could view all, they have one type and length, and are no longer than `most`. */
static bool view_column(PyObject *results, PyObject *lists, Py_ssize_t n_lists, Py_ssize_t i, int64_t most,
                        struct tensor_view *column) {
    if (!tensor_view(PyList_GetItem(results, i), &column[0]) || column[0].count > most) return false;
    for (Py_ssize_t s = 0; s < n_lists; s++) {
        struct tensor_view *view = &column[s + 1];
        if (!tensor_view(PyList_GetItem(PyList_GetItem(lists, s), i), view)) return false;
        if (view->count != column[0].count || view->dtype != column[0].dtype) return false;
    }
    return symcomm_reduce_defined(column[0].dtype, RED_SUM);
}

static void add_columns(const struct tensor_view *views, Py_ssize_t n_columns, Py_ssize_t n_lists) {
    const void *sources[SYMCOMM_MAX_SOURCES];
    for (Py_ssize_t c = 0; c < n_columns; c++) {
        const struct tensor_view *column = views + c * (n_lists + 1);
        for (Py_ssize_t s = 0; s < n_lists; s++) sources[s] = column[s + 1].address;
        symcomm_reduce(column->dtype, RED_SUM, column->address, sources, (int)n_lists, (size_t)column->count, 1);
    }
}

static int check_lists(PyObject *lists, Py_ssize_t n_lists, Py_ssize_t n) {
    if (n_lists < 1 || n_lists > SYMCOMM_MAX_SOURCES) {
        PyErr_Format(PyExc_ValueError, "add_many: lists must be 1 to %d lists, got %zd.", SYMCOMM_MAX_SOURCES, n_lists);
        return -1;
    }
    for (Py_ssize_t s = 0; s < n_lists; s++) {
        PyObject *list = PyList_GetItem(lists, s);
        if (!PyList_Check(list) || PyList_Size(list) != n) {
            PyErr_Format(PyExc_ValueError, "add_many: lists[%zd] must be a list of %zd tensors, like results.", s, n);
            return -1;
        }
    }
    return 0;
}

static PyObject *py_add_many(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *results, *lists;
    long long most;
    if (!PyArg_ParseTuple(args, "O!O!L:add_many", &PyList_Type, &results, &PyList_Type, &lists, &most)) return NULL;
    Py_ssize_t n = PyList_Size(results), n_lists = PyList_Size(lists), taken = 0;
    if (check_lists(lists, n_lists, n) < 0) return NULL;
    struct tensor_view *views = new_views(n * (n_lists + 1));
    PyObject *left = views ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; left != NULL && i < n; i++) {
        if (view_column(results, lists, n_lists, i, most, views + taken * (n_lists + 1))) {
            taken++;
            continue;
        }
        append_new(&left, PyLong_FromSsize_t(i));
    }
    if (left != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        add_columns(views, taken, n_lists);
        Py_END_ALLOW_THREADS;
    }
    free(views);
    return left;
}

static PyMethodDef functions[] = {
    METHOD_AS(
        pack, py_pack, METH_VARARGS,
        "(address, tensors) -> bool: copy the elements of a list of tensors, one after the other, to `address`.\n"
        "False, and nothing happened, when one of them is not a contiguous tensor of the CPU. The interpreter lock is free."),
    METHOD_AS(
        add_many, py_add_many, METH_VARARGS,
        "(results, lists, most) -> list: results[i] becomes lists[0][i] + lists[1][i] + ... in that order.\n"
        "Returns the indices left out: longer than `most`, or not contiguous tensors of the CPU of one type and length.\n"
        "The interpreter lock is free while it adds."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_pack(PyObject *module) { return PyModule_AddFunctions(module, functions); }
