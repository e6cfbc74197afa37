/* The Python type native.Request: an asynchronous call, from before it is queued to its end. */
#pragma once

#include "exec/async.h"
#include "module/asked.h"

/* NULL with an exception set: that is no native.Request, or it was never queued. */
struct request *request_of(PyObject *object);
/* Queues r, which may be NULL (no memory), as that of a native.Request. written: a tensor, a tuple of them, or NULL:
 * those whose versions change. callback: called with the status when it has run, or NULL. False with an exception set.
 */
bool request_submit(PyObject *object, struct request *r, PyObject *written, PyObject *callback);
/* One whose end needs no Python but to let go of `kept`, unless it fails; target: its results, a tuple, one or None. It
 * is in the list of those that are pending. NULL with an exception set. */
PyObject *request_plain(const struct asked *a, PyObject *kept, PyObject *target);
/* It could not be queued. */
void request_cancel(PyObject *object);
/* Drops the first of those that are pending, as long as they have ended. */
void request_drop_ended(PyObject *pending);
