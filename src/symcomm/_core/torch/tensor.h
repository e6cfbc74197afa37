/* What the core needs to know of a Python tensor, found out without Python. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include "module/module.h"

struct tensor_view {
    char *address;
    int64_t count;
    int dtype;
};

/* True if `tensor` is of a known type, dense, contiguous, on the CPU, and its value is what its memory holds. Otherwise
 * (never with an exception set) Python must look. */
int tensor_view(PyObject *tensor, struct tensor_view *view);

/* The number by which autograd notices that a tensor changed since it was saved for backward: a tensor shares it with
 * its views. NULL: it has none (NumPy's arrays, inference mode's tensors), or its place is not known. */
_Atomic uint32_t *tensor_version(PyObject *tensor);
/* Tells autograd that `tensors` (one, or a tuple of any objects) change now. Never sets an exception. */
void tensors_change(PyObject *tensors);
/* Whether autograd may refuse that one of these is written in place: it requires grad, and grad mode is on. */
bool tensors_tracked(PyObject *tensors);
