#include "sharing/queue.h"

#include <stddef.h>

#include "module/gil.h"
#include "module/module.h"

static struct slot *slot_of(struct region *r, uint64_t number) {
    return (struct slot *)(void *)r->slots + number % QUEUE_SLOTS;
}

void queue_forget(struct region *r, uint64_t bits) {
    if (r->kind != QUEUE) return;
    for (uint64_t i = 0; i < QUEUE_SLOTS; i++) atomic_fetch_and(&slot_of(r, i)->unread, ~bits);
}

/* --- the writer --------------------------------------------------------------------------------------------------- */

/* Readers are sent what comes from here on. */
static void take_in(struct region *r) {
    uint64_t ready = atomic_load(&r->ready) & ~atomic_load(&r->left);
    for (uint64_t some = ready; some; some &= some - 1)
        atomic_store(&r->readers[__builtin_ctzll(some)].next, atomic_load(&r->head));
    if (ready == 0) return;
    atomic_fetch_or(&r->active, ready);
    atomic_fetch_and(&r->ready, ~ready);
}

static bool has_room(const struct region_wait *w) {
    struct region *r = w->region;
    if (atomic_load_explicit(&r->ready, memory_order_relaxed)) take_in(r);
    uint64_t unread = atomic_load_explicit(&slot_of(r, atomic_load(&r->head))->unread, memory_order_acquire);
    return unread == 0 && __builtin_popcountll(atomic_load(&r->active)) >= (int)w->a;
}

struct message {
    const char *bytes; /* goes into the slot */
    Py_ssize_t length;
    int part; /* or -1 */
    unsigned long long offset, nbytes;
};

static void send(struct region *r, const struct message *m) {
    uint64_t number = atomic_load(&r->head), readers = atomic_load(&r->active);
    struct slot *s = slot_of(r, number);
    if (m->part >= 0) {
        struct part *p = &r->parts[m->part];
        atomic_store(&p->offset, m->offset);
        atomic_store(&p->nbytes, m->nbytes);
        atomic_store(&p->number, number);
        atomic_store(&p->holders, readers);
    }
    s->part = m->part;
    s->nbytes = (uint32_t)m->length;
    memcpy(s->data, m->bytes, (size_t)m->length);
    atomic_store_explicit(&s->unread, readers, memory_order_relaxed);
    atomic_store_explicit(&r->head, number + 1, memory_order_release);
    bell_ring(&r->news);
}

/* queue_put(address, message, part or -1, offset, bytes, least readers, timeout_ns) -> status. Without readers (`least`
 * is 0) the message is lost, and its part is free. */
static PyObject *queue_put(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    long long timeout;
    struct message m;
    int least, culprit;
    if (!PyArg_ParseTuple(args, "Ky#iKKiL", &address, &m.bytes, &m.length, &m.part, &m.offset, &m.nbytes, &least,
                          &timeout))
        return NULL;
    if (m.length > (Py_ssize_t)sizeof((struct slot *)0)->data)
        return PyErr_Format(PyExc_ValueError, "longer than a slot");
    struct region *r = region_at(address);
    struct region_wait w = {
        .region = r, .is_over = has_room, .find_gone = region_reader_gone, .bell = &r->room, .a = (uint64_t)least};
    int status = region_find_gone(r) >= 0 ? STATUS_LEFT : region_wait(&w, timeout, &culprit);
    if (status == STATUS_OK) send(r, &m);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return PyLong_FromLong(status);
}

/* --- a reader ----------------------------------------------------------------------------------------------------- */

static bool has_news(const struct region_wait *w) {
    struct region *r = w->region;
    if (!(atomic_load_explicit(&r->active, memory_order_acquire) >> w->a & 1)) return false;
    return atomic_load_explicit(&r->readers[w->a].next, memory_order_relaxed) !=
           atomic_load_explicit(&r->head, memory_order_acquire);
}

static int find_gone_writer(const struct region_wait *w, int *culprit) {
    *culprit = -1;
    return region_writer_gone(w->region);
}

static bool has_news_or_rung(const struct region_wait *w) {
    return has_news(w) || atomic_load(&w->region->news.word) != (uint32_t)w->b;
}

/* queue_await(address, reader, seen, timeout_ns) -> status: waits until there is a message to take, or the bell no
 * longer shows `seen`, because this reader was closed. */
static PyObject *queue_await(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, seen;
    int reader, culprit;
    long long timeout;
    if (!PyArg_ParseTuple(args, "KiKL", &address, &reader, &seen, &timeout)) return NULL;
    struct region *r = region_at(address);
    struct region_wait w = {.region = r,
                            .is_over = has_news_or_rung,
                            .find_gone = find_gone_writer,
                            .bell = &r->news,
                            .a = (uint64_t)reader,
                            .b = seen};
    int status = region_wait(&w, timeout, &culprit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return PyLong_FromLong(status);
}

/* queue_take(address, reader, timeout_ns) -> status, or (bytes, part or -1, offset, bytes of the part). The reader
 * holds the part until it releases it. */
static PyObject *queue_take(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int reader, culprit;
    long long timeout;
    if (!PyArg_ParseTuple(args, "KiL", &address, &reader, &timeout)) return NULL;
    struct region *r = region_at(address);
    struct region_wait w = {
        .region = r, .is_over = has_news, .find_gone = find_gone_writer, .bell = &r->news, .a = (uint64_t)reader};
    int status = region_wait(&w, timeout, &culprit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    if (status) return PyLong_FromLong(status);
    uint64_t number = atomic_load(&r->readers[reader].next), bit = (uint64_t)1 << reader;
    struct slot *s = slot_of(r, number);
    struct part *p = s->part >= 0 ? &r->parts[s->part] : NULL;
    PyObject *found = Py_BuildValue("y#iKK", s->data, (Py_ssize_t)s->nbytes, s->part,
                                    p ? (unsigned long long)atomic_load(&p->offset) : 0ULL,
                                    p ? (unsigned long long)atomic_load(&p->nbytes) : 0ULL);
    if (found == NULL) return NULL;
    atomic_store(&r->readers[reader].next, number + 1);
    if ((atomic_fetch_and(&s->unread, ~bit) & ~bit) == 0) bell_ring(&r->room);
    return found;
}

static PyMethodDef methods[] = {
    METHOD(queue_put, METH_VARARGS, "(address, message, part, offset, bytes, least readers, timeout_ns) -> status"),
    METHOD(queue_await, METH_VARARGS, "(address, reader, what the bell showed, timeout_ns) -> status"),
    METHOD(queue_take, METH_VARARGS, "(address, reader, timeout_ns) -> (bytes, part, offset, bytes), or a status"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    {"QUEUE_BYTES", sizeof(struct slot) * QUEUE_SLOTS},
    {"QUEUE_INLINE_BYTES", sizeof((struct slot *)0)->data},
    {NULL, 0},
};

int symcomm_add_queue(PyObject *module) { return symcomm_add_part(module, methods, constants); }
