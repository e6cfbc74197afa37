/* Plans, operations and requests as Python sees them: capsules, whose classes are in symcomm/group. */
#include <stdlib.h>

#include "exec/async.h"
#include "exec/exec.h"
#include "group/group.h"
#include "module/arguments.h"
#include "module/gil.h"

static const char REQUEST[] = "symcomm.request";

static void drop_plan(PyObject *capsule) { plan_free(PyCapsule_GetPointer(capsule, PLAN_CAPSULE)); }

static PyObject *make_plan(PyObject *self, PyObject *arg) {
    (void)self;
    char *bytes;
    Py_ssize_t size;
    const char *why;
    if (PyBytes_AsStringAndSize(arg, &bytes, &size) < 0) return NULL;
    struct plan *plan = plan_load(bytes, (size_t)size, &why);
    if (plan == NULL) return PyErr_Format(PyExc_ValueError, "not a plan: %s", why);
    return PyCapsule_New(plan, PLAN_CAPSULE, drop_plan);
}

static PyObject *plan_stage_bytes(PyObject *self, PyObject *arg) {
    (void)self;
    struct plan *p = PyCapsule_GetPointer(arg, PLAN_CAPSULE);
    return p ? PyLong_FromLongLong(p->stage_bytes) : NULL;
}

/* run(group, plan, inputs, outputs, timeout_ns, site) -> status */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    char *in[MAX_BUFFERS], *out[MAX_BUFFERS];
    if (expect_arguments(n_args, 6, "run") < 0) return NULL;
    struct group *g = to_group(args[0]);
    struct plan *p = g ? PyCapsule_GetPointer(args[1], PLAN_CAPSULE) : NULL;
    if (p == NULL) return NULL;
    struct buffers b = {in, out, to_addresses(args[2], in), to_addresses(args[3], out)};
    int64_t timeout = PyLong_AsLongLong(args[4]);
    struct origin from = {.site = (uint32_t)PyLong_AsUnsignedLong(args[5]), .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    if (b.n_in < 0 || b.n_out < 0 || PyErr_Occurred()) return NULL;
    int64_t status;
    bool idle = async_idle(g);
    count_call(&g->collectives, true, !idle);
    WITHOUT_GIL_UNLESS(idle && exec_is_short(g, p),
                       status = idle ? exec_run(g, p, &b, timeout, from) : async_run_queued(g, p, &b, timeout, from));
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(status);
}

static void call_back(struct request *r) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *callback = r->context;
    PyObject *result = PyObject_CallFunction(callback, "L", (long long)r->status);
    if (result == NULL) PyErr_WriteUnraisable(callback);
    Py_XDECREF(result);
    Py_DECREF(callback);
    PyGILState_Release(state);
}

static void drop_request(PyObject *capsule) { async_release(PyCapsule_GetPointer(capsule, REQUEST)); }

/* submit(group, plan, inputs, outputs, timeout_ns, site, callback or None) -> request */
static PyObject *submit(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    char *in[MAX_BUFFERS], *out[MAX_BUFFERS];
    if (expect_arguments(n_args, 7, "submit") < 0) return NULL;
    struct group *g = to_group(args[0]);
    struct plan *p = g ? PyCapsule_GetPointer(args[1], PLAN_CAPSULE) : NULL;
    if (p == NULL) return NULL;
    struct buffers b = {in, out, to_addresses(args[2], in), to_addresses(args[3], out)};
    int64_t timeout = PyLong_AsLongLong(args[4]);
    struct origin from = {.site = (uint32_t)PyLong_AsUnsignedLong(args[5]), .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    if (b.n_in < 0 || b.n_out < 0 || PyErr_Occurred()) return NULL;
    struct request *r = async_request(g, p, &b, timeout, from);
    if (r == NULL) return PyErr_NoMemory();
    if (args[6] != Py_None) r->context = Py_NewRef(args[6]), r->finished = call_back;
    PyObject *capsule = PyCapsule_New(r, REQUEST, drop_request);
    if (capsule && async_submit(g, r) < 0) {
        Py_XDECREF((PyObject *)r->context);
        Py_DECREF(capsule);
        return PyErr_Format(PyExc_OSError, "can't start new thread");
    }
    if (capsule) count_call(&g->collectives, true, true);
    return capsule;
}

/* request_wait(request, timeout_ns) -> status, or None when it is not done by then; a negative timeout only looks. */
static PyObject *request_wait(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    long long timeout;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &timeout)) return NULL;
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    if (r == NULL) return NULL;
    bool done = atomic_load_explicit(&r->done, memory_order_acquire);
    if (!done && r->group->forked) return PyLong_FromLong(STATUS_LEFT); /* it is the parent's, and ends there */
    if (!done && timeout >= 0) {
        WITHOUT_GIL(done = async_wait(r, timeout));
        if (PyErr_Occurred()) return NULL;
    }
    return done ? PyLong_FromLongLong(r->status) : Py_NewRef(Py_None);
}

/* request_number(request) -> which operation of its group it is */
static PyObject *request_number(PyObject *self, PyObject *capsule) {
    (void)self;
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    return r ? PyLong_FromUnsignedLongLong(r->number) : NULL;
}

static PyMethodDef methods[] = {
    {"make_plan", make_plan, METH_O, "make_plan(encoded) -> plan"},
    {"plan_stage_bytes", plan_stage_bytes, METH_O,
     "plan_stage_bytes(plan) -> how many bytes of a staging half it uses"},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(group, plan, inputs, outputs, timeout_ns, site) -> status"},
    {"submit", (PyCFunction)(void (*)(void))submit, METH_FASTCALL,
     "submit(group, plan, inputs, outputs, timeout_ns, site, callback) -> request"},
    {"request_number", request_number, METH_O, "request_number(request) -> which operation of its group it is"},
    {"request_wait", request_wait, METH_VARARGS, "request_wait(request, timeout_ns) -> status or None"},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_exec(PyObject *module) { return PyModule_AddFunctions(module, methods); }
