/* Gives up the interpreter lock around calls that may wait, and takes it back to call Python meanwhile. */
#pragma once

#include "module/module.h"
#include "sync/caller.h"

extern const struct caller_hooks python_caller;

void gil_release(struct caller *c);
/* False: the caller still has it. */
static inline bool gil_take_back(struct caller *c) {
    if (c->lock_state == NULL) return false;
    PyEval_RestoreThread(c->lock_state);
    c->lock_state = NULL;
    return true;
}

static inline void gil_enter(struct caller *c, bool soon) {
    *c = (struct caller){.hooks = &python_caller, .outer = symcomm_caller, .awaited = caller_awaited()};
    symcomm_caller = c;
    if (!soon) gil_release(c);
}

static inline void gil_leave(struct caller *c) {
    gil_take_back(c);
    symcomm_caller = c->outer;
}

/* Runs a statement without the interpreter lock; its waits may take the lock to ask whether a signal handler raised.
 * `soon`: the statement should end within microseconds. Then the lock, whose release and return cost 0.13 us, is only
 * given up once there is something to wait for. */
#define WITHOUT_GIL_UNLESS(soon, statement) \
    do {                                    \
        struct caller gil_caller;           \
        gil_enter(&gil_caller, soon);       \
        statement;                          \
        gil_leave(&gil_caller);             \
    } while (0)
#define WITHOUT_GIL(statement) WITHOUT_GIL_UNLESS(false, statement)
