/* Large messages, copied by both ranks: the receiver takes pieces from the front, the sender from the back, until they
 * meet. A rank that does not come, or is slower, leaves more of them to the other. Between symmetric tensors they copy;
 * from an ordinary tensor ("attached") they read and write each other's memory by system call, see exec/cma.h.
 *
 * The sender writes into memory of the receiver's caller, who gets it back when its call has ended. So pieces are
 * claimed before they are copied. When the receiver has copied its share, all pieces are claimed and the sender begins
 * no other; only the piece that it is at may be left. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "exec/cma.h"

#define COOP_BYTES (1024 * 1024) /* below, one rank has copied all before the other notices */

struct coop_copy {
    _Alignas(64) _Atomic uint64_t claims; /* the message's number, and the pieces claimed by each */
    _Atomic int64_t to;                   /* where the receiver's tensor is in its arena, or (attached) in its memory */
    struct cma_grant grant;               /* attached: to write there */
    _Alignas(64) _Atomic uint64_t pushed; /* by the sender: the message's number, and how many pieces it has copied */
    _Atomic int pusher;                   /* its thread that does so */
};

/* A message as one of the two ranks sees it. */
struct coop_message {
    struct coop_copy *copy;
    uint64_t number; /* among the messages of a channel that do not go through its ring */
    uint64_t nbytes;
    char *mine;   /* this rank's tensor */
    char *theirs; /* the receiver's view: the sender's tensor, there if attached; the sender's: the receiver's arena */
    struct group *g;
    int peer;
    bool attached;
};

enum coop_state { COOP_WHOLE, COOP_WAITS, COOP_LOST };

/* Whether a message of so many bytes can be copied so. */
bool coop_fits(uint64_t nbytes);

/* All of these with the caller's lock of struct p2p held. */

/* The receiver's tensor, at `to`, may be written to; if it is attached, with this guard word. */
void coop_open(const struct coop_message *t, int64_t to, uint64_t guard);
/* Copies the receiver's share. Returns whether all of the message has come, the sender is still copying, or its memory
 * could not be read, so that the message is lost. */
enum coop_state coop_pull(const struct coop_message *t, bool sender_is_dead);
/* Whether the sender is still copying its share of a message that was pulled. */
bool coop_is_written(const struct coop_message *t);

/* Copies the sender's share into the receiver's tensor, if the receiver is at this message. Returns whether there was
 * any. */
bool coop_push(const struct coop_message *t);
