/* The records that ranks of a group publish for each other, and the word by which survivors agree. */
#include "group/group_module.h"
#include "memory/shared_bytes.h"

enum record_kind { RECORD_CALL, RECORD_VOTE };

/* A rank's record: where its words lie, and how long they may be. */
struct place {
    struct record *record;
    char *text;
    uint32_t room;
};

static struct place record_of(struct control *c, int kind) {
    if (kind == RECORD_VOTE) return (struct place){&c->vote, c->vote_text[0], VOTE_BYTES};
    return (struct place){&c->call, c->call_text[0], CALL_BYTES};
}

/* Refuses words that are too long: half a record would be worse than none. */
static PyObject *publish(PyObject *self, PyObject *args) {
    struct group *g = group_of(self);
    int kind;
    const char *text;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "iy#", &kind, &text, &n)) return NULL;
    struct visit visit;
    if (!visit_begin(&visit, g)) Py_RETURN_NONE;
    struct place mine = record_of(block_of(&visit, g->rank), kind);
    if (n > (Py_ssize_t)mine.room) {
        visit_end(&visit);
        return PyErr_Format(PyExc_ValueError, "a record has %u bytes at most, not %zd", mine.room, n);
    }
    uint32_t next = atomic_load(&mine.record->version) + 1;
    atomic_thread_fence(memory_order_seq_cst);
    shared_store(mine.text + next % 2 * mine.room, text, (size_t)n);
    atomic_store(&mine.record->length[next % 2], (uint32_t)n);
    atomic_store(&mine.record->version, next);
    visit_end(&visit);
    Py_RETURN_NONE;
}

/* A rank's record as it was at one moment, or None. Its next words go to the other place, so these stay intact until
 * the version has changed. */
static PyObject *read_record(struct place from) {
    char copy[VOTE_BYTES];
    for (int tries = 0; tries < 1000; tries++) {
        uint32_t version = atomic_load(&from.record->version);
        uint32_t n = atomic_load(&from.record->length[version % 2]);
        if (version == 0 || n > from.room) break;
        shared_load(copy, from.text + version % 2 * from.room, n);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load(&from.record->version) == version) return PyBytes_FromStringAndSize(copy, (Py_ssize_t)n);
    }
    return Py_NewRef(Py_None);
}

static PyObject *records(PyObject *self, PyObject *args) {
    struct group *g = group_of(self);
    int kind;
    if (!PyArg_ParseTuple(args, "i", &kind)) return NULL;
    PyObject *list = PyList_New(0);
    struct visit visit;
    visit_begin(&visit, g); /* a group that was left has no records */
    for (int r = 0; list && r < g->world; r++) append_new(&list, read_record(record_of(block_of(&visit, r), kind)));
    visit_end(&visit);
    return list;
}

/* The word lies in rank 0's block, which stays mapped when that rank is gone. */
static PyObject *agree(PyObject *self, PyObject *args) {
    struct group *g = group_of(self);
    unsigned long long before, after;
    if (!PyArg_ParseTuple(args, "KK", &before, &after)) return NULL;
    uint64_t found = before;
    struct visit visit;
    if (!visit_begin(&visit, g)) return PyErr_Format(PyExc_RuntimeError, "the group was left meanwhile");
    atomic_compare_exchange_strong(&block_of(&visit, 0)->agreed, &found, (uint64_t)after);
    visit_end(&visit);
    return PyLong_FromUnsignedLongLong(found);
}

PyMethodDef group_records_methods[] = {
    METHOD(publish, METH_VARARGS, "(kind, text): show the others a record of this rank."),
    METHOD(records, METH_VARARGS, "(kind) -> what each rank has published, or None"),
    METHOD(agree, METH_VARARGS,
           "(before, after) -> the word that all ranks share, as it was; it becomes `after` if it was `before`"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(CALL_BYTES),
    CONSTANT(RECORD_CALL),
    CONSTANT(RECORD_VOTE),
    {NULL, 0},
};

int symcomm_add_records(PyObject *module) { return symcomm_add_part(module, NULL, constants); }
