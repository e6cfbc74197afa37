/* Whether every rank of this host can have a core of its own, as far as this process can see. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "memory/life.h"

/* Tells the others on which cores the calling thread may run, and what its control groups grant. */
void cores_publish(struct life *me);

/* Whether there are as many usable cores as living ranks on this host, for `me` and for all, by what each rank
 * published last; `me` publishes anew first. own_thread: the caller is the rank's own thread, whose cores count, not
 * one that works for it. */
bool cores_suffice(struct life *me, bool own_thread);

/* Called before memory is unmapped: no longer counts ranks whose lives lie there. */
void cores_forget(const char *at, int64_t nbytes);
