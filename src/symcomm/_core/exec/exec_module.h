/* Asynchronous calls as Python sees them. */
#pragma once

#include "exec/async.h"
#include "module/module.h"

/* Queues a request, which may be NULL: no memory. written: a tensor, a tuple of them, or NULL: those whose versions
 * change. callback: called with the status when it has run, or NULL. The request's capsule, or NULL with an exception
 * set. The capsule's context, if somebody sets one, is a reference that is dropped with it. */
PyObject *exec_submit(struct request *r, PyObject *written, PyObject *callback);
