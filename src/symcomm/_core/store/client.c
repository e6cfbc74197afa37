/* The client's end of the store: one function builds a call's frame, sends it and waits for the answer. */
#include "module/module.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define KEY_PREFIX '/' /* before every key of a user; keys without it are the store's own */

/* --- building a frame --------------------------------------------------------------------------------- */

#define COPY_LIMIT (16 << 10) /* a larger last value is sent from where it is */

struct frame {
    uint8_t *bytes; /* `small`, or memory of its own */
    size_t size, room;
    struct iovec last; /* follows `bytes`, not copied */
    uint8_t small[1024];
};

static void frame_free(struct frame *frame) {
    if (frame->bytes != frame->small) free(frame->bytes);
}

static uint8_t *frame_extend(struct frame *frame, size_t size) {
    if (size > frame->room - frame->size) {
        size_t room = frame->room * 2 > frame->size + size ? frame->room * 2 : frame->size + size;
        uint8_t *bytes = frame->bytes == frame->small ? malloc(room) : realloc(frame->bytes, room);
        if (bytes == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        if (frame->bytes == frame->small) memcpy(bytes, frame->small, frame->size);
        frame->bytes = bytes;
        frame->room = room;
    }
    frame->size += size;
    return frame->bytes + frame->size - size;
}

static bool frame_put_u64(struct frame *frame, uint64_t value) {
    uint8_t *at = frame_extend(frame, sizeof value);
    if (at != NULL) memcpy(at, &value, sizeof value);
    return at != NULL;
}

/* The bytes of a str (as UTF-8) or bytes object; they live as long as the object. */
static const char *bytes_of(PyObject *object, Py_ssize_t *size) {
    char *bytes = NULL;
    if (PyUnicode_Check(object)) return PyUnicode_AsUTF8AndSize(object, size);
    if (PyBytes_AsStringAndSize(object, &bytes, size) < 0) return NULL;
    return bytes;
}

/* Keys are text; bytes may be a key if they are UTF-8. */
static bool frame_put_key(struct frame *frame, PyObject *key) {
    Py_ssize_t size;
    const char *bytes = bytes_of(key, &size);
    if (bytes != NULL && PyBytes_Check(key)) {
        PyObject *text = PyUnicode_DecodeUTF8(bytes, size, NULL);
        if (text == NULL) return false;
        Py_DECREF(text);
    }
    if (bytes == NULL || !frame_put_u64(frame, (uint64_t)size + 1)) return false;
    uint8_t *at = frame_extend(frame, (size_t)size + 1);
    if (at == NULL) return false;
    *at = KEY_PREFIX;
    memcpy(at + 1, bytes, (size_t)size);
    return true;
}

static PyObject *no_keys; /* for calls without keys; not None, which a user may pass by mistake */

/* No keys, one key, or a counted list of keys. */
static bool frame_put_keys(struct frame *frame, PyObject *keys) {
    if (keys == no_keys) return true;
    if (!PyList_Check(keys)) return frame_put_key(frame, keys);
    Py_ssize_t count = PyList_Size(keys);
    if (!frame_put_u64(frame, (uint64_t)count)) return false;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!frame_put_key(frame, PyList_GetItem(keys, i))) return false;
    return true;
}

/* None, a 64-bit int, a value (length and bytes), or a tuple of these. */
static bool frame_put_body(struct frame *frame, PyObject *body) {
    if (body == Py_None) return true;
    if (PyLong_Check(body)) {
        long long value = PyLong_AsLongLong(body);
        if (value == -1 && PyErr_Occurred()) return false;
        return frame_put_u64(frame, (uint64_t)value);
    }
    if (PyTuple_Check(body)) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(body); i++) {
            PyObject *part = PyTuple_GetItem(body, i);
            if (PyTuple_Check(part)) return PyErr_Format(PyExc_TypeError, "store_call: a tuple in a tuple"), false;
            if (!frame_put_body(frame, part)) return false;
        }
        return true;
    }
    Py_ssize_t size;
    const char *bytes = bytes_of(body, &size);
    if (bytes == NULL || !frame_put_u64(frame, (uint64_t)size)) return false;
    uint8_t *at = frame_extend(frame, (size_t)size);
    if (at != NULL) memcpy(at, bytes, (size_t)size);
    return at != NULL;
}

/* A large value at the very end is not copied. */
static bool frame_put_last(struct frame *frame, PyObject *body) {
    if (!PyBytes_Check(body) || PyBytes_Size(body) < COPY_LIMIT) return frame_put_body(frame, body);
    frame->last = (struct iovec){PyBytes_AsString(body), (size_t)PyBytes_Size(body)};
    return frame_put_u64(frame, frame->last.iov_len);
}

/* --- the exchange -------------------------------------------------------------------------------------- */

enum outcome { DONE, LATE, GONE, SIGNALED, FAILED };

/* The socket blocks, with time-outs of SOCKET_TIMEOUT_NS, so that most answers cost a single system call. */
struct reader {
    int fd;
    int64_t deadline_ns;
    PyThreadState *unlocked; /* while the interpreter lock is released */
    size_t start, end;
    uint8_t bytes[4096];
};

#define SOCKET_TIMEOUT_NS ((int64_t)1000000000)

static void unlock(struct reader *reader) { reader->unlocked = PyEval_SaveThread(); }

static void lock(struct reader *reader) {
    PyEval_RestoreThread(reader->unlocked);
    reader->unlocked = NULL;
}

static enum outcome check_signals(struct reader *reader) {
    lock(reader);
    int failed = PyErr_CheckSignals();
    unlock(reader);
    return failed ? SIGNALED : DONE;
}

/* For when less than a slice is left: the socket's own time-out is too coarse. */
static enum outcome wait_precisely(struct reader *reader, short events) {
    for (;;) {
        int64_t left = reader->deadline_ns - symcomm_now_ns();
        if (left >= SOCKET_TIMEOUT_NS) return DONE;
        struct timespec pause = {.tv_sec = 0, .tv_nsec = left > 0 ? left : 0};
        struct pollfd poll = {.fd = reader->fd, .events = events};
        int ready = ppoll(&poll, 1, &pause, NULL);
        if (ready > 0) return DONE;
        if (ready == 0) return LATE;
        if (errno != EINTR) return FAILED;
        enum outcome outcome = check_signals(reader);
        if (outcome != DONE) return outcome;
    }
}

/* Called after a send or recv that returned -1. DONE: try again. */
static enum outcome after_failure(struct reader *reader) {
    switch (errno) {
    case EAGAIN: return symcomm_now_ns() >= reader->deadline_ns ? LATE : DONE;
    case EINTR: return check_signals(reader);
    case EPIPE:
    case ECONNRESET:
    case ETIMEDOUT: /* the host does not answer any more; our own deadline is LATE */
    case EHOSTUNREACH:
    case ENETUNREACH: return GONE;
    default: return FAILED;
    }
}

static enum outcome send_parts(struct reader *reader, struct iovec *parts, int count) {
    bool hurried = reader->deadline_ns - symcomm_now_ns() < SOCKET_TIMEOUT_NS;
    while (count > 0) {
        if (hurried) {
            enum outcome outcome = wait_precisely(reader, POLLOUT);
            if (outcome != DONE) return outcome;
        }
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t sent = sendmsg(reader->fd, &message, MSG_NOSIGNAL | (hurried ? MSG_DONTWAIT : 0));
        if (sent < 0) {
            enum outcome outcome = after_failure(reader);
            if (outcome != DONE) return outcome;
            hurried = reader->deadline_ns - symcomm_now_ns() < SOCKET_TIMEOUT_NS;
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
static enum outcome receive_some(struct reader *reader, void *into, size_t room, size_t *got) {
    for (;;) {
        if (reader->deadline_ns - symcomm_now_ns() < SOCKET_TIMEOUT_NS) {
            enum outcome outcome = wait_precisely(reader, POLLIN);
            if (outcome != DONE) return outcome;
        }
        ssize_t size = recv(reader->fd, into, room, 0);
        if (size > 0) {
            *got = (size_t)size;
            return DONE;
        }
        if (size == 0) return GONE;
        enum outcome outcome = after_failure(reader);
        if (outcome != DONE) return outcome;
    }
}

/* Exactly `size` bytes. Called with the interpreter lock released. */
static enum outcome receive(struct reader *reader, void *into, size_t size) {
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
        enum outcome outcome = direct ? receive_some(reader, at, size, &got)
                                      : receive_some(reader, reader->bytes, sizeof reader->bytes, &got);
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

static enum outcome receive_i64(struct reader *reader, int64_t *value) { return receive(reader, value, sizeof *value); }

static enum outcome out_of_memory(void) {
    errno = ENOMEM;
    return FAILED;
}

/* `size` bytes as a bytes object, of which `have` have been received into `start`. */
static enum outcome receive_rest(struct reader *reader, size_t size, const uint8_t *start, size_t have,
                                 PyObject **object) {
    lock(reader);
    *object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    char *into = *object == NULL ? NULL : PyBytes_AsString(*object);
    PyErr_Clear();
    unlock(reader);
    if (into == NULL) return out_of_memory();
    if (have > 0) memcpy(into, start, have);
    return receive(reader, into + have, size - have);
}

#define TRUSTED ((size_t)1 << 20) /* bytes that are allocated because they were announced */

/* Receives an object, with the lock released on entry and exit. The server may lie about the size, so the first half of
 * a large object goes into memory that grows as bytes come. Only then is memory for all of it allocated. */
static enum outcome receive_object(struct reader *reader, size_t size, PyObject **object) {
    if (size <= TRUSTED) return receive_rest(reader, size, NULL, 0, object);
    uint8_t *start = NULL;
    size_t have = 0, half = size / 2;
    enum outcome outcome = DONE;
    while (outcome == DONE && have < half) {
        size_t room = have == 0 ? TRUSTED / 2 : have * 2;
        if (room > half) room = half;
        uint8_t *larger = realloc(start, room);
        if (larger == NULL) {
            outcome = out_of_memory();
            break;
        }
        start = larger;
        outcome = receive(reader, start + have, room - have);
        have = room;
    }
    if (outcome == DONE) outcome = receive_rest(reader, size, start, have, object);
    free(start);
    return outcome;
}

static enum outcome receive_value(struct reader *reader, PyObject **object) {
    int64_t size;
    enum outcome outcome = receive_i64(reader, &size);
    if (outcome != DONE) return outcome;
    if (size < 0) {
        errno = EPROTO;
        return FAILED;
    }
    return receive_object(reader, (size_t)size, object);
}

static enum outcome receive_list(struct reader *reader, int64_t count, PyObject **object) {
    if (count < 0) {
        errno = EPROTO;
        return FAILED;
    }
    lock(reader);
    *object = PyList_New(0);
    unlock(reader);
    enum outcome outcome = *object == NULL ? SIGNALED : DONE;
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

/* Reads no byte more than it returns: the answer to a cancelled wait may follow a late answer. */
static enum outcome receive_number(struct reader *reader, size_t width, PyObject **object) {
    uint8_t bytes[8] = {0};
    size_t got = 0;
    for (size_t size = 0; size < width; size += got) {
        enum outcome outcome = receive_some(reader, bytes + size, width - size, &got);
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

/* For calls without an answer: looks at the socket, to see at least whether the server has left. */
static enum outcome expect_nothing(struct reader *reader) {
    uint8_t byte;
    ssize_t size = recv(reader->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (size == 0) return GONE;
    if (size < 0 && errno != EAGAIN && errno != EINTR) return errno == ECONNRESET ? GONE : FAILED;
    return DONE;
}

static enum outcome exchange(struct reader *reader, struct iovec parts[2], int shape, Py_ssize_t count,
                             PyObject **object) {
    int64_t number;
    enum outcome outcome = shape == '-' ? expect_nothing(reader) : DONE;
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

/* Exceptions of our own, so that a signal handler's exception is never mistaken for one of them. */
static PyObject *late_error, *gone_error, *broken_error;

/* Sends the frame and returns the answer, or NULL with one of the above set. After that the connection is only good for
 * waiting for a late one-byte answer. */
static PyObject *exchange_frame(PyObject *fd, struct frame *frame, PyObject *shape, Py_ssize_t count,
                                PyObject *seconds) {
    struct reader reader;
    reader.fd = (int)PyLong_AsLong(fd);
    reader.start = reader.end = 0;
    int letter = (int)PyUnicode_ReadChar(shape, 0);
    double wait = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred()) return NULL;
    reader.deadline_ns = symcomm_now_ns() + (int64_t)(wait * 1e9);
    struct iovec parts[2] = {{frame->bytes, frame->size}, frame->last};
    PyObject *object = NULL;
    unlock(&reader);
    enum outcome outcome = exchange(&reader, parts, letter, count, &object);
    int error = errno;
    lock(&reader);
    if (outcome == DONE) return object != NULL ? object : Py_NewRef(Py_None);
    Py_XDECREF(object);
    errno = error;
    switch (outcome) {
    case LATE: PyErr_SetString(late_error, "the answer did not come in time"); break;
    case GONE: PyErr_SetString(gone_error, "the connection was closed"); break;
    case FAILED: PyErr_SetFromErrno(broken_error); break;
    default: break; /* SIGNALED: the exception is set */
    }
    return NULL;
}

static void frame_begin(struct frame *frame) {
    frame->bytes = frame->small;
    frame->room = sizeof frame->small;
    frame->size = 0;
    frame->last = (struct iovec){NULL, 0};
}

/* shape: '-' none, '1' '4' '8' a number of so many bytes, 'r' raw bytes, 'v' a value, 'm' values, one for each key,
 * 'l' a counted list of values, 'q' a queue's item or None. */
static PyObject *store_call(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "store_call takes 6 arguments, got %zd", nargs);
    struct frame frame;
    frame_begin(&frame);
    PyObject *answer = NULL;
    long command = PyLong_AsLong(args[1]);
    uint8_t *first = frame_extend(&frame, 1);
    *first = (uint8_t)command;
    Py_ssize_t count = PyList_Check(args[2]) ? PyList_Size(args[2]) : 0;
    if (!(command == -1 && PyErr_Occurred()) && frame_put_keys(&frame, args[2]) && frame_put_last(&frame, args[3]))
        answer = exchange_frame(args[0], &frame, args[4], count, args[5]);
    frame_free(&frame);
    return answer;
}

static PyObject *store_exchange(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "store_exchange takes 5 arguments, got %zd", nargs);
    struct frame frame;
    frame_begin(&frame);
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(args[1], &bytes, &size) < 0) return NULL;
    uint8_t *at = frame_extend(&frame, (size_t)size);
    if (at == NULL) return NULL;
    memcpy(at, bytes, (size_t)size);
    Py_ssize_t count = PyLong_AsSsize_t(args[3]);
    PyObject *answer = PyErr_Occurred() ? NULL : exchange_frame(args[0], &frame, args[2], count, args[4]);
    frame_free(&frame);
    return answer;
}

static PyMethodDef functions[] = {
    METHOD(store_call, METH_FASTCALL,
           "(fd, command, keys, body, shape, seconds): one call of a store's client, and its answer."),
    METHOD(store_exchange, METH_FASTCALL,
           "(fd, frame, shape, count, seconds): the same for bytes that are a frame already."),
    {NULL, NULL, 0, NULL},
};

int store_add_client(PyObject *module) {
    no_keys = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    late_error = PyErr_NewException("symcomm._core._native.StoreLate", PyExc_TimeoutError, NULL);
    gone_error = PyErr_NewException("symcomm._core._native.StoreGone", PyExc_ConnectionError, NULL);
    broken_error = PyErr_NewException("symcomm._core._native.StoreBroken", PyExc_OSError, NULL);
    if (PyModule_AddObjectRef(module, "STORE_NO_KEYS", no_keys) < 0) return -1;
    if (PyModule_AddObjectRef(module, "StoreLate", late_error) < 0) return -1;
    if (PyModule_AddObjectRef(module, "StoreGone", gone_error) < 0) return -1;
    if (PyModule_AddObjectRef(module, "StoreBroken", broken_error) < 0) return -1;
    return PyModule_AddFunctions(module, functions);
}
