/* Reads the arguments of functions that Python calls. */
#pragma once

#include "group/group.h"
#include "module/module.h"

#define MAX_BUFFERS MAX_WORLD

#define PLAN_CAPSULE "symcomm.plan"

/* native.Group */
struct group_object {
    PyObject_HEAD;
    struct group *group;
};
extern PyTypeObject *group_type;

/* The group of a method's self. */
static inline struct group *group_of(PyObject *self) { return ((struct group_object *)self)->group; }

/* The group of any object; NULL with an exception set if it is something else. */
struct group *to_group(PyObject *object);
/* The same for PyArg_ParseTuple()'s O&, into a struct group *. */
int convert_group(PyObject *object, void *group);

/* An int or a tuple of ints, of MAX_BUFFERS at most. Returns how many, or -1 with an exception set. */
int to_addresses(PyObject *object, char **addresses);

/* 0, or -1 with an exception set. */
int expect_arguments(Py_ssize_t got, Py_ssize_t expected, const char *name);

/* The one argument of wait(timeout=None). False with an exception set. */
bool read_timeout(PyObject *const *args, Py_ssize_t n_args, PyObject *names, PyObject **timeout);
