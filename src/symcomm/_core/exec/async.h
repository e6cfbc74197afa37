/* Operations that run while the caller goes on, or in its thread once it waits for them; in the order they were
 * submitted. */
#pragma once

#include "exec/exec.h"

/* Requests of one call that is made of several operations: after one that was refused the rest does not run, on any
 * rank. Only who has the turn looks. */
struct batch {
    _Atomic int references;
    int64_t refused; /* its status; 0: none yet */
};

#define FEW_BUFFERS 4

struct request {
    struct group *group;
    struct plan *plan;       /* NULL: the rank refuses its call */
    const struct plan *kind; /* calls that are waited for alike; NULL: not known */
    char *words;             /* why */
    size_t n_words;
    struct batch *batch; /* or NULL */
    /* A request whose plan depends on what ranks tell each other in the one before it, or NULL: it does not run where
     * that one failed. Otherwise prepare() gives it its plan and buffers, or words to refuse it with, in the thread
     * that runs it; or a status that ends it. */
    struct request *after;
    int64_t (*prepare)(struct request *);
    void *preparation;
    struct buffers buffers;
    int64_t timeout;
    struct origin from;
    int64_t status;                     /* of exec_run(), valid once done */
    int64_t number;                     /* of the operation in its group, see number_of() */
    uint64_t place;                     /* in the queue, from 1 on; 0: it never stood there */
    _Atomic uint32_t done;              /* futex */
    int64_t submitted, ended;           /* ns */
    int64_t due;                        /* ns: until then it is left to a caller who waits for it */
    _Atomic int references;             /* the queue's and the owner's */
    _Atomic int awaited;                /* threads that wait for it while another runs it */
    _Atomic uint32_t sleepers;          /* of these, those asleep on `done` */
    void (*finished)(struct request *); /* called by the group's thread after done, or NULL: no waiter runs it then */
    void *context;
    _Atomic uint32_t **versions;   /* of tensors that it writes: raised once more when it has run */
    _Atomic uint32_t *one_version; /* instead of an array */
    int n_versions;
    char *few[FEW_BUFFERS]; /* the buffers' addresses, where there are no more */
    struct request *next;
};

/* With one reference, the caller's, and copies of the buffers' addresses. NULL: no memory. */
struct request *async_request(struct group *g, struct plan *p, const struct buffers *b, int64_t timeout,
                              struct origin from);
/* A call that is refused, told in its turn. NULL: no memory. */
struct request *async_refusal(struct group *g, const char *words, size_t n, int64_t timeout, struct origin from);
/* Before it is submitted: its plan will be known once `first`, submitted just before, has run. */
void async_follow(struct request *r, struct request *first, int64_t (*prepare)(struct request *), void *preparation);
/* The buffers that it works on, copied. False: no memory. */
bool async_use(struct request *r, struct plan *p, const struct buffers *b);
/* Why it is refused, copied. False: no memory. */
bool async_refuse_with(struct request *r, const char *words, size_t n);
void async_join_batch(struct request *r, struct batch *b);
void async_leave_batch(struct batch *b);
/* Takes the caller's reference for the worker as well. 0, or -1 when no thread could be started. */
int async_submit(struct group *g, struct request *r);
/* A blocking call that has to wait its turn behind asynchronous ones, so that operations keep their order. */
int64_t async_run_queued(struct group *g, struct plan *p, const struct buffers *b, int64_t timeout, struct origin from);
/* A blocking call, in its turn. idle: what async_idle() said. */
static inline int64_t async_run_in_turn(struct group *g, struct plan *p, const struct buffers *b, int64_t timeout,
                                        struct origin from, bool idle) {
    return idle ? exec_run(g, p, b, timeout, from) : async_run_queued(g, p, b, timeout, from);
}
/* True when nothing is queued or running, so that a blocking call may run in the caller's thread. */
bool async_idle(struct group *g);
/* STATUS_OK once r is done. `runs`: the caller, who has nothing else to do, runs what is queued up to r where no other
 * thread has begun. Otherwise it waits for timeout ns at most (0: for ever), and STATUS_TIMEOUT is nobody's failure. A
 * signal handler that raises ends the wait and the group, as in a blocking call. STATUS_NESTED: this very thread is in
 * the middle of what r comes behind. */
int async_wait(struct request *r, int64_t timeout, bool runs);
/* Whether it stands alone, so that whoever waits for it now most likely runs it, as a blocking call of its plan. */
bool async_is_next(const struct request *r);
/* The caller waits no longer: r's deadline, and that of all before it, is now. Returns when r is done. */
void async_give_up(struct request *r);
void async_release(struct request *r);
/* Ends the thread after what is queued; the group must have failed or be idle. Called by that very thread (what it
 * calls back may leave the group) it does not wait. Operations that come later are refused. */
void async_stop(struct group *g);
void async_free(struct group *g);
/* Whether the caller is the group's own thread; and then: what that is to do at its end, when the group is gone. */
bool async_inside(struct group *g);
void async_at_end(struct group *g, void (*on_exit)(void *), void *argument);
