#include "module/gil.h"

void gil_release(struct caller *c) {
    if (c->lock_state == NULL) c->lock_state = PyEval_SaveThread();
}

static bool check_signals(struct caller *c) {
    gil_take_back(c);
    bool raised = PyErr_Occurred() != NULL || PyErr_CheckSignals();
    gil_release(c);
    return raised;
}

static PyObject *call_site_callable; /* the number of the site that calls us; with the interpreter lock */

static uint32_t find_site(struct caller *c) {
    gil_take_back(c);
    PyObject *callable = Py_XNewRef(call_site_callable);
    /* If it raises, a signal handler did, and our caller passes that on. */
    PyObject *site = callable ? PyObject_CallNoArgs(callable) : NULL;
    uint32_t number = site ? (uint32_t)PyLong_AsUnsignedLong(site) : 0;
    Py_XDECREF(site);
    Py_XDECREF(callable);
    gil_release(c);
    return number;
}

const struct caller_hooks python_caller = {
    .before_waiting = gil_release, .is_interrupted = check_signals, .find_site = find_site};

static PyObject *use_call_site_callback(PyObject *Py_UNUSED(self), PyObject *callable) {
    replace_kept(&call_site_callable, callable);
    Py_RETURN_NONE;
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
