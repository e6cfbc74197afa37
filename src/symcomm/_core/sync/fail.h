/* How a rank learns that its group has failed, and why, and whether a peer is still there.
 *
 * A rank that fails writes the cause into the abort word of every rank, its own first. The first cause in a word stays,
 * and waits look at it. A failed operation is also marked void on every rank, before its caller gets the tensors back:
 * a rank that has done its last step succeeds only if the operation is not void. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "group/group.h"

/* STATUS_OK, or what the group has failed with. */
int sync_aborted(const struct visit *v);

/* Makes every rank's pending and later waits fail with this cause; the first cause wins. Returns the winning status. */
int sync_fail(const struct visit *v, int status, int culprit);
/* The same, for another rank that cannot tell the others itself. */
int sync_fail_of(const struct visit *v, int status, int culprit, int origin);

/* Called when operation g->seq has failed on this rank, whose abort word says why. Tells every rank that the operation
 * is void, before the caller gets its tensors back. Ranks that were told tell the others too: the first one may have
 * died on the way. */
void sync_void(const struct visit *v);
/* Whether some rank has left operation `seq` in failure. If none has, all that was read from peers before is valid. */
bool sync_is_void(const struct visit *v, uint64_t seq);

/* Makes this rank's waits look again. */
void sync_wake_own(const struct visit *v);

/* STATUS_OK, STATUS_DEAD or STATUS_LEFT */
int sync_gone(const struct visit *v, int rank);
int sync_marked_gone(const struct visit *v, int rank); /* the same by memory alone, without asking the kernel */
