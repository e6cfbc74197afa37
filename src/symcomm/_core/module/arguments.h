/* What functions that Python calls are given. */
#pragma once

#include "group/group.h"
#include "module/module.h"

#define MAX_BUFFERS MAX_WORLD

#define GROUP_CAPSULE "symcomm.group"
#define PLAN_CAPSULE "symcomm.plan"

/* NULL with an exception set: it is something else. */
static inline struct group *to_group(PyObject *capsule) { return PyCapsule_GetPointer(capsule, GROUP_CAPSULE); }

/* The same for PyArg_ParseTuple()'s O&, into a struct group *. */
int convert_group(PyObject *capsule, void *group);

/* An int or a tuple of ints, of MAX_BUFFERS at most. Returns how many, or -1 with an exception set. */
int to_addresses(PyObject *object, char **addresses);

/* 0, or -1 with an exception set. */
int expect_arguments(Py_ssize_t got, Py_ssize_t expected, const char *name);
