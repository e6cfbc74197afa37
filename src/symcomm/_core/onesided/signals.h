/* Counted signals between two ranks: words of shared memory that one rank counts up and another counts down. */
#pragma once

#include "sync/fail.h"

struct counter {
    _Atomic uint32_t *word;     /* signals that were sent and not taken yet */
    _Atomic uint32_t *sleepers; /* who sleeps on words of this rank */
};

/* Never waits. All that this thread wrote before is visible to whoever takes the signal. */
void counter_add(const struct counter *c);

/* Take one of `peer`'s signals. Without a timeout it looks for some microseconds, with a negative one it looks once,
 * and gives the interpreter lock up in neither case: STATUS_TIMEOUT means that there is none. */
int counter_take(const struct visit *v, const struct counter *c, int peer, int64_t timeout);
