/* The Python type native.SeenCalls: what calls of one group have in common. An executor is made of it, so that a call
 * of a kind seen before is made, or queued if it is asynchronous, without Python. */
#include "exec/dispatch_cache.h"
#include "module/arguments.h"
#include "module/asked.h"

#include <structmember.h>

struct seen_calls {
    PyObject_HEAD;
    struct group_asked asked;
    PyObject *pending; /* a list: what is under way */
};

static struct seen_calls *own(PyObject *self) { return (struct seen_calls *)self; }

static PyObject *queue(struct seen_calls *o, PyObject *const *args, PyObject *name) {
    struct asked a = {.pending = o->pending, .call = name};
    if (o->pending == NULL || !PyList_Check(o->pending)) return PyLong_FromLong(-1);
    if (!group_asks(&o->asked, &a)) return PyErr_Occurred() ? NULL : PyLong_FromLong(-1);
    Py_INCREF(a.pending); /* what it drops may run any code */
    PyObject *request = dispatch_cache_queue(group_of(o->asked.handle), &a, args);
    Py_DECREF(a.pending);
    Py_DECREF(a.group);
    Py_DECREF(a.site);
    return request;
}

/* call_seen(call, detail, input, output, async_op, name) -> 0 or a failure of a blocking call; a work; or -1: it has to
 * be checked. Of an asynchronous one, detail may be torch's options. */
static PyObject *call_seen(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct seen_calls *o = own(self);
    if (expect_arguments(n_args, 6, "call_seen") < 0) return NULL;
    if (o->asked.handle == NULL) return PyLong_FromLong(-1);
    if (args[4] == Py_False) return dispatch_cache_run(group_of(o->asked.handle), args);
    return args[4] == Py_True ? queue(o, args, args[5]) : PyLong_FromLong(-1);
}

static PyObject *bind(PyObject *self, PyObject *args) {
    return group_asked_bind(&own(self)->asked, args) ? Py_NewRef(Py_None) : NULL;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    struct seen_calls *o = own(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->pending);
    return group_asked_traverse(&o->asked, visit, arg);
}

static int clear(PyObject *self) {
    struct seen_calls *o = own(self);
    Py_CLEAR(o->pending);
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
    METHOD_AS(_bind, bind, METH_VARARGS,
              "(group, state, type of works, number_of): before the first call; number_of((file, line)) -> its number"),
    METHOD(call_seen, METH_FASTCALL,
           "(call, detail, input, output, async_op, name) -> 0 or a failure, or a work, or -1: it has to be checked"),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"pending", T_OBJECT, offsetof(struct seen_calls, pending), 0, "works that may be under way"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "What calls of a group have in common."},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec spec = {"symcomm._core._native.SeenCalls", sizeof(struct seen_calls), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

int symcomm_add_seen_calls(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL) return -1;
    int added = PyModule_AddObjectRef(module, "SeenCalls", type);
    Py_DECREF(type);
    return added;
}
