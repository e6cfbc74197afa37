/* What all files of the core that Python sees share: tables of functions and constants. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "os/clock.h"

/* A row of a table of functions. Its help is its name, followed by WORDS: arguments and result. */
#define METHOD_AS(NAME, FUNCTION, FLAGS, WORDS) {#NAME, (PyCFunction)(void (*)(void))FUNCTION, FLAGS, #NAME WORDS}
#define METHOD(NAME, FLAGS, WORDS) METHOD_AS(NAME, NAME, FLAGS, WORDS)

/* Numbers for Python; NULL ends the list. */
struct constant {
    const char *name;
    long value;
};
#define CONSTANT(NAME) {#NAME, NAME}

/* Adds a part's methods and constants, either of which may be NULL. Returns 0, or -1 with an exception set. */
int symcomm_add_part(PyObject *module, PyMethodDef *methods, const struct constant *constants);

/* Keeps `object` in a variable, in place of what was there. */
static inline void replace_kept(PyObject **variable, PyObject *object) {
    PyObject *before = *variable;
    *variable = Py_NewRef(object);
    Py_XDECREF(before);
}

/* Adds a new object to a list. If either is NULL, or there is no memory, the list becomes NULL. */
static inline void append_new(PyObject **list, PyObject *object) {
    if (*list && (object == NULL || PyList_Append(*list, object) < 0)) Py_CLEAR(*list);
    Py_XDECREF(object);
}

/* The parts of the module, in the order in which they are added; symcomm_add_NAME() adds one, each in a file of its
 * own. Returns 0, or -1 with an exception set. */
/* clang-format off */
#define SYMCOMM_PARTS(PART)                                                                                          \
    PART(reduce) PART(convert) PART(nontemporal) PART(pack) PART(mapping) PART(life) PART(tensor) PART(cores)        \
    PART(gil) PART(call_site) PART(group) PART(records) PART(exec) PART(request) PART(seen_calls)  PART(refusal)     \
    PART(report) PART(dispatch_cache) PART(options) PART(p2p) PART(message) PART(seen_messages) PART(signals) PART(window) PART(stream_ops)            \
    PART(prepared) PART(store) PART(gil_watchdog) PART(whereabouts) PART(allocator) PART(region) PART(queue) PART(board)
/* clang-format on */

#define SYMCOMM_DECLARE(NAME) int symcomm_add_##NAME(PyObject *module);
SYMCOMM_PARTS(SYMCOMM_DECLARE)
