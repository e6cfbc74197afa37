#include "module/asked.h"

#include "module/arguments.h"

bool group_asked_bind(struct group_asked *o, PyObject *args) {
    PyObject *handle, *state, *type, *number_of;
    if (!PyArg_ParseTuple(args, "O!OO!O", group_type, &handle, &state, &PyType_Type, &type, &number_of)) return false;
    if (o->handle) return PyErr_Format(PyExc_TypeError, "it is bound already") != NULL;
    if ((o->failure = PyUnicode_InternFromString("failure")) == NULL) return false;
    if ((o->whole = PyObject_GetAttrString(state, "whole")) == NULL) return false;
    o->handle = Py_NewRef(handle), o->state = Py_NewRef(state), o->type = Py_NewRef(type);
    o->sites.number_of = Py_NewRef(number_of);
    return true;
}

bool group_asks(struct group_asked *o, struct asked *a) {
    PyObject *failure = PyObject_GetAttr(o->state, o->failure);
    Py_XDECREF(failure); /* None, or kept by the state */
    if (failure != Py_None) return false;
    a->type = o->type, a->state = o->state;
    a->group = PyObject_CallNoArgs(o->whole);
    if (a->group == NULL) return false;
    if (call_sites_find(&o->sites, &a->site, &a->site_number)) return true;
    Py_CLEAR(a->group);
    return false;
}

int group_asked_traverse(const struct group_asked *o, visitproc visit, void *arg) {
    Py_VISIT(o->handle);
    Py_VISIT(o->state);
    Py_VISIT(o->whole);
    Py_VISIT(o->type);
    Py_VISIT(o->sites.number_of); /* codes and sites hold nothing that could hold us */
    return 0;
}

void group_asked_clear(struct group_asked *o) {
    Py_CLEAR(o->handle);
    Py_CLEAR(o->state);
    Py_CLEAR(o->whole);
    Py_CLEAR(o->failure);
    Py_CLEAR(o->type);
    call_sites_clear(&o->sites);
}
