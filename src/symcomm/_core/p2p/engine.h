/* What the two halves of messages share: p2p/progress.c moves bytes, p2p/p2p.c waits, begins and ends. */
#ifndef SYMCOMM_MAIL_H
#define SYMCOMM_MAIL_H

#include "p2p/p2p.h"

struct parked { /* a message that came before its receive, while a later one was wanted */
    struct header header;
    uint64_t moved;
    char *bytes;
    struct parked *next;
};

struct incoming {
    struct channel *channel;
    struct header header; /* of the message being read */
    bool reading;         /* the header was taken, the bytes not all yet */
    bool void_message;    /* it came to nothing */
    bool joint;           /* the sender may write into the tensor of `into` */
    uint64_t moved;
    struct op *into;     /* or */
    struct parked *park; /* or neither: discard */
    struct parked *parked_first, *parked_last;
};

struct outgoing {
    struct channel *channel;
    struct op *first, *last; /* sends not yet fully in the ring */
    struct op *unacknowledged;
    uint64_t tickets;
    uint64_t emptied; /* as it was when we last needed to know: the receiver's line of memory is far away */
};

struct mail {
    struct group *group;
    pthread_mutex_t lock;
    struct incoming *in;
    struct outgoing *out;
    struct op *receives;    /* posted, in order */
    uint64_t posted[2];     /* receives and sends so far */
    _Atomic int background; /* unfinished operations that nobody may be waiting for */
    pthread_t thread;       /* drives those */
    pthread_cond_t needed;  /* there is one */
    bool thread_runs;
    bool closed; /* the channels belong to others: the rank has left, or this is a child's copy */
    _Atomic bool closing;
};

/* All with the mail's lock held. */
void mail_record(struct group *g, struct op *op);
void mail_finish(struct op *op, int status);
/* Moves whatever can be moved; whether anything was. waits: the caller has time to help receivers. */
bool mail_progress(struct mail *m, bool waits);
/* Only between op and its peer, which is all that most messages need; of a caller that waits. */
void mail_progress_first(struct mail *m, const struct op *op);
/* The receive that peer's message is read into ends without it. On return the sender writes into its tensor no more. */
void mail_take_away(struct mail *m, int peer);
/* A receive that finds its message among those set aside. */
bool mail_unpark(struct mail *m, struct op *op);
void mail_free_parked(struct parked *p);

#endif
