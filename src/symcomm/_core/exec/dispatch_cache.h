/* Finds the plans of calls made before, so that the next call of the kind needs no Python. */
#pragma once

#include "exec/request_module.h"
#include "group/group.h"

/* Forgets all plans. With the interpreter lock held, since the table has references to Python objects. */
void dispatch_cache_drop(struct group *g);
/* Queues a call of a kind seen before: (call, detail or torch's options, input, output). A native.Request, or -1 where
 * Python has to look; NULL with an exception set. */
PyObject *dispatch_cache_queue(struct group *g, const struct asked *a, PyObject *const *args);
/* Runs one: (call, detail, input, output). Its status, or -1 where Python has to look; NULL with an exception set. */
PyObject *dispatch_cache_run(struct group *g, PyObject *const *args);
