/* What the core needs to know of a Python tensor, without a detour through Python. */
#pragma once

#include <stdbool.h>

#include "module/module.h"

struct tensor_view {
    char *address;
    int64_t count;
    int dtype;
};

/* True when `tensor` is of one of the known types, dense, contiguous, on the CPU, and is what its memory holds.
 * Otherwise (never with an exception set) Python has to look at it. */
int tensor_view(PyObject *tensor, struct tensor_view *view);
