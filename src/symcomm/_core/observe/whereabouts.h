/* Lets processes that have a rank's arena mapped ask where the rank is in its program, whatever it is doing. The thread
 * that holds its life has another thread ask Python and write the answer into the arena. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define WHEREABOUTS_BYTES 16384 /* of an arena: what follows, with its text */

struct whereabouts {
    _Atomic uint32_t asked;    /* futex: how many questions there were; peers write it */
    _Atomic uint32_t answered; /* what `asked` was when the last answer was looked up */
    _Atomic uint32_t version;  /* odd while an answer is being written */
    _Atomic uint32_t length;
    char text[];
};

struct answering;

/* NULL: no memory. */
struct answering *answering_make(struct whereabouts *place);
/* Called when a question has come: a thread answers once it has the interpreter lock, unless one is about to. */
void answering_begin(struct answering *a);
/* With the interpreter lock held. From here on nothing is written to the place. */
void answering_end(struct answering *a);
