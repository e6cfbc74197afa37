/* Shared by all files of the core. */
#ifndef SYMCOMM_MODULE_H
#define SYMCOMM_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "os/clock.h"
#include "sync/sync.h"

#define SYMCOMM_LINE 64 /* bytes in a cache line, for layout */

/* Run a statement without the interpreter lock, while sync_wait() may ask now and then whether a signal handler raised.
 * `soon`: it is expected to end within microseconds, so the lock, whose release and return cost 0.13 us, is only given
 * up once it turns out that there is something to wait for. */
extern _Thread_local PyThreadState *gil_released;
int gil_check_signals(void);
void gil_release(void);
uint32_t gil_ask_call_site(void);
#define WITHOUT_GIL_UNLESS(soon, statement)                   \
    do {                                                      \
        symcomm_interrupted = gil_check_signals;              \
        gil_released = NULL;                                  \
        symcomm_before_waiting = gil_release;                 \
        symcomm_call_site = gil_ask_call_site;                \
        if (!(soon)) gil_release();                           \
        statement;                                            \
        if (gil_released) PyEval_RestoreThread(gil_released); \
        symcomm_before_waiting = NULL;                        \
        symcomm_call_site = NULL;                             \
        symcomm_interrupted = NULL;                           \
    } while (0)
#define WITHOUT_GIL(statement) WITHOUT_GIL_UNLESS(false, statement)

/* Each part adds its functions and types to the module; returns 0, or -1 with an exception set. */
int symcomm_add_reduce(PyObject *module);
int symcomm_add_pack(PyObject *module);
int symcomm_add_mapping(PyObject *module);
int symcomm_add_life(PyObject *module);
int symcomm_add_tensor(PyObject *module);
int symcomm_add_cores(PyObject *module);
int symcomm_add_group(PyObject *module);
int symcomm_add_report(PyObject *module);
int symcomm_add_dispatch_cache(PyObject *module);
int symcomm_add_options(PyObject *module);
int symcomm_add_p2p(PyObject *module);
int symcomm_add_signals(PyObject *module);
int symcomm_add_window(PyObject *module);
int symcomm_add_stream_ops(PyObject *module);
int symcomm_add_store(PyObject *module);
int symcomm_add_nontemporal(PyObject *module);
int symcomm_add_gil_watchdog(PyObject *module);

#endif
