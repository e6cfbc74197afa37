/* Shared by all files of the core. */
#ifndef SYMCOMM_COMMON_H
#define SYMCOMM_COMMON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#include <time.h>

/* Functions marked SYMCOMM_CLONES are compiled once per instruction set and chosen at load time.
 * arm64 needs no clones: its baseline already has the vector instructions we use. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(SYMCOMM_SANITIZED) && !defined(__clang__)
#define SYMCOMM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SYMCOMM_CLONES
#endif

#define SYMCOMM_LINE 64 /* bytes in a cache line, for layout */

static inline int64_t symcomm_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Run a statement without the interpreter lock, while sync_wait() may ask now and then whether a signal handler raised. */
extern _Thread_local PyThreadState *symcomm_released;
extern _Thread_local int (*symcomm_interrupted)(void);
int symcomm_ask_python(void);
#define WITHOUT_LOCK(statement)                   \
    do {                                          \
        symcomm_interrupted = symcomm_ask_python; \
        symcomm_released = PyEval_SaveThread();   \
        statement;                                \
        PyEval_RestoreThread(symcomm_released);   \
        symcomm_interrupted = NULL;               \
    } while (0)

/* Each part adds its functions and types to the module; returns 0, or -1 with an exception set. */
int symcomm_add_reduce(PyObject *module);
int symcomm_add_shm(PyObject *module);
int symcomm_add_tensor(PyObject *module);
int symcomm_add_group(PyObject *module);
int symcomm_add_quick(PyObject *module);
int symcomm_add_p2p(PyObject *module);
int symcomm_add_signals(PyObject *module);
int symcomm_add_store_server(PyObject *module);

#endif
