/* How a rank learns that its group has failed, and why, and whether a peer is still there. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "group/group.h"

/* STATUS_OK, or what the group has failed with. */
int sync_aborted(const struct visit *v);

/* Makes every rank's pending and later waits fail with this cause; the first cause wins. Returns the winning status. */
int sync_fail(const struct visit *v, int status, int culprit);
/* What another rank could not tell itself. */
int sync_fail_of(const struct visit *v, int status, int culprit, int origin);

/* Operation g->seq has failed on this rank, whose abort word says why. Every rank is told before the caller gets its
 * tensors back, also by those who were only told themselves: the first one may have died while it told the others. */
void sync_void(const struct visit *v);
/* Whether some rank has left operation `seq` in failure; what was read before is as it was if none has. */
bool sync_is_void(const struct visit *v, uint64_t seq);

/* Has the waits of this rank look again. */
void sync_wake_own(const struct visit *v);

/* STATUS_OK, STATUS_DEAD or STATUS_LEFT */
int sync_gone(const struct visit *v, int rank);
int sync_marked_gone(const struct visit *v, int rank); /* the same as far as memory tells, for those who do not wait */
