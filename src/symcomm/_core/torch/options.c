/* Reads torch's options objects in memory. A call reads three attributes, each of which takes a third of a microsecond
 * in Python. symcomm/torch_backend/options_layout.py finds their offsets. */
#include "torch/options.h"

#include <stdbool.h>

#include "reduce/types.h"

#define MAX_CALLS 16 /* of the numbers in symcomm/ops.py */

struct layout { /* of one kind of call's options: offsets in the C++ object; -1: it has no such field */
    PyTypeObject *type;
    Py_ssize_t object_at; /* of the pointer to the C++ object in the Python object */
    Py_ssize_t timeout_at, async_at, redop_at, root_at, tensor_at;
};

static struct layout layouts[MAX_CALLS];
static PyObject *is_profiling; /* a callable */

static bool profiler_looks_on(void) {
    PyObject *answer = PyObject_CallNoArgs(is_profiling);
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer != Py_False;
}

int options_read(int64_t call, PyObject *options, int64_t *detail) {
    if (call < 0 || call >= MAX_CALLS || layouts[call].type != Py_TYPE(options)) return OPTIONS_UNKNOWN;
    const struct layout *at = &layouts[call];
    const char *object = *(const char **)(void *)((char *)options + at->object_at);
    if (object == NULL) return OPTIONS_UNKNOWN;
    int64_t timeout, root = 0, tensor = 0;
    uint8_t redop = 0;
    memcpy(&timeout, object + at->timeout_at, sizeof timeout);
    if (at->root_at >= 0) memcpy(&root, object + at->root_at, sizeof root);
    if (at->tensor_at >= 0) memcpy(&tensor, object + at->tensor_at, sizeof tensor);
    if (at->redop_at >= 0) redop = (uint8_t)object[at->redop_at];
    /* A time-out that is not set is -1 ms. */
    if (timeout >= 0 || redop > RED_BXOR || tensor != 0 || profiler_looks_on()) return OPTIONS_SLOW;
    *detail = at->redop_at >= 0 && at->root_at >= 0 ? root << 8 | redop : root + redop;
    return object[at->async_at] ? OPTIONS_ASYNC : OPTIONS_FAST;
}

/* use_options(is_profiling, ((call, type, object_at, timeout_at, async_at, redop_at, root_at, tensor_at), ...)) */
static PyObject *use_options(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *callable, *found;
    if (!PyArg_ParseTuple(args, "OO!", &callable, &PyTuple_Type, &found)) return NULL;
    replace_kept(&is_profiling, callable);
    for (Py_ssize_t i = 0; i < PyTuple_Size(found); i++) {
        int call;
        PyObject *type;
        struct layout at;
        if (!PyArg_ParseTuple(PyTuple_GetItem(found, i), "iO!nnnnnn", &call, &PyType_Type, &type, &at.object_at,
                              &at.timeout_at, &at.async_at, &at.redop_at, &at.root_at, &at.tensor_at))
            return NULL;
        if (call < 0 || call >= MAX_CALLS) return PyErr_Format(PyExc_ValueError, "no kind of call has number %d", call);
        at.type = (PyTypeObject *)Py_NewRef(type);
        layouts[call] = at;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(use_options, METH_VARARGS, "(is_profiling, layouts): run_cached_options() reads options of these types."),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(OPTIONS_SLOW),
    CONSTANT(OPTIONS_UNKNOWN),
    CONSTANT(OPTIONS_ASYNC),
    {NULL, 0},
};

int symcomm_add_options(PyObject *module) { return symcomm_add_part(module, methods, constants); }
