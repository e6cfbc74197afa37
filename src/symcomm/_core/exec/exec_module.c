/* Plans and requests as Python sees them, and the methods of native.Group that run them. */
#include "exec/exec_module.h"

#include <stdlib.h>

#include "exec/async.h"
#include "exec/exec.h"
#include "group/group_module.h"
#include "module/gil.h"
#include "torch/tensor.h"

static const char REQUEST[] = "symcomm.request", BATCH[] = "symcomm.batch";

static void drop_plan(PyObject *capsule) { plan_free(PyCapsule_GetPointer(capsule, PLAN_CAPSULE)); }

static PyObject *make_plan(PyObject *Py_UNUSED(self), PyObject *arg) {
    char *bytes;
    Py_ssize_t size;
    const char *why;
    if (PyBytes_AsStringAndSize(arg, &bytes, &size) < 0) return NULL;
    struct plan *plan = plan_load(bytes, (size_t)size, &why);
    if (plan == NULL) return PyErr_Format(PyExc_ValueError, "not a plan: %s", why);
    return PyCapsule_New(plan, PLAN_CAPSULE, drop_plan);
}

static PyObject *plan_stage_bytes(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct plan *p = PyCapsule_GetPointer(arg, PLAN_CAPSULE);
    return p ? PyLong_FromLongLong(p->stage_bytes) : NULL;
}

/* What run() and submit() are told. */
struct call {
    struct group *group;
    struct plan *plan;
    char *in[MAX_BUFFERS], *out[MAX_BUFFERS];
    struct buffers buffers;
    int64_t timeout;
    struct origin from;
    PyObject *written;
};

/* From (plan, inputs, outputs, timeout_ns, site, written). False with an exception set. */
static bool read_call(struct call *c, PyObject *self, PyObject *const *args) {
    c->group = group_of(self);
    c->plan = PyCapsule_GetPointer(args[0], PLAN_CAPSULE);
    if (c->plan == NULL) return false;
    c->buffers = (struct buffers){c->in, c->out, to_addresses(args[1], c->in), to_addresses(args[2], c->out)};
    c->timeout = PyLong_AsLongLong(args[3]);
    c->from =
        (struct origin){.site = (uint32_t)PyLong_AsUnsignedLong(args[4]), .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    c->written = args[5];
    if (!PyTuple_Check(c->written)) return PyErr_Format(PyExc_TypeError, "written must be a tuple") != NULL;
    return c->buffers.n_in >= 0 && c->buffers.n_out >= 0 && !PyErr_Occurred();
}

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct call c;
    if (expect_arguments(n_args, 6, "run") < 0 || !read_call(&c, self, args)) return NULL;
    int64_t status;
    tensors_change(c.written);
    bool idle = async_idle(c.group);
    count_call(&c.group->collectives, true, !idle);
    WITHOUT_GIL_UNLESS(idle && exec_is_short(c.group, c.plan),
                       status = async_run_in_turn(c.group, c.plan, &c.buffers, c.timeout, c.from, idle));
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

/* Takes what a preparation returned: (plan, inputs, outputs), words to refuse the call with, or None where all ranks
 * know that it does not take place. Negative: there is an exception. */
static int64_t take_prepared(struct request *r, PyObject *made) {
    char *in[MAX_BUFFERS], *out[MAX_BUFFERS];
    if (made == NULL) return -1;
    if (made == Py_None) return STATUS_REFUSED;
    if (PyBytes_Check(made)) {
        bool is_told = async_refuse_with(r, PyBytes_AsString(made), (size_t)PyBytes_Size(made));
        return is_told ? STATUS_OK : (PyErr_NoMemory(), -1);
    }
    PyObject *plan, *inputs, *outputs;
    if (!PyArg_ParseTuple(made, "OOO", &plan, &inputs, &outputs)) return -1;
    struct buffers b = {in, out, to_addresses(inputs, in), to_addresses(outputs, out)};
    struct plan *p = PyCapsule_GetPointer(plan, PLAN_CAPSULE);
    if (p == NULL || PyErr_Occurred()) return -1;
    return async_use(r, p, &b) ? STATUS_OK : (PyErr_NoMemory(), -1);
}

/* What it raises, a signal handler did: that ends the group, and its caller passes it on. */
static int64_t prepare(struct request *r) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *made = PyErr_Occurred() ? NULL : PyObject_CallNoArgs(r->preparation);
    int64_t status = take_prepared(r, made);
    Py_XDECREF(made);
    bool has_caller = symcomm_caller && symcomm_caller->hooks;
    if (status < 0 && !has_caller) PyErr_WriteUnraisable(r->preparation);
    PyGILState_Release(state);
    if (status >= 0) return status;
    struct visit v;
    visit_begin(&v, r->group);
    status = sync_fail(&v, STATUS_INTERRUPTED, r->group->rank);
    visit_end(&v);
    return status;
}

static void drop_request(PyObject *capsule) {
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
    async_release(r);
}

static void drop_batch(PyObject *capsule) { async_leave_batch(PyCapsule_GetPointer(capsule, BATCH)); }

static PyObject *make_batch(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    struct batch *b = calloc(1, sizeof *b);
    if (b == NULL) return PyErr_NoMemory();
    b->references = 1;
    return PyCapsule_New(b, BATCH, drop_batch);
}

static void watch_version(struct request *r, PyObject *written) {
    _Atomic uint32_t *version = tensor_version(written);
    if (version) r->versions[r->n_versions++] = version;
}

/* The caller may look at the tensors, or save them for backward, while the operation runs: their versions are raised
 * now and when it ends. Until then the caller keeps the tensors, as it does their memory. False: no memory. */
static bool watch_versions(struct request *r, PyObject *written) {
    bool several = PyTuple_Check(written);
    Py_ssize_t n = several ? PyTuple_Size(written) : 1;
    tensors_change(written);
    if (n == 0) return true;
    r->versions = malloc((size_t)n * sizeof *r->versions);
    if (r->versions == NULL) return false;
    if (!several) watch_version(r, written);
    for (Py_ssize_t i = 0; several && i < n; i++) watch_version(r, PyTuple_GetItem(written, i));
    return true;
}

PyObject *exec_submit(struct request *r, PyObject *written, PyObject *callback) {
    if (r == NULL) return PyErr_NoMemory();
    if (written && !watch_versions(r, written)) {
        async_release(r);
        return PyErr_NoMemory();
    }
    if (callback) r->context = Py_NewRef(callback), r->finished = call_back;
    PyObject *capsule = PyCapsule_New(r, REQUEST, drop_request);
    if (capsule && async_submit(r->group, r) < 0) {
        Py_XDECREF((PyObject *)r->context);
        Py_DECREF(capsule);
        return PyErr_Format(PyExc_OSError, "can't start new thread");
    }
    if (capsule) count_call(&r->group->collectives, (r->from.way & FLIGHT_SLOW_PATH) != 0, true);
    return capsule;
}

static PyObject *submit(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct call c;
    if (expect_arguments(n_args, 8, "submit") < 0 || !read_call(&c, self, args)) return NULL;
    struct batch *batch = args[7] == Py_None ? NULL : PyCapsule_GetPointer(args[7], BATCH);
    if (PyErr_Occurred()) return NULL;
    struct request *r = async_request(c.group, c.plan, &c.buffers, c.timeout, c.from);
    if (r && batch) async_join_batch(r, batch);
    return exec_submit(r, c.written, args[6] == Py_None ? NULL : args[6]);
}

/* submit_after(request, prepare, timeout_ns, site, written, callback, batch) -> request. The caller keeps prepare. */
static PyObject *submit_after(PyObject *self, PyObject *args) {
    PyObject *first, *preparation, *written, *callback, *batch;
    long long timeout;
    unsigned int site;
    if (!PyArg_ParseTuple(args, "OOLIO!OO", &first, &preparation, &timeout, &site, &PyTuple_Type, &written, &callback,
                          &batch))
        return NULL;
    struct request *before = PyCapsule_GetPointer(first, REQUEST);
    struct batch *joined = batch == Py_None ? NULL : PyCapsule_GetPointer(batch, BATCH);
    if (PyErr_Occurred()) return NULL;
    struct buffers none = {NULL, NULL, 0, 0};
    struct origin from = {.site = site, .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    struct request *r = async_request(group_of(self), NULL, &none, timeout, from);
    if (r) async_follow(r, before, prepare, preparation);
    if (r && joined) async_join_batch(r, joined);
    return exec_submit(r, written, callback == Py_None ? NULL : callback);
}

/* refuse(words, timeout_ns, site) -> 0, or why nobody was told. Returns at once: where it would have to wait,
 * for operations that are queued or for peers, the group's thread does. */
static PyObject *refuse(PyObject *self, PyObject *args) {
    struct group *g = group_of(self);
    const char *words;
    Py_ssize_t n;
    long long timeout;
    unsigned int site;
    if (!PyArg_ParseTuple(args, "y#LI", &words, &n, &timeout, &site)) return NULL;
    struct origin from = {.site = site, .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    struct request *r = NULL;
    if (!async_idle(g) || exec_may_wait(g)) r = async_refusal(g, words, (size_t)n, timeout, from);
    bool queued = r && async_submit(g, r) == 0;
    if (r) async_release(r);
    if (queued) return PyLong_FromLong(STATUS_OK);
    int64_t status;
    WITHOUT_GIL(status = exec_refuse(g, words, (size_t)n, timeout, from));
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(status);
}

/* request_wait(request, timeout_ns, runs) -> status, None when it is not done by then, or -1 where its thread cannot
 * wait for it; a negative timeout only looks. */
static PyObject *request_wait(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule;
    long long timeout;
    int runs;
    if (!PyArg_ParseTuple(args, "OLp", &capsule, &timeout, &runs)) return NULL;
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    if (r == NULL) return NULL;
    bool done = atomic_load_explicit(&r->done, memory_order_acquire);
    if (!done && r->group->forked) return PyLong_FromLong(STATUS_LEFT); /* it is the parent's, and ends there */
    if (!done && timeout >= 0) {
        int status;
        WITHOUT_GIL(status = async_wait(r, timeout, runs));
        if (PyErr_Occurred()) return NULL;
        if (status == STATUS_NESTED) return PyLong_FromLong(-1);
        done = status == STATUS_OK;
    }
    return done ? PyLong_FromLongLong(r->status) : Py_NewRef(Py_None);
}

/* request_give_up(request) -> status: of one that the caller waits for no longer. It has ended when this returns. */
static PyObject *request_give_up(PyObject *Py_UNUSED(self), PyObject *capsule) {
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    if (r == NULL) return NULL;
    WITHOUT_GIL(async_give_up(r));
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(r->status);
}

static PyObject *request_number(PyObject *Py_UNUSED(self), PyObject *capsule) {
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    return r ? PyLong_FromLongLong(r->number) : NULL;
}

PyMethodDef group_exec_methods[] = {
    METHOD(run, METH_FASTCALL, "(plan, inputs, outputs, timeout_ns, site, written tensors) -> status"),
    METHOD(submit, METH_FASTCALL,
           "(plan, inputs, outputs, timeout_ns, site, written tensors, callback, batch) -> request"),
    METHOD(submit_after, METH_VARARGS,
           "(request, prepare, timeout_ns, site, written tensors, callback, batch) -> request that runs what prepare() "
           "returns once the one before has run: (plan, inputs, outputs), words to refuse it with, or None"),
    METHOD(refuse, METH_VARARGS, "(words, timeout_ns, site): tell the others that this rank refuses its call."),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[] = {
    METHOD(make_plan, METH_O, "(encoded) -> plan"),
    METHOD(plan_stage_bytes, METH_O, "(plan) -> how many bytes of a staging half it uses"),
    METHOD(make_batch, METH_NOARGS, "() -> what requests of one call have in common"),
    METHOD(request_number, METH_O, "(request) -> which operation of its group it is"),
    METHOD(request_give_up, METH_O, "(request) -> status, once nobody uses its tensors any more"),
    METHOD(request_wait, METH_VARARGS, "(request, timeout_ns, runs) -> status or None"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(OP_COPY),          CONSTANT(OP_REDUCE),         CONSTANT(OP_SIGNAL),
    CONSTANT(OP_WAIT),          CONSTANT(OP_LOOP),           CONSTANT(SPACE_IN),
    CONSTANT(SPACE_OUT),        CONSTANT(SPACE_STAGE),       CONSTANT(SPACE_PEER_IN),
    CONSTANT(SPACE_PEER_OUT),   CONSTANT(NEED_INPUT),        CONSTANT(NEED_OUTPUT),
    CONSTANT(PLAN_SIGNAL_BITS), CONSTANT(PLAN_MIXED_SIGNAL), {NULL, 0},
};

#define PLAN_NAME(NAME) #NAME " "

int symcomm_add_exec(PyObject *module) {
    if (symcomm_add_part(module, methods, constants) < 0) return -1;
    bool failed = PyModule_AddStringConstant(module, "PLAN_HEADER", PLAN_HEADER_FIELDS(PLAN_NAME)) < 0 ||
                  PyModule_AddStringConstant(module, "PLAN_STEP", PLAN_STEP_FIELDS(PLAN_NAME)) < 0 ||
                  PyModule_AddStringConstant(module, "PLAN_PLACE", PLAN_PLACE_FIELDS(PLAN_NAME)) < 0;
    return failed ? -1 : 0;
}
