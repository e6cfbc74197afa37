/* Whether peers can reach a buffer where it is. */
#pragma once

#include "group/group.h"
#include "memory/isolate.h"

/* The buffer's offset in this rank's arena, or -1. */
static inline int64_t symmetric_offset(const struct group *g, const char *buffer, int64_t nbytes) {
    uintptr_t start = (uintptr_t)g->arena[g->rank], at = (uintptr_t)buffer;
    bool inside = at >= start && at - start < (uintptr_t)g->arena_bytes;
    return inside && !is_isolated(buffer, nbytes) ? (int64_t)(at - start) : -1;
}
