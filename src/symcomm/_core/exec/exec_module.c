/* Python's view of plans, and the methods of native.Group that run them. */
#include <stdlib.h>

#include "exec/async.h"
#include "exec/exec.h"
#include "exec/request_module.h"
#include "group/group_module.h"
#include "module/gil.h"
#include "torch/tensor.h"

static const char BATCH[] = "symcomm.batch";

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

/* The arguments of run() and submit(). */
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

/* Takes what prepare() returned: (plan, inputs, outputs), words to refuse the call with, or None if all ranks know that
 * the call does not take place. Negative: an exception is set. */
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

/* prepare() itself raises nothing, so an exception is a signal handler's: it ends the group, and the caller passes it
 * on. */
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

static void drop_batch(PyObject *capsule) { async_leave_batch(PyCapsule_GetPointer(capsule, BATCH)); }

static PyObject *make_batch(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    struct batch *b = calloc(1, sizeof *b);
    if (b == NULL) return PyErr_NoMemory();
    b->references = 1;
    return PyCapsule_New(b, BATCH, drop_batch);
}

static PyObject *submit(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct call c;
    if (expect_arguments(n_args, 9, "submit") < 0 || !read_call(&c, self, args + 1)) return NULL;
    struct batch *batch = args[8] == Py_None ? NULL : PyCapsule_GetPointer(args[8], BATCH);
    if (PyErr_Occurred()) return NULL;
    struct request *r = async_request(c.group, c.plan, &c.buffers, c.timeout, c.from);
    if (r && batch) async_join_batch(r, batch);
    if (!request_submit(args[0], r, c.written, args[7] == Py_None ? NULL : args[7])) return NULL;
    Py_RETURN_NONE;
}

/* submit_after(request, first, prepare, timeout_ns, site, written, callback, batch). The caller keeps prepare. */
static PyObject *submit_after(PyObject *self, PyObject *args) {
    PyObject *request, *first, *preparation, *written, *callback, *batch;
    long long timeout;
    unsigned int site;
    if (!PyArg_ParseTuple(args, "OOOLIO!OO", &request, &first, &preparation, &timeout, &site, &PyTuple_Type, &written,
                          &callback, &batch))
        return NULL;
    struct request *before = request_of(first);
    struct batch *joined = batch == Py_None ? NULL : PyCapsule_GetPointer(batch, BATCH);
    if (PyErr_Occurred()) return NULL;
    struct buffers none = {NULL, NULL, 0, 0};
    struct origin from = {.site = site, .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    struct request *r = async_request(group_of(self), NULL, &none, timeout, from);
    if (r) async_follow(r, before, prepare, preparation);
    if (r && joined) async_join_batch(r, joined);
    if (!request_submit(request, r, written, callback == Py_None ? NULL : callback)) return NULL;
    Py_RETURN_NONE;
}

/* refuse(words, timeout_ns, site) -> 0, or the status of a group that has failed. Returns at once: if it has to wait,
 * for queued operations or for peers, the group's thread does. */
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

PyMethodDef group_exec_methods[] = {
    METHOD(run, METH_FASTCALL, "(plan, inputs, outputs, timeout_ns, site, written tensors) -> status"),
    METHOD(submit, METH_FASTCALL,
           "(request, plan, inputs, outputs, timeout_ns, site, written tensors, callback, batch): queue it."),
    METHOD(submit_after, METH_VARARGS,
           "(request, first, prepare, timeout_ns, site, written tensors, callback, batch): the request runs what "
           "prepare() returns once the first has run: (plan, inputs, outputs), words to refuse it with, or None."),
    METHOD(refuse, METH_VARARGS, "(words, timeout_ns, site): tell the others that this rank refuses its call."),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[] = {
    METHOD(make_plan, METH_O, "(encoded) -> plan"),
    METHOD(plan_stage_bytes, METH_O, "(plan) -> how many bytes of a staging half it uses"),
    METHOD(make_batch, METH_NOARGS, "() -> a batch: what the requests of one call share"),
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
