#include "module/gil.h"

#include "sync/sync.h"

THREAD_LOCAL PyThreadState *gil_released;

void gil_release(void) {
    symcomm_before_waiting = NULL;
    gil_released = PyEval_SaveThread();
}

static PyObject *call_site_callable; /* the number of the site that calls us; with the interpreter lock */

uint32_t gil_ask_call_site(void) {
    symcomm_call_site = NULL; /* once is enough */
    PyEval_RestoreThread(gil_released);
    PyObject *callable = Py_XNewRef(call_site_callable);
    /* What it raises comes from a signal handler, and is for our caller. */
    PyObject *site = callable ? PyObject_CallNoArgs(callable) : NULL;
    uint32_t number = site ? (uint32_t)PyLong_AsUnsignedLong(site) : 0;
    Py_XDECREF(site);
    Py_XDECREF(callable);
    symcomm_interrupted = gil_check_signals; /* a finalizer may have run an operation of its own */
    gil_released = PyEval_SaveThread();
    return number;
}

static PyObject *use_call_site_callback(PyObject *Py_UNUSED(self), PyObject *callable) {
    PyObject *before = call_site_callable;
    call_site_callable = Py_NewRef(callable);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

int gil_check_signals(void) {
    PyEval_RestoreThread(gil_released);
    int raised = PyErr_Occurred() != NULL || PyErr_CheckSignals();
    symcomm_interrupted = gil_check_signals; /* the handler may have run an operation of its own */
    gil_released = PyEval_SaveThread();
    return raised;
}

static PyObject *ticks_to_ns(PyObject *Py_UNUSED(self), PyObject *arg) {
    uint64_t ticks = PyLong_AsUnsignedLongLong(arg);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(symcomm_ticks_to_ns(ticks));
}

static PyMethodDef methods[] = {
    METHOD(use_call_site_callback, METH_O, "(callable): asked for a site's number when a call has to sleep."),
    METHOD(ticks_to_ns, METH_O, "(ticks) -> nanoseconds of CLOCK_MONOTONIC"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_gil(PyObject *module) { return PyModule_AddFunctions(module, methods); }
