/* Reads the options that torch's functions pass to a collective, without Python. */
#pragma once

#include "module/module.h"

enum options {
    OPTIONS_FAST = 0,     /* the core alone can run the call */
    OPTIONS_SLOW = -1,    /* it has a time-out of its own, an operation with a factor, or the profiler looks on */
    OPTIONS_UNKNOWN = -2, /* Python has to read them */
    OPTIONS_ASYNC = -3,   /* the caller does not wait, otherwise as OPTIONS_FAST */
};

/* `detail`: set to the dispatch cache's key besides the tensors: root, operation, both or 0. */
int options_read(int64_t call, PyObject *options, int64_t *detail);
