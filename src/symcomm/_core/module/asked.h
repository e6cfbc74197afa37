/* Who asks for what goes on when the call has returned: part of the types that calls of one group have in common. */
#pragma once

#include "module/call_site.h"

/* What calls of one group have in common; all NULL until they are bound. */
struct group_asked {
    PyObject *handle, *state, *whole, *type; /* the native.Group; whole() -> the group; of works */
    PyObject *failure;                       /* the name */
    struct call_sites sites;
};

/* What one call is told. */
struct asked {
    PyObject *type;                        /* of what stands for it, made of native.Request or native.MessageRequest */
    PyObject *pending;                     /* a list or a set, which keeps it while the core uses its tensors */
    PyObject *state, *group, *call, *site; /* group and site: to be released */
    uint32_t site_number;                  /* in the flight recorder */
};

/* From (group, state, type, number_of). False with an exception set. */
bool group_asked_bind(struct group_asked *o, PyObject *args);
/* Who asks, and where. False with an exception set, or without: the group cannot be used. */
bool group_asks(struct group_asked *o, struct asked *a);
int group_asked_traverse(const struct group_asked *o, visitproc visit, void *arg);
void group_asked_clear(struct group_asked *o);
