/* Tagged messages between two ranks of a group.
 *
 * Every ordered pair of ranks has a channel in the sender's arena: a ring of bytes that the sender fills and the
 * receiver empties. A message is a header and its bytes, streamed as room allows. For a symmetric tensor, or a large
 * one that the receiver can read by system call ("attached"), only the header is sent; the receiver copies straight
 * from the tensor, and the sender helps with large ones (see p2p/cooperative_copy.h). A posted operation is a small
 * state machine; a thread that waits drives all of them. */
#pragma once

#include "p2p/cooperative_copy.h"
#include "sync/fail.h"

#define RING_BYTES (256 * 1024)
#define ANY_SOURCE (-1)

struct channel {
    _Alignas(64) _Atomic uint64_t filled; /* bytes the sender has put in, ever */
    /* 1: messages outside the ring that were not copied yet cannot be trusted. */
    _Atomic uint64_t withdrawn;
    _Alignas(64) _Atomic uint64_t emptied; /* bytes the receiver has taken out, ever */
    _Atomic uint64_t attaches;             /* 1: the receiver has found that it can read the sender's memory */
    _Alignas(64) _Atomic uint64_t copied;  /* messages outside the ring that the receiver has copied, ever */
    struct coop_copy coop;                 /* of the message that it copies now */
    _Alignas(64) char ring[RING_BYTES];
};

#define IN_RING (-1)
#define ATTACHED INT64_MIN

struct header {
    uint64_t nbytes;
    int64_t tag;
    int64_t offset; /* in the sender's arena; IN_RING: the bytes follow; or ATTACHED + the address in its memory */
    int64_t dtype;
};

#define NEVER_DUE INT64_MAX

/* OP_HELD: a posted receive that keeps its place, but takes no message. */
enum op_state { OP_POSTED, OP_HELD, OP_MOVING, OP_UNACKNOWLEDGED, OP_DONE };

struct op {
    struct p2p *p2p;
    bool is_send;
    _Atomic int peer; /* or ANY_SOURCE until matched */
    int64_t tag, dtype;
    char *buffer;
    uint64_t nbytes, moved;
    uint64_t ticket; /* of a send outside the ring: done when this many were copied */
    bool attached;
    enum op_state state;
    int status; /* STATUS_OK, or STATUS_SIZE with `got` and `got_dtype` */
    uint64_t got;
    int64_t got_dtype;
    struct op *next;
    _Atomic int references;
    bool background;        /* nobody may be waiting: the background thread drives it */
    _Atomic int64_t posted; /* ns, where it was not done at once */
    _Atomic int64_t due;    /* ns: until then it is left to a caller who waits for it */
    bool slow_path;         /* Python looked at the tensor */
    uint32_t site;          /* of the call, for the flight recorder */
    struct flight_entry *record;
    uint64_t record_number;
    _Atomic uint32_t *version; /* of a receive's tensor: raised when the message has come; or NULL */
};

/* Called once in a wait of a Python thread, when op and the ranks that it waits for seem to wait for each other. NULL:
 * nobody listens. */
extern void (*_Atomic p2p_deadlock_hook)(const struct op *op);

/* channels: per rank, where its outgoing channels start (world of them). 0, or -1: out of memory. */
int p2p_open(struct group *g, char *const *channels);
/* Ends the thread that drives unattended operations, and takes back messages that nobody has received. */
void p2p_close(const struct visit *v);
void p2p_drop(const struct visit *v);
/* Called when the group has failed, before the caller learns of it: ends all messages of this rank, so that nobody
 * reads or writes their tensors any more. Later ones are refused. Does nothing if the group has not failed. */
void p2p_let_go(const struct visit *v);
/* The same for a caller outside of collectives: it first waits for a collective in another thread. */
void p2p_let_all_go(const struct visit *v);
/* In a forked child: touch the channels no more. */
void p2p_forked(struct group *g);
/* NULL with errno set: no memory, or no thread to drive it (EAGAIN). done: there is nothing left to wait for. */
struct op *p2p_post(struct group *g, const struct op *wanted, bool *done);
/* Posts and waits in one, for an operation that is not left to the background. NULL: no memory. */
struct op *p2p_exchange(struct group *g, const struct op *wanted, int64_t timeout, int *status);
/* Makes progress until op is done. timeout ns, 0: none; negative: only look. STATUS_TIMEOUT withdraws the op. */
int p2p_wait(struct op *op, int64_t timeout, bool withdraw);
/* For receives that a message from outside the group may end as well. Hold: no message of the group can match any more;
 * false: one has, or the receive is over. Resume: it is posted as before, in its old place. Fill: a message that came
 * another way ends it, and the flight recorder notes `status`. */
bool p2p_hold(struct op *op);
void p2p_resume(struct op *op);
bool p2p_fill(struct op *op, int status); /* false: it is not held */
/* Whether a message of so many bytes takes microseconds once the peer takes part, with no others on their way. */
bool p2p_is_short(const struct group *g, uint64_t nbytes);
/* Drops a reference to op. */
void p2p_release(struct op *op);
