/* What a GPU collective asks of the driver most often, in one call.
 *
 * The core knows nothing of CUDA: it is handed the addresses of two driver functions (cuStreamWriteValue32 and
 * cuStreamWaitValue32) by gpu/driver.py, which found them in the driver's library. */
#include "common.h"

typedef int (*memory_operation)(void *stream, uint64_t address, uint32_t value, unsigned flags);

/* One memory operation per address; stops at the first that the driver refuses. */
static int for_each(memory_operation operation, void *stream, PyObject *addresses, uint32_t value) {
    Py_ssize_t n = PyTuple_Size(addresses);
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses, i));
        if (PyErr_Occurred()) return -1;
        int result = operation(stream, address, value, 0); /* 0: after all writes before it; wait until >=, cyclic */
        if (result != 0) return result;
    }
    return 0;
}

/* stream_meet(write, wait, stream, value, theirs, mine) -> the driver's result, 0 for success.
 * The stream tells every address in `theirs` that it has come to `value`, then waits until all in `mine` have. */
static PyObject *stream_meet(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long write, wait, stream, value;
    PyObject *theirs, *mine;
    if (!PyArg_ParseTuple(args, "KKKKO!O!", &write, &wait, &stream, &value, &PyTuple_Type, &theirs, &PyTuple_Type, &mine)) return NULL;
    void *on = (void *)(uintptr_t)stream;
    int result = for_each((memory_operation)(uintptr_t)write, on, theirs, (uint32_t)value);
    if (result == 0) result = for_each((memory_operation)(uintptr_t)wait, on, mine, (uint32_t)value);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

static PyMethodDef methods[] = {
    {"stream_meet", stream_meet, METH_VARARGS, "stream_meet(write, wait, stream, value, theirs, mine) -> CUresult"},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_gpu(PyObject *module) { return PyModule_AddFunctions(module, methods); }
