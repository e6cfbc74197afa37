#include "module/gil.h"

#include "group/group.h"
#include "sync/wait.h"

void gil_release(struct caller *c) {
    if (c->lock_state == NULL) c->lock_state = PyEval_SaveThread();
}

static bool check_signals(struct caller *c) {
    gil_take_back(c);
    bool raised = PyErr_Occurred() != NULL || PyErr_CheckSignals();
    gil_release(c);
    return raised;
}

static PyObject *call_site_callable; /* returns the number of the calling site; used with the interpreter lock */

static uint32_t find_site(struct caller *c) {
    gil_take_back(c);
    PyObject *callable = Py_XNewRef(call_site_callable);
    /* If it raises, it was a signal handler, and our caller passes the exception on. */
    PyObject *site = callable ? PyObject_CallNoArgs(callable) : NULL;
    uint32_t number = site ? (uint32_t)PyLong_AsUnsignedLong(site) : 0;
    Py_XDECREF(site);
    Py_XDECREF(callable);
    gil_release(c);
    return number;
}

static PyObject *long_wait_callable; /* reports long waits; used with the interpreter lock */

/* If it raises: as above. */
static int64_t tell(struct caller *c, const struct long_wait *w) {
    gil_take_back(c);
    PyObject *callable = Py_XNewRef(long_wait_callable), *pause = NULL;
    if (callable && !PyErr_Occurred())
        pause = PyObject_CallFunction(callable, "OKiidi", (PyObject *)w->group->object,
                                      (unsigned long long)(uintptr_t)w->id, w->kind, w->missing, (double)w->ns / 1e9,
                                      w->status);
    double seconds = pause ? PyFloat_AsDouble(pause) : 0;
    Py_XDECREF(pause);
    Py_XDECREF(callable);
    gil_release(c);
    return (int64_t)(seconds * 1e9);
}

const struct caller_hooks python_caller = {
    .before_waiting = gil_release, .is_interrupted = check_signals, .find_site = find_site, .tell = tell};

static PyObject *use_long_wait_callback(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *callable, *before = long_wait_callable;
    double seconds;
    if (!PyArg_ParseTuple(args, "Od", &callable, &seconds)) return NULL;
    long_wait_callable = Py_NewRef(callable);
    Py_XDECREF(before);
    wait_tell_after((int64_t)(seconds * 1e9));
    Py_RETURN_NONE;
}

static PyObject *use_call_site_callback(PyObject *Py_UNUSED(self), PyObject *callable) {
    replace_kept(&call_site_callable, callable);
    Py_RETURN_NONE;
}

static PyObject *ticks_to_ns(PyObject *Py_UNUSED(self), PyObject *arg) {
    uint64_t ticks = PyLong_AsUnsignedLongLong(arg);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(symcomm_ticks_to_ns(ticks));
}

static PyMethodDef methods[] = {
    METHOD(use_call_site_callback, METH_O, "(callable): returns a site's number, asked when a call has to sleep."),
    METHOD(use_long_wait_callback, METH_VARARGS,
           "(callable, seconds): called with (group, id, kind, missing, seconds, status) for each wait that lasts so "
           "long, gives the seconds until the next call; 0: none. Status -1: it goes on."),
    METHOD(ticks_to_ns, METH_O, "(ticks) -> nanoseconds of CLOCK_MONOTONIC"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {CONSTANT(WAITS_FOR_RANKS),
                                            CONSTANT(WAITS_FOR_MESSAGE),
                                            CONSTANT(WAITS_FOR_SIGNAL),
                                            CONSTANT(WAIT_GOES_ON),
                                            {NULL, 0}};

int symcomm_add_gil(PyObject *module) { return symcomm_add_part(module, methods, constants); }
