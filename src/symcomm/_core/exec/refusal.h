/* Why a rank refused its call, in words for the others. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "group/group.h"

/* Publishes why this rank refuses its call, before it arrives at operation `seq`. Words that are too long are cut. */
void refusal_publish(const struct visit *v, uint64_t seq, const char *words, size_t n);
/* Keeps the words of `rank`, which has arrived at operation `seq`, for the caller. */
void refusal_keep(const struct visit *v, uint64_t seq, int rank);
void refusals_free(struct group *g);
