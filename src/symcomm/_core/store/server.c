/* The server's loop. One round: wait for events, read what came, answer at once, then close the doomed connections. */
#include "store/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "module/module.h"
#include "os/thread.h"

#define EVENTS 256
#define SCRATCH (256 << 10)     /* one read takes at most this much */
#define KEEP_BUFFER 1024        /* an empty buffer larger than this is given back */
#define DIRECT_VALUE (32 << 10) /* larger values go to the socket without a copy */
#define ACCEPT_BATCH 256
#define ACCEPT_PAUSE_MS 100 /* after running out of descriptors */
#define SPIN_NS 30000       /* how long to look before sleeping: waking a thread took 10 to 30 us */
#define SPIN_REVIEW 64      /* rounds between looks at how oversubscribed the cores are */
#define SWEEP_MS 1000       /* between two sweeps for clients that do not finish their hello */

/* --- buffers ------------------------------------------------------------------------------------- */

/* Makes room for `more` bytes after those it holds. */
static bool buffer_reserve(struct server *server, struct buffer *buffer, size_t more) {
    if (more <= buffer->room - buffer->end) return true;
    size_t size = buffer_size(buffer);
    if (buffer->start > 0) memmove(buffer->bytes, buffer->bytes + buffer->start, size);
    buffer->start = 0;
    buffer->end = size;
    if (more <= buffer->room - size) return true;
    size_t room = buffer->room * 2 > size + more ? buffer->room * 2 : size + more;
    if (room < 64) room = 64;
    if (!budget_take(&server->table.budget, room - buffer->room)) return false;
    uint8_t *bytes = realloc(buffer->bytes, room);
    if (bytes == NULL) {
        budget_give(&server->table.budget, room - buffer->room);
        return false;
    }
    buffer->bytes = bytes;
    buffer->room = room;
    return true;
}

static void buffer_drop(struct server *server, struct buffer *buffer) {
    budget_give(&server->table.budget, buffer->room);
    free(buffer->bytes);
    *buffer = (struct buffer){0};
}

/* Takes the first `size` bytes out. */
static void buffer_consume(struct server *server, struct buffer *buffer, size_t size) {
    buffer->start += size;
    if (buffer->start < buffer->end) return;
    buffer->start = buffer->end = 0;
    if (buffer->room > KEEP_BUFFER) buffer_drop(server, buffer);
}

static bool buffer_append(struct server *server, struct buffer *buffer, const void *bytes, size_t size) {
    if (size == 0) return true;
    if (!buffer_reserve(server, buffer, size)) return false;
    memcpy(buffer->bytes + buffer->end, bytes, size);
    buffer->end += size;
    return true;
}

/* --- reports: why a client was refused ------------------------------------------------------------ */

static void name_peer(const struct conn *conn, char *text, size_t size) {
    char address[INET6_ADDRSTRLEN] = "?";
    if (conn->peer.sin6_family == AF_INET6) {
        inet_ntop(AF_INET6, &conn->peer.sin6_addr, address, sizeof address);
    } else {
        inet_ntop(AF_INET, &((const struct sockaddr_in *)&conn->peer)->sin_addr, address, sizeof address);
    }
    snprintf(text, size, "%s port %u", address, ntohs(conn->peer.sin6_port)); /* both kinds have it in one place */
}

static void report(struct server *server, const char *text) {
    pthread_mutex_lock(&server->report_lock);
    snprintf(server->reports[server->report_count++ % REPORTS], REPORT_SIZE, "%s", text);
    pthread_mutex_unlock(&server->report_lock);
    char line[REPORT_SIZE + 1];
    int size = snprintf(line, sizeof line, "%s\n", text);
    /* If the reader is too slow, or gone, it misses lines; the ring above keeps them. */
    if (server->report_fd >= 0 && write(server->report_fd, line, (size_t)size) < 0) return;
}

static void conn_doom(struct server *server, struct conn *conn) {
    if (conn->doomed) return;
    conn->doomed = true;
    conn->next_doomed = server->doomed;
    server->doomed = conn;
}

void conn_refuse(struct server *server, struct conn *conn, const char *format, ...) {
    if (conn->doomed) return;
    char peer[64], reason[REPORT_SIZE - 80], text[REPORT_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    name_peer(conn, peer, sizeof peer);
    snprintf(text, sizeof text, "closed %s: it %s", peer, reason);
    report(server, text);
    atomic_fetch_add_explicit(&server->refused, 1, memory_order_relaxed);
    conn_doom(server, conn);
}

/* --- writing ------------------------------------------------------------------------------------- */

static void watch(struct server *server, struct conn *conn) {
    struct epoll_event event = {.events = conn->blocked ? EPOLLOUT : EPOLLIN, .data.ptr = conn};
    if (epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event) < 0) conn_doom(server, conn);
}

static void refuse_memory(struct server *server, struct conn *conn) {
    conn_refuse(server, conn, "needs more memory than is left of the store's %zu bytes", server->table.budget.limit);
}

void conn_send(struct server *server, struct conn *conn, const void *bytes, size_t size) {
    if (!conn->doomed && !buffer_append(server, &conn->out, bytes, size)) refuse_memory(server, conn);
}

/* Gives the collected bytes to the socket. If some are left, the server reads no more from this client until they are
 * gone: a client that never reads costs one answer, not all of them. */
void conn_flush(struct server *server, struct conn *conn) {
    if (conn->doomed || conn->blocked || buffer_size(&conn->out) == 0) return;
    const uint8_t *bytes = conn->out.bytes + conn->out.start;
    ssize_t sent = send(conn->fd, bytes, buffer_size(&conn->out), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        conn_doom(server, conn);
        return;
    }
    buffer_consume(server, &conn->out, sent < 0 ? 0 : (size_t)sent);
    if (buffer_size(&conn->out) == 0) return;
    conn->blocked = true;
    watch(server, conn);
}

void conn_send_value(struct server *server, struct conn *conn, struct slice value) {
    uint64_t length = value.size;
    if (value.size >= DIRECT_VALUE) conn_flush(server, conn);
    if (value.size < DIRECT_VALUE || conn->blocked || conn->doomed) {
        conn_send(server, conn, &length, sizeof length);
        conn_send(server, conn, value.bytes, value.size);
        return;
    }
    struct iovec parts[2] = {{&length, sizeof length}, {(void *)(uintptr_t)value.bytes, value.size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    size_t done = sent < 0 ? 0 : (size_t)sent;
    if (done < sizeof length) {
        conn_send(server, conn, (uint8_t *)&length + done, sizeof length - done);
        done = sizeof length;
    }
    conn_send(server, conn, value.bytes + (done - sizeof length), value.size - (done - sizeof length));
    conn_flush(server, conn);
}

/* --- reading ------------------------------------------------------------------------------------- */

/* A whole frame is usually answered from the scratch memory; only the rest is kept for the client. */
static void read_fresh(struct server *server, struct conn *conn, ssize_t got) {
    size_t used = protocol_consume(server, conn, server->scratch, (size_t)got);
    if (!conn->doomed && !buffer_append(server, &conn->in, server->scratch + used, (size_t)got - used))
        refuse_memory(server, conn);
}

static void consume_kept(struct server *server, struct conn *conn) {
    size_t used = protocol_consume(server, conn, conn->in.bytes + conn->in.start, buffer_size(&conn->in));
    if (used > 0) buffer_consume(server, &conn->in, used);
}

/* How much to read for a client that is in the middle of a frame. Room doubles with what has come, whatever the client
 * says will come. */
static size_t next_read(const struct conn *conn) {
    size_t have = buffer_size(&conn->in), most = have + 4096;
    size_t missing = conn->scan.need > have ? conn->scan.need - have : 0;
    return missing > 0 && missing < most ? missing : most;
}

static void on_left(struct server *server, struct conn *conn) {
    char text[160];
    if (buffer_size(&conn->in) > 0) {
        protocol_describe_partial(conn, text, sizeof text);
        conn_refuse(server, conn, "%s", text);
    }
    conn_doom(server, conn);
}

static void on_readable(struct server *server, struct conn *conn) {
    bool fresh = buffer_size(&conn->in) == 0;
    uint8_t *into = server->scratch;
    size_t room = SCRATCH;
    if (!fresh) {
        if (!buffer_reserve(server, &conn->in, next_read(conn))) {
            refuse_memory(server, conn);
            return;
        }
        into = conn->in.bytes + conn->in.end;
        room = conn->in.room - conn->in.end;
    }
    ssize_t got = recv(conn->fd, into, room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        on_left(server, conn);
        return;
    }
    if (fresh) {
        read_fresh(server, conn, got);
    } else {
        conn->in.end += (size_t)got;
        consume_kept(server, conn);
    }
    conn_flush(server, conn);
}

static void on_writable(struct server *server, struct conn *conn) {
    conn->blocked = false;
    conn_flush(server, conn);
    if (conn->blocked || conn->doomed) return;
    if (buffer_size(&conn->in) > 0) consume_kept(server, conn); /* what came before it stopped reading */
    conn_flush(server, conn);
    if (!conn->blocked && !conn->doomed) watch(server, conn);
}

/* --- connections --------------------------------------------------------------------------------- */

static void mark_fd(struct server *server, int fd, bool open) {
    if ((size_t)fd / 64 >= server->open_words) return;
    uint64_t bit = (uint64_t)1 << (fd % 64);
    if (open) atomic_fetch_or(&server->open_fds[fd / 64], bit);
    else atomic_fetch_and(&server->open_fds[fd / 64], ~bit);
}

static void watch_listeners(struct server *server, bool accepting) {
    server->accepting = accepting;
    for (int i = 0; i < server->listener_count; i++) {
        struct epoll_event event = {.events = accepting ? EPOLLIN : 0, .data.ptr = &server->listeners[i]};
        epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, server->listeners[i], &event);
    }
}

static void add_conn(struct server *server, int fd, const struct sockaddr_in6 *peer) {
    struct conn *conn = calloc(1, sizeof *conn);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    if (conn == NULL || epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        report(server, "refused a client: no memory for another connection");
        free(conn);
        close(fd);
        return;
    }
    mark_fd(server, fd, true);
    conn->fd = fd;
    conn->peer = *peer;
    conn->since_ns = symcomm_now_ns();
    conn->next = server->conns;
    if (conn->next != NULL) conn->next->previous = conn;
    server->conns = conn;
    server->greeting++;
    atomic_fetch_add_explicit(&server->accepted, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&server->clients, 1, memory_order_relaxed);
}

/* Stops accepting for a moment. run() sees to it that the moment ends, however busy the clients are. */
static void stop_accepting(struct server *server, int error) {
    char text[REPORT_SIZE];
    snprintf(text, sizeof text, "cannot accept more clients for now: %s (raise `ulimit -n`)", strerror(error));
    if (!server->starved) report(server, text);
    server->starved = true;
    server->accept_again_ns = symcomm_now_ns() + (int64_t)ACCEPT_PAUSE_MS * 1000000;
    watch_listeners(server, false);
}

static void accept_clients(struct server *server, int listener) {
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        struct sockaddr_in6 peer = {0};
        socklen_t size = sizeof peer;
        int fd = accept4(listener, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            server->starved = false;
            add_conn(server, fd, &peer);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            stop_accepting(server, errno);
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

static void close_conn(struct server *server, struct conn *conn) {
    protocol_forget(server, conn);
    if (conn->previous != NULL) conn->previous->next = conn->next;
    else server->conns = conn->next;
    if (conn->next != NULL) conn->next->previous = conn->previous;
    if (conn->stage != STAGE_OPEN) server->greeting--;
    mark_fd(server, conn->fd, false);
    epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL); /* a forked child may have the socket, too */
    close(conn->fd);
    buffer_drop(server, &conn->in);
    buffer_drop(server, &conn->out);
    free(conn->challenge);
    free(conn);
    atomic_fetch_sub_explicit(&server->clients, 1, memory_order_relaxed);
}

/* A loop, since closing one client may wake others, and a write to one of them may fail. */
static void close_doomed(struct server *server) {
    for (struct conn *conn; (conn = server->doomed) != NULL;) {
        server->doomed = conn->next_doomed;
        close_conn(server, conn);
    }
}

static void sweep_greeting(struct server *server) {
    int64_t oldest = symcomm_now_ns() - server->limits.handshake_ns;
    for (struct conn *conn = server->conns; conn != NULL; conn = conn->next)
        if (conn->stage != STAGE_OPEN && conn->since_ns < oldest)
            conn_refuse(server, conn, "did not finish its hello in %.3g s", (double)server->limits.handshake_ns / 1e9);
}

/* --- the thread ---------------------------------------------------------------------------------- */

static bool is_listener(const struct server *server, const void *source) {
    return (const char *)source >= (const char *)server->listeners &&
           (const char *)source < (const char *)(server->listeners + MAX_LISTENERS);
}

static void handle(struct server *server, const struct epoll_event *event) {
    if (is_listener(server, event->data.ptr)) {
        if (server->accepting) accept_clients(server, *(int *)event->data.ptr);
        return;
    }
    struct conn *conn = event->data.ptr;
    if (conn->doomed) return;
    if (conn->blocked && (event->events & (EPOLLERR | EPOLLHUP))) conn_doom(server, conn);
    else if (conn->blocked) on_writable(server, conn);
    else on_readable(server, conn);
}

/* How long to spin: not at all on the only core, or while others want this core (the thread was preempted since the
 * last look). */
static int64_t choose_spin(struct server *server) {
    struct rusage usage;
    if (server->rounds++ % SPIN_REVIEW == 0 && getrusage(RUSAGE_THREAD, &usage) == 0) {
        server->oversubscribed = usage.ru_nivcsw != server->preempted;
        server->preempted = usage.ru_nivcsw;
    }
    return server->alone || server->oversubscribed ? 0 : SPIN_NS;
}

/* Goes on looking for a moment before it sleeps. So a client that makes one call after another need not wake this
 * thread each time, which would be most of the cost of a short call. */
static int wait_for_events(struct server *server, struct epoll_event *events, int64_t last_ns) {
    int64_t until_ns = last_ns + choose_spin(server);
    do {
        int count = epoll_wait(server->epoll_fd, events, EVENTS, 0);
        if (count != 0) return count;
    } while (symcomm_now_ns() < until_ns);
    int pause = !server->accepting ? ACCEPT_PAUSE_MS : server->greeting > 0 ? SWEEP_MS : -1;
    return epoll_wait(server->epoll_fd, events, EVENTS, pause);
}

static void *run(void *argument) {
    struct server *server = argument;
    struct epoll_event events[EVENTS];
    int64_t swept = symcomm_now_ns(), now = swept;
    for (;;) {
        int count = wait_for_events(server, events, now);
        if (count < 0 && errno != EINTR) break;
        for (int i = 0; i < count; i++) {
            if (events[i].data.ptr == server) return NULL; /* server_stop */
            handle(server, &events[i]);
        }
        now = symcomm_now_ns();
        if (server->greeting > 0 && now - swept > (int64_t)SWEEP_MS * 1000000) {
            sweep_greeting(server);
            swept = now;
        }
        close_doomed(server);
        if (!server->accepting && now >= server->accept_again_ns) watch_listeners(server, true);
        atomic_store_explicit(&server->keys, server->table.present, memory_order_relaxed);
        atomic_store_explicit(&server->bytes, server->table.budget.used, memory_order_relaxed);
    }
    report(server, "the store's server stopped: epoll failed");
    return NULL;
}

static void server_free(struct server *server) {
    while (server->conns != NULL) conn_doom(server, server->conns), close_doomed(server);
    for (int i = 0; i < server->listener_count; i++) close(server->listeners[i]);
    if (server->epoll_fd >= 0) close(server->epoll_fd);
    if (server->stop_fd >= 0) close(server->stop_fd);
    if (server->report_fd >= 0) close(server->report_fd);
    table_close(&server->table);
    if (server->token != NULL) explicit_bzero(server->token, server->token_size);
    free(server->token);
    free(server->scratch);
    free((void *)server->open_fds);
    pthread_mutex_destroy(&server->report_lock);
    free(server);
}

static bool prepare_listener(struct server *server, int slot) {
    int one = 1, fd = server->listeners[slot];
    mark_fd(server, fd, true);
    /* Accepted sockets inherit these, which saves system calls for each client. We notice a host that lost its power
     * after about half a minute. */
    int idle_s = 15, between_s = 5, probes = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    fcntl(fd, F_SETFD, FD_CLOEXEC); /* a listener that we were handed may not have it */
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || listen(fd, 1 << 16) < 0) return false;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &server->listeners[slot]};
    return epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool prepare(struct server *server, const uint8_t *token, size_t token_size) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    cpu_set_t cpus;
    server->alone = sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) < 2;
    server->open_words = (files.rlim_max < (1 << 20) ? (size_t)files.rlim_max : (size_t)1 << 20) / 64 + 1;
    server->open_fds = calloc(server->open_words, sizeof *server->open_fds);
    server->scratch = malloc(SCRATCH);
    server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    server->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    bool good = table_open(&server->table, server->limits.memory) && server->open_fds != NULL &&
                server->scratch != NULL && server->epoll_fd >= 0 && server->stop_fd >= 0;
    if (good && token_size > 0) {
        server->token = malloc(token_size);
        server->token_size = token_size;
        good = server->token != NULL;
        if (good) memcpy(server->token, token, token_size);
    }
    if (!good) return false;
    struct epoll_event stop = {.events = EPOLLIN, .data.ptr = server};
    good = epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->stop_fd, &stop) == 0;
    for (int i = 0; i < server->listener_count && good; i++) good = prepare_listener(server, i);
    return good;
}

static bool start_thread(struct server *server) {
    errno = thread_start(&server->thread, "symcomm-store", THREAD_STACK, run, server);
    return errno == 0;
}

/* Takes over the listeners and report_fd, even if it fails (NULL and errno). */
struct server *server_start(const int *listeners, int count, const struct limits *limits, const uint8_t *token,
                            size_t token_size, int report_fd) {
    struct server *server = calloc(1, sizeof *server);
    if (server == NULL) return NULL;
    server->limits = *limits;
    server->accepting = true;
    server->report_fd = report_fd;
    memcpy(server->listeners, listeners, (size_t)count * sizeof *listeners);
    server->listener_count = count;
    pthread_mutex_init(&server->report_lock, NULL);
    if (prepare(server, token, token_size) && start_thread(server)) return server;
    int error = errno;
    server_free(server);
    errno = error;
    return NULL;
}

void server_stop(struct server *server) {
    uint64_t one = 1;
    while (write(server->stop_fd, &one, sizeof one) < 0 && errno == EINTR) continue;
    pthread_join(server->thread, NULL);
    server_free(server);
}

void server_close_in_child(const struct server *server) {
    for (size_t word = 0; word < server->open_words; word++) {
        uint64_t bits = atomic_load(&server->open_fds[word]);
        for (; bits != 0; bits &= bits - 1) close((int)(word * 64) + __builtin_ctzll(bits));
    }
    close(server->epoll_fd);
    close(server->stop_fd);
    if (server->report_fd >= 0) close(server->report_fd);
}
