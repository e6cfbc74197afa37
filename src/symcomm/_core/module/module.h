/* Shared by all files of the core. */
#ifndef SYMCOMM_MODULE_H
#define SYMCOMM_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "os/clock.h"

/* Numbers that Python shares: NULL ends the list. Returns 0, or -1 with an exception set. */
struct constant {
    const char *name;
    long value;
};
#define CONSTANT(NAME) {#NAME, NAME}
int symcomm_add_constants(PyObject *module, const struct constant *list);

/* Each part adds its functions and types to the module; returns 0, or -1 with an exception set. */
int symcomm_add_reduce(PyObject *module);
int symcomm_add_pack(PyObject *module);
int symcomm_add_mapping(PyObject *module);
int symcomm_add_life(PyObject *module);
int symcomm_add_tensor(PyObject *module);
int symcomm_add_cores(PyObject *module);
int symcomm_add_gil(PyObject *module);
int symcomm_add_group(PyObject *module);
int symcomm_add_records(PyObject *module);
int symcomm_add_exec(PyObject *module);
int symcomm_add_report(PyObject *module);
int symcomm_add_dispatch_cache(PyObject *module);
int symcomm_add_options(PyObject *module);
int symcomm_add_p2p(PyObject *module);
int symcomm_add_signals(PyObject *module);
int symcomm_add_window(PyObject *module);
int symcomm_add_stream_ops(PyObject *module);
int symcomm_add_prepared(PyObject *module);
int symcomm_add_store(PyObject *module);
int symcomm_add_nontemporal(PyObject *module);
int symcomm_add_gil_watchdog(PyObject *module);

#endif
