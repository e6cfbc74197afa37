/* Python's view of the store: the StoreServer type, and one function that a client makes its calls with. */
#include "common.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "store_server.h"

/* --- StoreServer ----------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Server *server; /* NULL once stopped */
} ServerObject;

static bool fill_listeners(PyObject *list, int listeners[MAX_LISTENERS], int *count) {
    Py_ssize_t size = PyList_Size(list);
    if (size < 1 || size > MAX_LISTENERS) {
        PyErr_Format(PyExc_ValueError, "StoreServer: listeners must be 1 to %d descriptors", MAX_LISTENERS);
        return false;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        listeners[i] = (int)PyLong_AsLong(PyList_GetItem(list, i));
        if (listeners[i] < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "StoreServer: a listener is no descriptor");
            return false;
        }
    }
    *count = (int)size;
    return true;
}

static PyObject *server_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"listeners", "token",      "report_fd", "max_key",     "max_value",
                            "max_frame", "max_keys",   "max_memory", "handshake_s", NULL};
    PyObject *list;
    const char *token = NULL;
    Py_ssize_t token_size = 0;
    int report_fd = -1, listeners[MAX_LISTENERS], count = 0;
    unsigned long long key, value, frame, keys, memory;
    double handshake_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!z#iKKKKKd", names, &PyList_Type, &list, &token, &token_size,
                                     &report_fd, &key, &value, &frame, &keys, &memory, &handshake_s))
        return NULL;
    if (!fill_listeners(list, listeners, &count)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    ServerObject *self = (ServerObject *)allocate(type, 0);
    if (self == NULL) return NULL;
    Limits limits = {.key = key, .value = value, .frame = frame, .count = keys, .memory = memory,
                     .handshake_ns = (int64_t)(handshake_s * 1e9)};
    self->server = server_start(listeners, count, &limits, (const uint8_t *)token, (size_t)token_size, report_fd);
    if (self->server == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *server_stop_method(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Server *server = ((ServerObject *)self)->server;
    ((ServerObject *)self)->server = NULL;
    if (server != NULL) {
        Py_BEGIN_ALLOW_THREADS
        server_stop(server);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* The thread did not come along through fork(); what it used is left alone, only its descriptors are closed. */
static PyObject *server_after_fork(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Server *server = ((ServerObject *)self)->server;
    ((ServerObject *)self)->server = NULL;
    if (server != NULL) server_close_in_child(server);
    Py_RETURN_NONE;
}

static PyObject *copy_reports(Server *server) {
    char reports[REPORTS][REPORT_SIZE];
    pthread_mutex_lock(&server->report_lock);
    uint64_t count = server->report_count;
    memcpy(reports, server->reports, sizeof reports);
    pthread_mutex_unlock(&server->report_lock);
    PyObject *list = PyList_New(0);
    for (uint64_t i = count > REPORTS ? count - REPORTS : 0; i < count && list != NULL; i++) {
        const char *text = reports[i % REPORTS];
        PyObject *line = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
        if (line == NULL || PyList_Append(list, line) < 0) Py_CLEAR(list);
        Py_XDECREF(line);
    }
    return list;
}

static PyObject *server_stats(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Server *server = ((ServerObject *)self)->server;
    if (server == NULL) return PyDict_New();
    PyObject *reports = copy_reports(server);
    if (reports == NULL) return NULL;
#define COUNTER(name) (unsigned long long)atomic_load_explicit(&server->name, memory_order_relaxed)
    return Py_BuildValue("{sKsKsKsKsKsKsN}", "clients", COUNTER(clients), "accepted", COUNTER(accepted), "refused",
                         COUNTER(refused), "requests", COUNTER(requests), "keys", COUNTER(keys), "bytes",
                         COUNTER(bytes), "reasons", reports);
#undef COUNTER
}

static void server_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(server_stop_method(self, NULL));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef server_methods[] = {
    {"stop", server_stop_method, METH_NOARGS, "End the server; waits for its thread. Clients see a closed connection."},
    {"stats", server_stats, METH_NOARGS, "Counters, and the last reasons for which clients were refused."},
    {"after_fork_in_child", server_after_fork, METH_NOARGS, "Close the server's descriptors in a forked child."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot server_slots[] = {
    {Py_tp_doc, "A TCPStore server with a thread of its own that never takes the interpreter lock."},
    {Py_tp_new, server_new},
    {Py_tp_dealloc, server_dealloc},
    {Py_tp_methods, server_methods},
    {0, NULL},
};

static PyType_Spec server_spec = {"symcomm._core._native.StoreServer", sizeof(ServerObject), 0, Py_TPFLAGS_DEFAULT,
                                  server_slots};

/* --- the client's exchange --------------------------------------------------------------------------- */

typedef enum { DONE, LATE, GONE, SIGNALED, FAILED } Outcome;

/* The socket blocks, with time-outs of one second (see SLICE_NS): most answers then cost a single system call. */
typedef struct {
    int fd;
    int64_t deadline_ns;
    PyThreadState *unlocked; /* while the interpreter lock is released */
    size_t start, end;
    uint8_t bytes[4096];
} Reader;

#define SLICE_NS ((int64_t)1000000000)

static void unlock(Reader *reader) { reader->unlocked = PyEval_SaveThread(); }

static void lock(Reader *reader) {
    PyEval_RestoreThread(reader->unlocked);
    reader->unlocked = NULL;
}

static Outcome check_signals(Reader *reader) {
    lock(reader);
    int failed = PyErr_CheckSignals();
    unlock(reader);
    return failed ? SIGNALED : DONE;
}

/* Less than a slice is left: the socket's own time-out is too coarse. */
static Outcome wait_precisely(Reader *reader, short events) {
    for (;;) {
        int64_t left = reader->deadline_ns - symcomm_now_ns();
        if (left >= SLICE_NS) return DONE;
        struct timespec pause = {.tv_sec = 0, .tv_nsec = left > 0 ? left : 0};
        struct pollfd poll = {.fd = reader->fd, .events = events};
        int ready = ppoll(&poll, 1, &pause, NULL);
        if (ready > 0) return DONE;
        if (ready == 0) return LATE;
        if (errno != EINTR) return FAILED;
        Outcome outcome = check_signals(reader);
        if (outcome != DONE) return outcome;
    }
}

/* What follows a send or recv that returned -1: DONE to try again. */
static Outcome after_failure(Reader *reader) {
    switch (errno) {
    case EAGAIN: return symcomm_now_ns() >= reader->deadline_ns ? LATE : DONE;
    case EINTR: return check_signals(reader);
    case EPIPE:
    case ECONNRESET: return GONE;
    default: return FAILED;
    }
}

static Outcome send_parts(Reader *reader, struct iovec *parts, int count) {
    bool hurried = reader->deadline_ns - symcomm_now_ns() < SLICE_NS;
    while (count > 0) {
        if (hurried) {
            Outcome outcome = wait_precisely(reader, POLLOUT);
            if (outcome != DONE) return outcome;
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t sent = sendmsg(reader->fd, &message, MSG_NOSIGNAL | (hurried ? MSG_DONTWAIT : 0));
        if (sent < 0) {
            Outcome outcome = after_failure(reader);
            if (outcome != DONE) return outcome;
            hurried = reader->deadline_ns - symcomm_now_ns() < SLICE_NS;
            continue;
        }
        for (; count > 0 && (size_t)sent >= parts->iov_len; parts++, count--) sent -= (ssize_t)parts->iov_len;
        if (count > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
    return DONE;
}

/* At least one byte into `into`; `*got` says how many. */
static Outcome receive_some(Reader *reader, void *into, size_t room, size_t *got) {
    for (;;) {
        if (reader->deadline_ns - symcomm_now_ns() < SLICE_NS) {
            Outcome outcome = wait_precisely(reader, POLLIN);
            if (outcome != DONE) return outcome;
        }
        ssize_t size = recv(reader->fd, into, room, 0);
        if (size > 0) {
            *got = (size_t)size;
            return DONE;
        }
        if (size == 0) return GONE;
        Outcome outcome = after_failure(reader);
        if (outcome != DONE) return outcome;
    }
}

/* Exactly `size` bytes. Called with the interpreter lock released. */
static Outcome receive(Reader *reader, void *into, size_t size) {
    uint8_t *at = into;
    while (size > 0) {
        size_t have = reader->end - reader->start;
        if (have > 0) {
            size_t part = have < size ? have : size;
            memcpy(at, reader->bytes + reader->start, part);
            reader->start += part, at += part, size -= part;
            continue;
        }
        bool direct = size >= sizeof reader->bytes;
        size_t got = 0;
        Outcome outcome =
            direct ? receive_some(reader, at, size, &got) : receive_some(reader, reader->bytes, sizeof reader->bytes, &got);
        if (outcome != DONE) return outcome;
        if (direct) {
            at += got, size -= got;
        } else {
            reader->start = 0;
            reader->end = got;
        }
    }
    return DONE;
}

static Outcome receive_i64(Reader *reader, int64_t *value) { return receive(reader, value, sizeof *value); }

/* `size` bytes as a bytes object (lock released on entry and exit). */
static Outcome receive_object(Reader *reader, size_t size, PyObject **object) {
    lock(reader);
    *object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    char *into = *object == NULL ? NULL : PyBytes_AsString(*object);
    unlock(reader);
    return into == NULL ? SIGNALED : receive(reader, into, size);
}

static Outcome receive_value(Reader *reader, PyObject **object) {
    int64_t size;
    Outcome outcome = receive_i64(reader, &size);
    if (outcome != DONE) return outcome;
    if (size < 0) {
        errno = EPROTO;
        return FAILED;
    }
    return receive_object(reader, (size_t)size, object);
}

static Outcome receive_list(Reader *reader, int64_t count, PyObject **object) {
    lock(reader);
    *object = PyList_New(0);
    unlock(reader);
    Outcome outcome = *object == NULL ? SIGNALED : DONE;
    for (; count > 0 && outcome == DONE; count--) {
        PyObject *value = NULL;
        outcome = receive_value(reader, &value);
        lock(reader);
        if (outcome == DONE && PyList_Append(*object, value) < 0) outcome = SIGNALED;
        Py_XDECREF(value);
        unlock(reader);
    }
    return outcome;
}

/* Reads no byte more than it returns: a late answer may be followed by that to a cancelled wait. */
static Outcome receive_number(Reader *reader, size_t width, PyObject **object) {
    uint8_t bytes[8] = {0};
    size_t got = 0;
    for (size_t size = 0; size < width; size += got) {
        Outcome outcome = receive_some(reader, bytes + size, width - size, &got);
        if (outcome != DONE) return outcome;
    }
    uint32_t word;
    int64_t value;
    memcpy(&word, bytes, sizeof word);
    memcpy(&value, bytes, sizeof value);
    lock(reader);
    *object = PyLong_FromLongLong(width == 1 ? bytes[0] : width == 4 ? (int64_t)word : value);
    unlock(reader);
    return *object == NULL ? SIGNALED : DONE;
}

/* Nothing comes back: a look at the socket tells at least whether the server has left. */
static Outcome expect_nothing(Reader *reader) {
    uint8_t byte;
    ssize_t size = recv(reader->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (size == 0) return GONE;
    if (size < 0 && errno != EAGAIN && errno != EINTR) return errno == ECONNRESET ? GONE : FAILED;
    return DONE;
}

static Outcome exchange(Reader *reader, struct iovec parts[2], int shape, Py_ssize_t count, PyObject **object) {
    int64_t number;
    Outcome outcome = shape == '-' ? expect_nothing(reader) : DONE;
    if (outcome == DONE) outcome = send_parts(reader, parts, parts[1].iov_len > 0 ? 2 : 1);
    if (outcome != DONE) return outcome;
    switch (shape) {
    case '1': return receive_number(reader, 1, object);
    case '4': return receive_number(reader, 4, object);
    case '8': return receive_number(reader, 8, object);
    case 'r': return receive_object(reader, (size_t)count, object);
    case 'v': return receive_value(reader, object);
    case 'm': return receive_list(reader, count, object);
    case 'l':
        outcome = receive_i64(reader, &number);
        return outcome == DONE ? receive_list(reader, number, object) : outcome;
    case 'q':
        outcome = receive_i64(reader, &number);
        return outcome == DONE && number > 0 ? receive_value(reader, object) : outcome;
    default: return DONE;
    }
}

/* store_exchange(fd, head, tail, shape, count, seconds): sends head and tail, returns the answer.
 * shape: '-' none, '1' '4' '8' a number of so many bytes, 'r' count raw bytes, 'v' a value, 'm' count values,
 * 'l' a counted list of values, 'q' a queue's item or None. TimeoutError, ConnectionError and OSError tell what
 * went wrong; after any of them only a one-byte answer that was late can still be waited for. */
static PyObject *store_exchange(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    char *head, *tail;
    Py_ssize_t head_size, tail_size;
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "store_exchange takes 6 arguments, got %zd", nargs);
    if (PyBytes_AsStringAndSize(args[1], &head, &head_size) < 0) return NULL;
    if (PyBytes_AsStringAndSize(args[2], &tail, &tail_size) < 0) return NULL;
    Reader reader;
    reader.fd = (int)PyLong_AsLong(args[0]);
    reader.start = reader.end = 0;
    int shape = (int)PyUnicode_ReadChar(args[3], 0);
    Py_ssize_t count = PyLong_AsSsize_t(args[4]);
    double seconds = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    reader.deadline_ns = symcomm_now_ns() + (int64_t)(seconds * 1e9);
    struct iovec parts[2] = {{head, (size_t)head_size}, {tail, (size_t)tail_size}};
    PyObject *object = NULL;
    unlock(&reader);
    Outcome outcome = exchange(&reader, parts, shape, count, &object);
    int error = errno;
    lock(&reader);
    if (outcome == DONE) return object != NULL ? object : Py_NewRef(Py_None);
    Py_XDECREF(object);
    errno = error;
    switch (outcome) {
    case LATE: PyErr_SetString(PyExc_TimeoutError, "the answer did not come in time"); break;
    case GONE: PyErr_SetString(PyExc_ConnectionError, "the connection was closed"); break;
    case FAILED: PyErr_SetFromErrno(PyExc_OSError); break;
    default: break; /* SIGNALED: the exception is set */
    }
    return NULL;
}

static PyObject *store_hmac(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *key, *message;
    Py_ssize_t key_size, message_size;
    uint8_t digest[SHA256_SIZE];
    if (!PyArg_ParseTuple(args, "y#y#", &key, &key_size, &message, &message_size)) return NULL;
    hmac_sha256(key, (size_t)key_size, message, (size_t)message_size, digest);
    return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

static PyMethodDef functions[] = {
    {"store_exchange", (PyCFunction)(void (*)(void))store_exchange, METH_FASTCALL,
     "store_exchange(fd, head, tail, shape, count, seconds): one call of a store client."},
    {"store_hmac", store_hmac, METH_VARARGS, "store_hmac(key, message): HMAC-SHA-256, as the server signs."},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_store_server(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    PyObject *type = PyType_FromSpec(&server_spec);
    if (type == NULL) return -1;
    if (PyModule_AddObjectRef(module, "StoreServer", type) < 0) {
        Py_DECREF(type);
        return -1;
    }
    Py_DECREF(type);
    return 0;
}
