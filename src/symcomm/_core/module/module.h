/* Shared by all files of the core. */
#ifndef SYMCOMM_COMMON_H
#define SYMCOMM_COMMON_H

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
extern _Thread_local PyThreadState *symcomm_released;
int symcomm_ask_python(void);
void symcomm_give_up_lock(void);
uint32_t symcomm_ask_for_site(void);
#define WITHOUT_LOCK_UNLESS(soon, statement)                          \
    do {                                                              \
        symcomm_interrupted = symcomm_ask_python;                     \
        symcomm_released = NULL;                                      \
        symcomm_before_waiting = symcomm_give_up_lock;                \
        symcomm_locate = symcomm_ask_for_site;                        \
        if (!(soon)) symcomm_give_up_lock();                          \
        statement;                                                    \
        if (symcomm_released) PyEval_RestoreThread(symcomm_released); \
        symcomm_before_waiting = NULL;                                \
        symcomm_locate = NULL;                                        \
        symcomm_interrupted = NULL;                                   \
    } while (0)
#define WITHOUT_LOCK(statement) WITHOUT_LOCK_UNLESS(false, statement)

/* Each part adds its functions and types to the module; returns 0, or -1 with an exception set. */
int symcomm_add_reduce(PyObject *module);
int symcomm_add_pack(PyObject *module);
int symcomm_add_mapping(PyObject *module);
int symcomm_add_life(PyObject *module);
int symcomm_add_tensor(PyObject *module);
int symcomm_add_cores(PyObject *module);
int symcomm_add_group(PyObject *module);
int symcomm_add_report(PyObject *module);
int symcomm_add_quick(PyObject *module);
int symcomm_add_options(PyObject *module);
int symcomm_add_p2p(PyObject *module);
int symcomm_add_signals(PyObject *module);
int symcomm_add_window(PyObject *module);
int symcomm_add_gpu(PyObject *module);
int symcomm_add_store_server(PyObject *module);
int symcomm_add_stream(PyObject *module);
int symcomm_add_lockwatch(PyObject *module);

#endif
