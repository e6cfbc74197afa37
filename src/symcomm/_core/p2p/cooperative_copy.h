/* Large messages from one symmetric tensor into another, copied by both ranks: the receiver takes pieces from the
 * front, the sender from the back, until they meet. A rank that does not come, or is slower, leaves more of them to the
 * other.
 *
 * The sender writes into memory of the receiver's caller, who has it back when its call has ended. So pieces are
 * claimed before they are copied. When the receiver has copied its share all are claimed, and the sender begins no
 * other: all that may be left is the piece it is at. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define COOP_BYTES (1024 * 1024) /* below, one copies before the other has noticed */

struct coop_copy {
    _Alignas(64) _Atomic uint64_t claims; /* the message's number, and the pieces claimed by each */
    _Atomic int64_t to;                   /* where the receiver's tensor is in its arena */
    _Alignas(64) _Atomic uint64_t pushed; /* by the sender: the message's number, and how many pieces it has copied */
};

/* Whether a message of so many bytes can be copied so. */
bool coop_fits(uint64_t nbytes);

/* All of these with the caller's lock of struct p2p held. `number` counts a channel's symmetric messages. */

/* The receiver's tensor, at `to` in its arena, may be written to. */
void coop_open(struct coop_copy *j, uint64_t number, int64_t to);
/* Copies the receiver's share. True when all of the message has come; false: the sender is copying the rest. */
bool coop_pull(struct coop_copy *j, uint64_t number, char *to, const char *from, uint64_t nbytes, bool sender_is_dead);
/* Of a message that was pulled: whether the sender is still at its share. */
bool coop_is_written(struct coop_copy *j, uint64_t number);

/* Copies the sender's share into the receiver's arena, if the receiver is at this message. Whether there was any. */
bool coop_push(struct coop_copy *j, uint64_t number, char *arena, const char *from, uint64_t nbytes);
