/* The engine behind messages: p2p/progress.c matches them and moves bytes, p2p/p2p.c begins, waits and
 * ends, p2p/background.c drives those that nobody waits for. */
#pragma once

#include "p2p/p2p.h"

struct unexpected { /* a message that came before its receive, while a later one was wanted */
    struct header header;
    uint64_t moved;
    char *bytes;
    struct unexpected *next;
};

struct incoming {
    struct channel *channel;
    struct header header; /* of the message being read */
    bool reading;         /* the header was taken, the bytes not all yet */
    bool void_message;    /* it came to nothing */
    bool coop;            /* the sender may write into the tensor of `into` */
    bool alone;           /* the sender was stopped while it wrote, and may go on at any time: it may not again */
    uint64_t moved;
    struct op *into;               /* or */
    struct unexpected *unexpected; /* or neither: discard */
    struct unexpected *unexpected_first, *unexpected_last;
};

struct outgoing {
    struct channel *channel;
    struct op *first, *last; /* sends not yet fully in the ring */
    struct op *unacknowledged;
    uint64_t tickets;
    uint64_t emptied; /* the receiver's, when we last needed to know: its line of memory is far away */
};

struct p2p {
    struct group *group;
    pthread_mutex_t lock; /* of all that follows */
    struct incoming *in;
    struct outgoing *out;
    struct op *receives;    /* posted, in order */
    uint64_t posted[2];     /* receives and sends so far */
    uint64_t guard;         /* word, see exec/cma.h; 0: none was needed yet */
    _Atomic int background; /* unfinished operations that nobody may be waiting for */
    _Atomic int lengthy;    /* of these, those that are not short */
    pthread_t thread;       /* drives those that nobody has come for */
    pthread_cond_t needed;  /* there is one */
    bool thread_runs;
    int64_t wakes_at;       /* when the thread looks by itself; NEVER_DUE: when it is signalled; 0: it is awake */
    uint64_t queued, seen;  /* such operations so far; and when the thread last found nothing to do */
    _Atomic int impatience; /* how many must be waited for soon before the next one is left to its caller */
    int over;               /* STATUS_OK, or what the group failed with: nothing begins any more */
    _Atomic bool closing;   /* no thread begins, and the one that runs is to end */
    bool closed;            /* the channels belong to others: the rank has left, or this is a child's copy */
};

/* The thread of messages that nobody waits for: p2p/background.c. With the lock of struct p2p held, but for the two of
 * its end and of a wait. */
void p2p_prepare_background(struct p2p *m);
bool p2p_start_background(struct p2p *m);
void p2p_end_background(const struct visit *v, struct p2p *m);
/* op, just posted, is not done. */
void p2p_leave_to_background(struct p2p *m, struct op *op);
/* Somebody waits for op, and drives it. */
void p2p_take_from_background(struct op *op);

/* All with the lock of struct p2p held. */
void p2p_record(struct group *g, struct op *op);
void p2p_finish(struct op *op, int status);
/* Moves whatever can be moved; returns whether anything was. waits: the caller has time to help receivers. */
bool p2p_progress(const struct visit *v, struct p2p *m, bool waits);
/* The same between op and its peer only, which is enough for most messages; the caller waits. */
void p2p_progress_first(const struct visit *v, struct p2p *m, const struct op *op);
/* Ends the receive that peer's message is read into, without the message. On return the sender no longer writes into
 * its tensor, unless a write has been in the kernel for LONG_ENOUGH_NS, which takes memory that does not answer. */
void p2p_revoke_receive(struct p2p *m, int peer);
/* A receive that finds its message among those set aside. */
bool p2p_match_unexpected(struct p2p *m, struct op *op);
void p2p_free_unexpected(struct unexpected *p);
