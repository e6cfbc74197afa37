/* Giving up the interpreter lock around what may wait, and asking Python something meanwhile. */
#pragma once

#include "module/module.h"
#include "sync/sync.h"

/* Run a statement without the interpreter lock, while sync_wait() may ask now and then whether a signal handler raised.
 * `soon`: it is expected to end within microseconds, so the lock, whose release and return cost 0.13 us, is only given
 * up once it turns out that there is something to wait for. */
extern THREAD_LOCAL PyThreadState *gil_released;
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
