/* The TCPStore server: one thread, one epoll, no interpreter lock.
 *
 *   server.c        the loop: accepts, reads, writes, closes
 *   protocol.c      finds frames in the bytes of a client and answers them
 *   table.c         keys, values, queues, waiters
 *   store_module.c  the Python type StoreServer
 *   client.c        the client's end: one function that makes all its calls
 *
 * A client that breaks the protocol or a limit is closed, with a reason in `reports`; no other client notices. */
#pragma once

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>

#include "store/sha256.h"
#include "store/table.h"

#define MAX_LISTENERS 8
#define REPORTS 64
#define REPORT_SIZE 240

struct limits {
    uint64_t key, value, frame; /* bytes */
    uint64_t count;             /* keys in one call */
    uint64_t memory;            /* bytes held for all clients together */
    int64_t handshake_ns;       /* time to say hello, and to prove the token if there is one */
    bool token_is_optional;     /* the server proves the token to clients that ask, and demands it of none */
};

struct buffer {
    uint8_t *bytes;
    size_t start, end, room; /* what it holds is from start to end */
};

static inline size_t buffer_size(const struct buffer *buffer) { return buffer->end - buffer->start; }

struct command;

/* How far the frame at the start of a client's input was checked. */
struct scan {
    const struct command *command; /* NULL: not even its first byte has come */
    size_t at;                     /* bytes that are known to be well formed */
    size_t need;                   /* no progress is possible below this size */
    const char *field;             /* what comes next, see store/protocol.c */
    uint64_t repeats;              /* how often the repeated fields still come */
};

enum stage { STAGE_NEW, STAGE_CHALLENGE, STAGE_PROOF, STAGE_OPEN };

struct challenge {
    uint8_t client_nonce[SHA256_SIZE], server_nonce[SHA256_SIZE];
};

struct conn {
    int fd;
    enum stage stage;
    bool doomed;  /* to be closed at the end of this round of events */
    bool blocked; /* it does not read its answers, so we read nothing more from it */
    struct buffer in, out;
    struct scan scan;
    struct waiter *waits;
    size_t awaited; /* keys that are still missing */
    struct challenge *challenge;
    int64_t since_ns;
    struct conn *previous, *next; /* all connections, newest first */
    struct conn *next_doomed;
    struct sockaddr_in6 peer; /* large enough for IPv4 too */
};

struct server {
    int epoll_fd, stop_fd, report_fd;
    int listeners[MAX_LISTENERS];
    int listener_count;
    bool accepting, starved; /* whether it listens for newcomers; the last found no free descriptor */
    int64_t accept_again_ns; /* while not accepting: when to try again */
    struct limits limits;
    uint8_t *token;
    size_t token_size;
    struct table table;
    struct conn *conns, *doomed;
    size_t greeting; /* connections that have not come to STAGE_OPEN */
    uint8_t *scratch;
    bool alone, oversubscribed; /* there is only one core; other threads want ours */
    uint64_t rounds;
    long preempted; /* how often this thread had been, at the last look */
    pthread_t thread;
    bool running;

    /* read by other threads */
    _Atomic uint64_t clients, accepted, refused, requests, keys, bytes;
    _Atomic uint64_t *open_fds; /* a bit for each descriptor of ours, for a child made by fork() to close */
    size_t open_words;
    pthread_mutex_t report_lock;
    char reports[REPORTS][REPORT_SIZE];
    uint64_t report_count;
};

/* store/server.c */
struct server *server_start(const int *listeners, int count, const struct limits *limits, const uint8_t *token,
                            size_t token_size, int report_fd);
void server_stop(struct server *server);                 /* waits for the thread; closes everything */
void server_close_in_child(const struct server *server); /* after fork(): only the descriptors */

__attribute__((format(printf, 3, 4))) void conn_refuse(struct server *server, struct conn *conn, const char *format,
                                                       ...);
/* Collects bytes for the client; conn_flush() sends them. */
void conn_send(struct server *server, struct conn *conn, const void *bytes, size_t size);
/* The value's length, then its bytes. */
void conn_send_value(struct server *server, struct conn *conn, struct slice value);
void conn_flush(struct server *server, struct conn *conn);

/* store/protocol.c */
/* Returns how many bytes it used. */
size_t protocol_consume(struct server *server, struct conn *conn, const uint8_t *bytes, size_t size);
/* The client is gone. */
void protocol_forget(struct server *server, struct conn *conn);
void protocol_describe_partial(const struct conn *conn, char *text, size_t size);
