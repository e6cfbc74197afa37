/* A board: one writer publishes versions, and readers take the newest at any time.
 *
 * `head` names the newest: its number, and the part that holds it in the last PART_BITS. A reader sets its bit in that
 * part's holders, then checks that the part still holds that version. The writer marks a part free only while it has no
 * holders; mark and bits are in one word. */
#include "module/module.h"
#include "sharing/region.h"

#define PART_BITS 10
_Static_assert(REGION_PARTS == 1 << PART_BITS, "a part's number fits");

/* board_publish(address, part, offset, bytes) -> the version's number. The part was free, and is filled now. */
static PyObject *board_publish(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, offset, nbytes;
    int part;
    if (!PyArg_ParseTuple(args, "KiKK", &address, &part, &offset, &nbytes)) return NULL;
    struct region *r = region_at(address);
    struct part *p = &r->parts[part];
    uint64_t number = (atomic_load(&r->head) >> PART_BITS) + 1;
    atomic_store(&p->offset, offset);
    atomic_store(&p->nbytes, nbytes);
    atomic_store(&p->number, number);
    atomic_fetch_and(&p->holders, ~PART_IS_FREE);
    atomic_store(&r->head, number << PART_BITS | (uint64_t)part);
    bell_ring(&r->news);
    return PyLong_FromUnsignedLongLong(number);
}

static PyObject *board_newest(PyObject *Py_UNUSED(self), PyObject *address) {
    struct region *r = PyLong_AsVoidPtr(address);
    return r ? PyLong_FromUnsignedLongLong(atomic_load(&r->head) >> PART_BITS) : NULL;
}

/* board_take(address, reader) -> (number, part, offset, bytes), or None before the first version. The reader holds the
 * part until it releases it. */
static PyObject *board_take(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    int reader;
    if (!PyArg_ParseTuple(args, "Ki", &address, &reader)) return NULL;
    struct region *r = region_at(address);
    const uint64_t bit = (uint64_t)1 << reader;
    for (uint64_t head; (head = atomic_load(&r->head)) != 0;) {
        int part = (int)(head & (REGION_PARTS - 1));
        struct part *p = &r->parts[part];
        uint64_t before = atomic_fetch_or(&p->holders, bit);
        if (!(before & PART_IS_FREE) && atomic_load(&p->number) == head >> PART_BITS)
            return Py_BuildValue("KiKK", (unsigned long long)(head >> PART_BITS), part,
                                 (unsigned long long)atomic_load(&p->offset),
                                 (unsigned long long)atomic_load(&p->nbytes));
        if (!(before & bit)) region_let_go(r, part, bit); /* too late: a newer one is there */
    }
    Py_RETURN_NONE;
}

static bool is_newer(const struct region_wait *w) { return atomic_load(&w->region->head) >> PART_BITS != w->a; }

static int find_gone_writer(const struct region_wait *w, int *culprit) {
    *culprit = -1;
    return region_writer_gone(w->region);
}

/* board_await(address, number, timeout_ns) -> status: waits until the newest version is another one. */
static PyObject *board_await(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, number;
    long long timeout;
    int culprit;
    if (!PyArg_ParseTuple(args, "KKL", &address, &number, &timeout)) return NULL;
    struct region *r = region_at(address);
    struct region_wait w = {
        .region = r, .is_over = is_newer, .find_gone = find_gone_writer, .bell = &r->news, .a = number};
    int status = region_wait(&w, timeout, &culprit);
    if (status == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    METHOD(board_publish, METH_VARARGS, "(address, part, offset, bytes) -> the version's number"),
    METHOD(board_newest, METH_O, "(address) -> the newest version's number, or 0"),
    METHOD(board_take, METH_VARARGS, "(address, reader) -> (number, part, offset, bytes), or None"),
    METHOD(board_await, METH_VARARGS, "(address, number, timeout_ns) -> status"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_board(PyObject *module) { return symcomm_add_part(module, methods, NULL); }
