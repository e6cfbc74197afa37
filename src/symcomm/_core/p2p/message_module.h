/* The Python type native.MessageRequest: a message, from before it is posted to its end. */
#pragma once

#include "module/module.h"
#include "p2p/p2p.h"

/* What a message of a tensor that the core can view is told besides that. */
struct message_asked {
    PyObject *type;    /* of what stands for it, made of native.MessageRequest */
    PyObject *kept_in; /* a set, which keeps it while the core uses its tensor */
    PyObject *handle, *state, *group, *site;
    PyObject *tensor;
    struct op wanted;
};

/* What a message of a tensor that the core can view is. False, without an exception: Python has to look. */
bool message_read(const struct group *g, bool is_send, PyObject *tensor, PyObject *peer, PyObject *tag,
                  struct op *wanted);
/* (status, peer, bytes that came, their dtype) */
PyObject *message_outcome(struct op *op, int status);
/* Posts it. NULL with an exception set: OSError where the thread of unattended messages cannot be started. */
PyObject *message_start(const struct message_asked *a);
