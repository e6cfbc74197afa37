/* Calls that a rank has refused: its words for the others. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "group/group.h"

/* Before it arrives at operation `seq`: why this rank refuses its call. Words that are too long are cut. */
void refusal_publish(const struct visit *v, uint64_t seq, const char *words, size_t n);
/* During operation `seq`, at which `rank` has arrived: keep its words for the caller. */
void refusal_keep(const struct visit *v, uint64_t seq, int rank);
void refusals_free(struct group *g);
