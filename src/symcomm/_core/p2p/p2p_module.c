/* Messages for Python; the classes are in symcomm/group/p2p.py. */
#include <errno.h>
#include <stddef.h>

#include "group/group_module.h"
#include "module/gil.h"
#include "module/module.h"
#include "p2p/engine.h"
#include "reduce/types.h"
#include "torch/tensor.h"

static const char OP[] = "symcomm.op";

static void drop_op(PyObject *capsule) {
    PyObject *group = PyCapsule_GetContext(capsule);
    p2p_release(PyCapsule_GetPointer(capsule, OP));
    Py_DECREF(group);
}

static PyObject *post(PyObject *self, PyObject *args) {
    struct group *g = group_of(self);
    int is_send, peer, background;
    long long tag, dtype, nbytes;
    unsigned long long address;
    unsigned site;
    PyObject *tensor;
    if (!PyArg_ParseTuple(args, "piLLKLpIO", &is_send, &peer, &tag, &dtype, &address, &nbytes, &background, &site,
                          &tensor))
        return NULL;
    if (g->p2p == NULL || peer >= g->world || peer < (is_send ? 0 : ANY_SOURCE) || nbytes < 0)
        return PyErr_Format(PyExc_ValueError, "no rank %d to exchange %lld bytes with", peer, nbytes);
    struct op wanted = {.is_send = is_send,
                        .peer = peer,
                        .tag = tag,
                        .dtype = dtype,
                        .background = background,
                        .slow_path = true,
                        .site = site};
    wanted.buffer = (char *)(uintptr_t)address, wanted.nbytes = (uint64_t)nbytes;
    if (!is_send) { /* bytes may come from now on, and the caller may use the tensor until the last has come */
        tensors_change(tensor);
        wanted.version = tensor_version(tensor);
    }
    struct op *op;
    count_call(&g->messages, true, background);
    Py_BEGIN_ALLOW_THREADS;
    op = p2p_post(g, &wanted);
    Py_END_ALLOW_THREADS;
    if (op == NULL) return errno == EAGAIN ? PyErr_SetFromErrno(PyExc_OSError) : PyErr_NoMemory();
    PyObject *result = PyCapsule_New(op, OP, drop_op);
    if (result) PyCapsule_SetContext(result, Py_NewRef(self));
    return result;
}

static PyObject *outcome(struct op *op, int status) {
    bool came = status == STATUS_OK || status == STATUS_SIZE; /* otherwise it may still be moving */
    unsigned long long got = came ? op->got : 0;
    return Py_BuildValue("iiKL", status, (int)op->peer, got, (long long)(came ? op->got_dtype : 0));
}

/* p2p_wait(op, timeout_ns, withdraw) -> (status, peer, bytes that came, their dtype); timeout < 0 only looks. */
static PyObject *py_wait(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule;
    long long timeout;
    int withdraw_it, status;
    if (!PyArg_ParseTuple(args, "OLp", &capsule, &timeout, &withdraw_it)) return NULL;
    struct op *op = PyCapsule_GetPointer(capsule, OP);
    if (op == NULL) return NULL;
    WITHOUT_GIL(status = p2p_wait(op, timeout, withdraw_it));
    if (PyErr_Occurred()) return NULL;
    return outcome(op, status);
}

static PyObject *py_hold(PyObject *Py_UNUSED(self), PyObject *capsule) {
    struct op *op = PyCapsule_GetPointer(capsule, OP);
    bool held;
    if (op == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    held = p2p_hold(op);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(held);
}

static PyObject *py_resume(PyObject *Py_UNUSED(self), PyObject *capsule) {
    struct op *op = PyCapsule_GetPointer(capsule, OP);
    if (op == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    p2p_resume(op);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_fill(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule;
    int status;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &status)) return NULL;
    struct op *op = PyCapsule_GetPointer(capsule, OP);
    bool filled;
    if (op == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    filled = p2p_fill(op, status);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(filled);
}

/* exchange(is_send, peer, tag, tensor): a blocking send or receive of a tensor that the core can view. Returns the
 * peer's rank if all went well, an outcome like p2p_wait's if not, and None if Python has to look. */
static PyObject *exchange(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 4) return PyErr_Format(PyExc_TypeError, "exchange takes 4 arguments");
    struct group *g = group_of(self);
    struct tensor_view view;
    if (g->p2p == NULL || !PyLong_Check(args[1]) || !PyLong_Check(args[2]) || !tensor_view(args[3], &view))
        Py_RETURN_NONE;
    struct op wanted = {.is_send = args[0] == Py_True, .tag = PyLong_AsLongLong(args[2]), .dtype = view.dtype};
    long peer = PyLong_AsLong(args[1]);
    int64_t timeout = atomic_load_explicit(&g->timeout, memory_order_relaxed);
    if (PyErr_Occurred() || peer >= g->world || peer < (wanted.is_send ? 0 : ANY_SOURCE)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    wanted.peer = (int)peer;
    wanted.buffer = view.address;
    wanted.nbytes = (uint64_t)view.count * symcomm_itemsize[view.dtype];
    struct op *op;
    int status;
    if (!wanted.is_send) tensors_change(args[3]);
    count_call(&g->messages, false, false);
    WITHOUT_GIL_UNLESS(g->own_process && p2p_is_short(g, wanted.nbytes),
                       op = p2p_exchange(g, &wanted, timeout, &status));
    if (op == NULL) return PyErr_NoMemory();
    PyObject *result = NULL;
    if (!PyErr_Occurred()) result = status == STATUS_OK ? PyLong_FromLong(op->peer) : outcome(op, status);
    p2p_release(op);
    return result;
}

static PyObject *deadlock_callable; /* says that two ranks seem to wait for each other; with the interpreter lock */

static void call_deadlock_hook(const struct op *op) {
    struct caller *c = symcomm_caller;
    if (c == NULL || !gil_take_back(c)) return;
    PyObject *group = op->p2p->group->object, *callable = Py_NewRef(deadlock_callable);
    PyObject *told =
        PyObject_CallFunction(callable, "OiiL", group, (int)op->is_send, (int)op->peer, (long long)op->tag);
    Py_DECREF(callable);
    Py_XDECREF(told); /* our caller looks for an exception of it as for a signal handler's */
    gil_release(c);
}

static PyObject *use_deadlock_callback(PyObject *Py_UNUSED(self), PyObject *callable) {
    replace_kept(&deadlock_callable, callable);
    p2p_deadlock_hook = call_deadlock_hook;
    Py_RETURN_NONE;
}

/* For a group that has failed: returns once nobody uses the tensors of this rank's calls any more. */
static PyObject *let_go(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct group *g = group_of(self);
    struct visit v;
    Py_BEGIN_ALLOW_THREADS;
    if (visit_begin(&v, g)) p2p_let_all_go(&v);
    visit_end(&v);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef group_p2p_methods[] = {
    METHOD(let_go, METH_NOARGS, "(): of one that has failed; its tensors are the caller's on return."),
    METHOD(exchange, METH_FASTCALL, "(is_send, peer, tag, tensor) -> peer, outcome or None"),
    METHOD(post, METH_VARARGS, "(is_send, peer, tag, dtype, address, nbytes, background, site, tensor) -> op"),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[] = {
    METHOD(use_deadlock_callback, METH_O,
           "(callable): told (group, is_send, peer, tag) when two ranks seem to wait for each other."),
    METHOD_AS(p2p_fill, py_fill, METH_VARARGS,
              "(op, status) -> whether it was held; it is over, by a message that came another way"),
    METHOD_AS(p2p_hold, py_hold, METH_O, "(op) -> whether no message has matched the receive; then none can"),
    METHOD_AS(p2p_resume, py_resume, METH_O, "(op): a held receive can be matched again, in its place"),
    METHOD_AS(p2p_wait, py_wait, METH_VARARGS,
              "(op, timeout_ns, withdraw) -> (status, peer, bytes that came, their dtype)"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    {"CHANNEL_BYTES", sizeof(struct channel)},
    {"CHANNEL_HEAD_BYTES", offsetof(struct channel, ring)},
    {NULL, 0},
};

int symcomm_add_p2p(PyObject *module) { return symcomm_add_part(module, methods, constants); }
