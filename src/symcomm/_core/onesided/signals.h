/* Counted signals between two ranks: words of shared memory that one rank counts up and another counts down. */
#pragma once

#include "sync/fail.h"

struct counter {
    _Atomic uint32_t *word;     /* signals that were sent and not taken yet */
    _Atomic uint32_t *sleepers; /* threads asleep on words of this rank */
};

/* Never waits. The rank that takes the signal sees all earlier writes of this thread. */
void counter_add(const struct counter *c);

/* Takes one of `peer`'s signals. With a timeout of 0 it looks for some microseconds, with a negative one only once; in
 * either case it keeps the interpreter lock. STATUS_TIMEOUT: there is no signal. */
int counter_take(const struct visit *v, const struct counter *c, int peer, int64_t timeout);
