/* The Python type native.SeenMessages: what messages of one group have in common. An object that starts messages is
 * made of it, so that one of a plain tensor is started without Python. */
#include "module/arguments.h"
#include "module/asked.h"
#include "p2p/message_module.h"

#include <structmember.h>

struct seen_messages {
    PyObject_HEAD;
    struct group_asked asked;
    PyObject *in_flight; /* a set: the works that the core needs */
    Py_ssize_t sweep_at; /* so many of them are looked through for those that have ended */
};

static struct seen_messages *own(PyObject *self) { return (struct seen_messages *)self; }

/* NULL with an exception set, or without: Python has to look. */
static PyObject *start(struct seen_messages *o, bool is_send, PyObject *const *args) {
    struct message_asked a = {.tensor = args[0], .kept_in = o->in_flight};
    if (o->asked.handle == NULL || o->in_flight == NULL || !PyAnySet_Check(o->in_flight)) return NULL;
    if (PySet_Size(o->in_flight) + 1 >= o->sweep_at) return NULL;
    if (!message_read(group_of(o->asked.handle), is_send, args[0], args[1], args[2], &a.wanted)) return NULL;
    struct asked who = {.call = NULL};
    if (!group_asks(&o->asked, &who)) return NULL;
    a.type = who.type, a.handle = o->asked.handle, a.state = who.state, a.group = who.group, a.site = who.site;
    a.wanted.site = who.site_number, a.wanted.background = true;
    Py_INCREF(a.kept_in);
    PyObject *message = message_start(&a);
    Py_DECREF(a.kept_in);
    Py_DECREF(who.group);
    Py_DECREF(who.site);
    if (message == NULL && PyErr_ExceptionMatches(PyExc_OSError)) PyErr_Clear(); /* no thread: Python says so */
    return message;
}

static PyObject *start_or_ask(PyObject *self, bool is_send, PyObject *const *args, Py_ssize_t n_args) {
    if (expect_arguments(n_args, 3, is_send ? "isend" : "irecv") < 0) return NULL;
    PyObject *message = start(own(self), is_send, args);
    if (message || PyErr_Occurred()) return message;
    return PyObject_CallMethod(self, "_start", "OOOO", is_send ? Py_True : Py_False, args[0], args[1], args[2]);
}

static PyObject *isend(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return start_or_ask(self, true, args, n_args);
}

static PyObject *irecv(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    return start_or_ask(self, false, args, n_args);
}

static PyObject *bind(PyObject *self, PyObject *args) {
    return group_asked_bind(&own(self)->asked, args) ? Py_NewRef(Py_None) : NULL;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    struct seen_messages *o = own(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->in_flight);
    return group_asked_traverse(&o->asked, visit, arg);
}

static int clear(PyObject *self) {
    struct seen_messages *o = own(self);
    Py_CLEAR(o->in_flight);
    group_asked_clear(&o->asked);
    return 0;
}

static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    METHOD_AS(
        _bind, bind, METH_VARARGS,
        "(group, state, type of works, number_of): before the first message; number_of((file, line)) -> its number"),
    METHOD(isend, METH_FASTCALL, "(tensor, peer, tag) -> a work"),
    METHOD(irecv, METH_FASTCALL, "(tensor, peer, tag) -> a work"),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_in_flight", T_OBJECT, offsetof(struct seen_messages, in_flight), 0, "works that the core needs"},
    {"_sweep_at", T_PYSSIZET, offsetof(struct seen_messages, sweep_at), 0, "so many in flight are looked through"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "What messages of a group have in common."},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {"symcomm._core._native.SeenMessages", sizeof(struct seen_messages), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

int symcomm_add_seen_messages(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL) return -1;
    int added = PyModule_AddObjectRef(module, "SeenMessages", type);
    Py_DECREF(type);
    return added;
}
