/* Messages for Python; the classes are in symcomm/group/p2p.py. */
#include <stddef.h>

#include "group/group_module.h"
#include "module/gil.h"
#include "module/module.h"
#include "p2p/engine.h"
#include "p2p/message_module.h"
#include "reduce/types.h"
#include "torch/tensor.h"

/* exchange(is_send, peer, tag, tensor): a blocking send or receive of a tensor that the core can view. Returns the
 * peer's rank if all went well, an outcome if not, and None if Python has to look. */
static PyObject *exchange(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 4) return PyErr_Format(PyExc_TypeError, "exchange takes 4 arguments");
    struct group *g = group_of(self);
    struct op wanted;
    int64_t timeout = atomic_load_explicit(&g->timeout, memory_order_relaxed);
    if (!message_read(g, args[0] == Py_True, args[3], args[1], args[2], &wanted)) Py_RETURN_NONE;
    struct op *op;
    int status;
    if (!wanted.is_send) tensors_change(args[3]);
    count_call(&g->messages, false, false);
    WITHOUT_GIL_UNLESS(g->own_process && p2p_is_short(g, wanted.nbytes),
                       op = p2p_exchange(g, &wanted, timeout, &status));
    if (op == NULL) return PyErr_NoMemory();
    PyObject *result = NULL;
    if (!PyErr_Occurred()) result = status == STATUS_OK ? PyLong_FromLong(op->peer) : message_outcome(op, status);
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
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[] = {
    METHOD(use_deadlock_callback, METH_O,
           "(callable): told (group, is_send, peer, tag) when two ranks seem to wait for each other."),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    {"CHANNEL_BYTES", sizeof(struct channel)},
    {"CHANNEL_HEAD_BYTES", offsetof(struct channel, ring)},
    {NULL, 0},
};

int symcomm_add_p2p(PyObject *module) { return symcomm_add_part(module, methods, constants); }
