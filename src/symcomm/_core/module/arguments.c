#include "module/arguments.h"

struct group *to_group(PyObject *object) {
    if (Py_TYPE(object) == group_type) return group_of(object);
    PyErr_SetString(PyExc_TypeError, "not a native.Group");
    return NULL;
}

int convert_group(PyObject *object, void *group) { return (*(struct group **)group = to_group(object)) != NULL; }

static int to_address(PyObject *object, char **address) {
    *address = PyLong_AsVoidPtr(object);
    return *address == NULL && PyErr_Occurred() ? -1 : 0;
}

int to_addresses(PyObject *object, char **addresses) {
    if (PyLong_Check(object)) return to_address(object, addresses) < 0 ? -1 : 1;
    Py_ssize_t n = PyTuple_Size(object);
    if (n < 0) return -1;
    if (n > MAX_BUFFERS) {
        PyErr_Format(PyExc_ValueError, "at most %d buffers", MAX_BUFFERS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (to_address(PyTuple_GetItem(object, i), &addresses[i]) < 0) return -1;
    return (int)n;
}

int expect_arguments(Py_ssize_t got, Py_ssize_t expected, const char *name) {
    if (got == expected) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, got);
    return -1;
}

bool read_timeout(PyObject *const *args, Py_ssize_t n_args, PyObject *names, PyObject **timeout) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    *timeout = n_args + named == 1 ? args[0] : Py_None;
    bool known = named == 0 || PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "timeout") == 0;
    if (n_args + named <= 1 && known) return true;
    return PyErr_Format(PyExc_TypeError, "wait() takes one argument, timeout") != NULL;
}
