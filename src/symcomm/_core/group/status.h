/* How an operation, a message or a wait ended; Python has the same numbers as constants of the module. */
#pragma once

enum status {
    STATUS_OK = 0,
    STATUS_MISMATCH = 1,    /* culprit made another call than origin */
    STATUS_DEAD = 2,        /* culprit died */
    STATUS_LEFT = 3,        /* culprit destroyed the group */
    STATUS_TIMEOUT = 4,     /* origin's deadline passed while it waited for culprit */
    STATUS_ABORTED = 5,     /* origin called abort() */
    STATUS_PLAN = 6,        /* the plan does not fit the group: a bug */
    STATUS_INTERRUPTED = 7, /* a Python signal handler raised (Ctrl-C) */
    STATUS_HALF_SENT = 8,   /* origin gave up a message to culprit that it had sent a part of */
    STATUS_NESTED = 9,      /* a signal handler called it while its own thread is in another operation of the group */
    STATUS_UNREADABLE = 10, /* origin could not read culprit's tensor */
    STATUS_REFUSED = 11,    /* some rank refused its call: the operation did not take place; the group lives on */
    STATUS_SIZE = 32,       /* a message has another length or dtype than the receive */
};
