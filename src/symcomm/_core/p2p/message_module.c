/* The Python type native.MessageRequest. Works of messages are made of it, so that waiting for a message of a plain
 * tensor needs no Python. */
#include "p2p/message_module.h"

#include <errno.h>

#include "module/arguments.h"
#include "module/gil.h"
#include "reduce/types.h"
#include "torch/tensor.h"

#include <structmember.h>

struct message_object {
    PyObject_HEAD;
    struct op *op;                            /* NULL: not posted yet, or never */
    PyObject *handle;                         /* of its group, while there is an op */
    PyObject *state, *tensor, *site, *buffer; /* buffer: of a tensor that is not plain, else NULL */
    PyObject *group;                          /* until it has ended: nobody else may hold the group */
    PyObject *kept_in;                        /* the set that keeps it as long, or NULL */
    PyObject *outcome, *error;                /* once Python has looked at its end */
    int64_t started;                          /* ns */
    long long tag;
    int peer; /* as asked for */
    char is_send, ended;
};

static PyTypeObject *message_type;

static struct message_object *own(PyObject *self) { return (struct message_object *)self; }

/* --- life --------------------------------------------------------------------------------------------------------- */

static PyObject *message_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self) own(self)->started = symcomm_now_ns();
    return self;
}

static int message_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    struct message_object *o = own(self);
    PyObject *state, *group, *tensor, *site;
    int is_send;
    if (!PyArg_ParseTuple(args, "OOpOiLO", &state, &group, &is_send, &tensor, &o->peer, &o->tag, &site)) return -1;
    if (o->state) return PyErr_Format(PyExc_TypeError, "a MessageRequest is made once"), -1;
    o->state = Py_NewRef(state), o->group = Py_NewRef(group), o->tensor = Py_NewRef(tensor), o->site = Py_NewRef(site);
    o->is_send = (char)is_send;
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    struct message_object *o = own(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->handle);
    Py_VISIT(o->state);
    Py_VISIT(o->tensor);
    Py_VISIT(o->buffer);
    Py_VISIT(o->group);
    Py_VISIT(o->kept_in);
    Py_VISIT(o->outcome);
    Py_VISIT(o->error);
    return 0;
}

/* Who needs it, and what it needs, only until it has ended. */
static void end(PyObject *self) {
    struct message_object *o = own(self);
    PyObject *kept_in = o->kept_in;
    o->ended = true, o->kept_in = NULL;
    if (kept_in && PySet_Discard(kept_in, self) < 0) PyErr_Clear();
    Py_XDECREF(kept_in);
    Py_CLEAR(o->group);
}

static int clear(PyObject *self) {
    struct message_object *o = own(self);
    Py_CLEAR(o->kept_in);
    Py_CLEAR(o->group);
    Py_CLEAR(o->state);
    Py_CLEAR(o->tensor);
    Py_CLEAR(o->buffer);
    Py_CLEAR(o->outcome);
    Py_CLEAR(o->error);
    return 0;
}

static void message_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct message_object *o = own(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_XDECREF(o->site);
    if (o->op) p2p_release(o->op);
    Py_XDECREF(o->handle); /* only now: the op is part of its group */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* --- posting ------------------------------------------------------------------------------------------------------ */

bool message_read(const struct group *g, bool is_send, PyObject *tensor, PyObject *peer, PyObject *tag,
                  struct op *wanted) {
    struct tensor_view view;
    if (g->p2p == NULL || !PyLong_Check(peer) || !PyLong_Check(tag) || !tensor_view(tensor, &view)) return false;
    long rank = PyLong_AsLong(peer);
    *wanted = (struct op){.is_send = is_send, .peer = (int)rank, .tag = PyLong_AsLongLong(tag), .dtype = view.dtype};
    if (PyErr_Occurred() || rank >= g->world || rank < (is_send ? 0 : ANY_SOURCE)) {
        PyErr_Clear();
        return false;
    }
    wanted->buffer = view.address;
    wanted->nbytes = (uint64_t)view.count * symcomm_itemsize[view.dtype];
    return true;
}

/* False with an exception set. done: it is, and the core does not use its tensor any more. */
static bool post(struct message_object *o, PyObject *handle, struct op *wanted, PyObject *written, bool *done) {
    struct group *g = group_of(handle);
    if (!wanted->is_send) { /* bytes may come from now on, and the caller may use the tensor until the last has come */
        tensors_change(written);
        wanted->version = tensor_version(written);
    }
    struct op *op;
    count_call(&g->messages, wanted->slow_path, wanted->background);
    WITHOUT_GIL_UNLESS(g->own_process && p2p_is_short(g, wanted->nbytes), op = p2p_post(g, wanted, done));
    if (op == NULL) {
        if (errno == EAGAIN) PyErr_SetFromErrno(PyExc_OSError);
        else PyErr_NoMemory();
        return false;
    }
    o->op = op, o->handle = Py_NewRef(handle);
    return true;
}

static PyObject *py_post(PyObject *self, PyObject *args) {
    struct message_object *o = own(self);
    PyObject *handle, *written;
    struct op wanted = {.is_send = o->is_send, .peer = o->peer, .tag = o->tag, .slow_path = true};
    long long dtype, nbytes;
    unsigned long long address;
    int background;
    bool done;
    if (!PyArg_ParseTuple(args, "O!LKLpIO", group_type, &handle, &dtype, &address, &nbytes, &background, &wanted.site,
                          &written))
        return NULL;
    struct group *g = group_of(handle);
    if (o->op) return PyErr_Format(PyExc_TypeError, "the message was posted before");
    if (g->p2p == NULL || o->peer >= g->world || o->peer < (o->is_send ? 0 : ANY_SOURCE) || nbytes < 0)
        return PyErr_Format(PyExc_ValueError, "no rank %d to exchange %lld bytes with", o->peer, nbytes);
    wanted.dtype = dtype, wanted.nbytes = (uint64_t)nbytes, wanted.buffer = (char *)(uintptr_t)address;
    wanted.background = background;
    if (!post(o, handle, &wanted, written, &done)) return NULL;
    Py_RETURN_NONE;
}

/* The core uses the tensor until the message has ended, whatever becomes of the caller. */
static void keep_in(PyObject *self, PyObject *set) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* of a signal handler that came while it was posted */
    own(self)->kept_in = Py_NewRef(set);
    if (PySet_Add(set, self) < 0) {
        Py_INCREF(self); /* for good: there is no memory to do better */
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
}

PyObject *message_start(const struct message_asked *a) {
    PyObject *self = message_new((PyTypeObject *)a->type, NULL, NULL);
    if (self == NULL) return NULL;
    struct message_object *o = own(self);
    struct op wanted = a->wanted;
    bool done = false;
    o->state = Py_NewRef(a->state), o->group = Py_NewRef(a->group), o->site = Py_NewRef(a->site);
    o->tensor = Py_NewRef(a->tensor), o->peer = wanted.peer, o->tag = wanted.tag, o->is_send = wanted.is_send;
    if (post(o, a->handle, &wanted, a->tensor, &done)) {
        if (done && o->op->status == STATUS_OK) end(self);
        else keep_in(self, a->kept_in);
    }
    if (!PyErr_Occurred()) return self;
    Py_DECREF(self);
    return NULL;
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

PyObject *message_outcome(struct op *op, int status) {
    bool came = status == STATUS_OK || status == STATUS_SIZE; /* otherwise it may still be moving */
    unsigned long long got = came ? op->got : 0;
    return Py_BuildValue("iiKL", status, (int)op->peer, got, (long long)(came ? op->got_dtype : 0));
}

/* STATUS_TIMEOUT with a negative timeout: it has not ended. With an exception set, a signal handler raised. */
static int wait_for(struct message_object *o, int64_t timeout, bool withdraw_it) {
    struct group *g = group_of(o->handle);
    int status;
    WITHOUT_GIL_UNLESS(g->own_process && g->p2p && p2p_is_short(g, o->op->nbytes),
                       status = p2p_wait(o->op, timeout, withdraw_it));
    return status;
}

/* Waits for a plain one. False: Python has to look, or there is an exception. */
static bool finish(PyObject *self) {
    struct message_object *o = own(self);
    if (o->error || o->buffer) return false;
    if (o->ended) return true;
    if (o->op == NULL || o->outcome) return false;
    int64_t timeout = atomic_load_explicit(&group_of(o->handle)->timeout, memory_order_relaxed);
    int status = wait_for(o, timeout, true);
    if (PyErr_Occurred()) return false;
    if (status == STATUS_OK) {
        end(self);
        return true;
    }
    PyObject *none = PyObject_CallMethod(self, "_conclude", "NL", message_outcome(o->op, status), (long long)timeout);
    Py_XDECREF(none);
    return false;
}

static PyObject *py_wait(PyObject *self, PyObject *const *args, Py_ssize_t n_args, PyObject *names) {
    PyObject *timeout;
    if (!read_timeout(args, n_args, names, &timeout)) return NULL;
    if (timeout == Py_None && finish(self)) Py_RETURN_TRUE;
    return PyErr_Occurred() ? NULL : PyObject_CallMethod(self, "_wait", "(O)", timeout);
}

static PyObject *await_outcome(PyObject *self, PyObject *args) {
    struct message_object *o = own(self);
    long long timeout;
    int withdraw_it;
    if (!PyArg_ParseTuple(args, "Lp", &timeout, &withdraw_it)) return NULL;
    if (o->op == NULL) return PyErr_Format(PyExc_ValueError, "the message was not posted");
    int status = wait_for(o, timeout, withdraw_it);
    return PyErr_Occurred() ? NULL : message_outcome(o->op, status);
}

static PyObject *py_end(PyObject *self, PyObject *outcome) {
    struct message_object *o = own(self);
    replace_kept(&o->outcome, outcome);
    end(self);
    Py_RETURN_NONE;
}

/* --- receives that a message from outside the group may end ------------------------------------------------------ */

static bool is_posted(const struct message_object *o) {
    return o->op || PyErr_Format(PyExc_ValueError, "the message was not posted");
}

static PyObject *hold(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct message_object *o = own(self);
    bool held;
    if (!is_posted(o)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    held = p2p_hold(o->op);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(held);
}

static PyObject *resume(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct message_object *o = own(self);
    if (!is_posted(o)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    p2p_resume(o->op);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *fill(PyObject *self, PyObject *arg) {
    struct message_object *o = own(self);
    int status = (int)PyLong_AsLong(arg);
    bool filled;
    if (PyErr_Occurred() || !is_posted(o)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    filled = p2p_fill(o->op, status);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(filled);
}

/* --- facts -------------------------------------------------------------------------------------------------------- */

static PyObject *get_outcome(PyObject *self, void *Py_UNUSED(closure)) {
    struct message_object *o = own(self);
    if (o->outcome == NULL && o->ended && o->op) o->outcome = message_outcome(o->op, STATUS_OK);
    if (PyErr_Occurred()) return NULL;
    return Py_NewRef(o->outcome ? o->outcome : Py_None);
}

static PyObject *get_age(PyObject *self, void *Py_UNUSED(closure)) {
    return PyFloat_FromDouble((double)(symcomm_now_ns() - own(self)->started) / 1e9);
}

static PyMethodDef methods[] = {
    METHOD_AS(post, py_post, METH_VARARGS,
              "(group, dtype, address, nbytes, background, site, written tensor): start it; once."),
    METHOD_AS(wait, py_wait, METH_FASTCALL | METH_KEYWORDS,
              "($self, timeout=None)\n--\n\nBlock until the message has left (send) or arrived (receive)."),
    METHOD_AS(_await, await_outcome, METH_VARARGS,
              "(timeout_ns, withdraw) -> (status, peer, bytes that came, their dtype). A negative timeout only looks."),
    METHOD_AS(_end, py_end, METH_O, "(outcome): it has ended so, and needs nothing any more."),
    METHOD(hold, METH_NOARGS, "() -> whether no message has matched this receive; then none can, until ``resume()``."),
    METHOD(resume, METH_NOARGS, "(): a held receive can be matched again, in its place."),
    METHOD_AS(_fill, fill, METH_O, "(status) -> whether it was held; it is over, by a message that came another way."),
    {NULL, NULL, 0, NULL},
};

#define FIELD(NAME, TYPE, FIELD, FLAGS, WORDS) {NAME, TYPE, offsetof(struct message_object, FIELD), FLAGS, WORDS}

static PyMemberDef members[] = {
    FIELD("tensor", T_OBJECT, tensor, READONLY, "the caller's"),
    FIELD("peer", T_INT, peer, READONLY, "whom it was asked to go to, or to come from"),
    FIELD("tag", T_LONGLONG, tag, READONLY, "as asked for"),
    FIELD("is_send", T_BOOL, is_send, READONLY, "or a receive"),
    FIELD("_state", T_OBJECT, state, READONLY, "of its group"),
    FIELD("_site", T_OBJECT, site, READONLY, "file and line"),
    FIELD("_buffer", T_OBJECT, buffer, 0, "of a tensor that the core cannot view, or None"),
    FIELD("kept_in", T_OBJECT, kept_in, 0, "the set that keeps it until it has ended, or None"),
    FIELD("_error", T_OBJECT, error, 0, "how it ended, or None"),
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_is_posted(PyObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(own(self)->op != NULL);
}

static PyGetSetDef facts[] = {
    {"is_posted", get_is_posted, NULL, "whether the core has it, or had it", NULL},
    {"outcome", get_outcome, NULL, "(status, peer, bytes that came, their dtype), or None: it has not ended", NULL},
    {"age", get_age, NULL, "seconds since the call", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A message."},  {Py_tp_new, message_new},
    {Py_tp_init, message_init}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},       {Py_tp_dealloc, message_dealloc},
    {Py_tp_methods, methods},   {Py_tp_members, members},
    {Py_tp_getset, facts},      {0, NULL},
};

static PyType_Spec spec = {"symcomm._core._native.MessageRequest", sizeof(struct message_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

int symcomm_add_message(PyObject *module) {
    message_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return message_type ? PyModule_AddObjectRef(module, "MessageRequest", (PyObject *)message_type) : -1;
}
