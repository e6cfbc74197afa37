/* The Python type native.Group. Its methods are in GROUP_METHODS: tables, each in the file of its subject. */
#include "group/group_module.h"

#include "exec/async.h"
#include "exec/dispatch_cache.h"
#include "memory/isolate.h"
#include "sync/fail.h"

#define MOST_METHODS 40

PyTypeObject *group_type;

/* --- making and dropping ------------------------------------------------------------------------------------------ */

static bool fill(PyObject *tuple, int world, char **into) {
    if (to_addresses(tuple, into) == world) return true;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one address per rank");
    return false;
}

static PyObject *wrap(PyTypeObject *type, struct group *g) {
    PyObject *self = g ? ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0) : PyErr_NoMemory();
    if (self == NULL) return NULL;
    ((struct group_object *)self)->group = g;
    return g->object = self;
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"rank",        "world",   "controls", "stages",     "stage_bytes",  "arenas",
                            "arena_bytes", "lives",   "channels", "flight",     "flight_group", "own_process",
                            "spin",        "poll_ns", "yield_ns", "operations", "timeout_ns",   NULL};
    char *controls[MAX_BUFFERS], *stages[MAX_BUFFERS], *arenas[MAX_BUFFERS], *lives[MAX_BUFFERS],
        *channels[MAX_BUFFERS];
    PyObject *of_controls, *of_stages, *of_arenas, *of_lives, *of_channels;
    long long stage_bytes, arena_bytes, poll_ns, yield_ns, timeout;
    unsigned long long flight, operations;
    struct group_parts p = {
        .controls = controls, .stages = stages, .arenas = arenas, .lives = lives, .channels = channels};
    int own_process;
#define TUPLE &PyTuple_Type
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$iiO!O!LO!LO!O!KIpiLLKL", names, &p.rank, &p.world, TUPLE,
                                     &of_controls, TUPLE, &of_stages, &stage_bytes, TUPLE, &of_arenas, &arena_bytes,
                                     TUPLE, &of_lives, TUPLE, &of_channels, &flight, &p.flight_group, &own_process,
                                     &p.spin, &poll_ns, &yield_ns, &operations, &timeout))
        return NULL;
    if (p.world < 1 || p.world > MAX_BUFFERS || p.rank < 0 || p.rank >= p.world)
        return PyErr_Format(PyExc_ValueError, "rank %d of %d: a group has 1 to %d ranks", p.rank, p.world, MAX_BUFFERS);
    if (!fill(of_controls, p.world, controls) || !fill(of_stages, p.world, stages) ||
        !fill(of_arenas, p.world, arenas) || !fill(of_lives, p.world, lives) || !fill(of_channels, p.world, channels))
        return NULL;
    p.stage_bytes = stage_bytes, p.arena_bytes = arena_bytes, p.own_process = own_process;
    p.poll_ns = poll_ns, p.yield_ns = yield_ns, p.timeout = timeout, p.operations = operations;
    p.flight = (struct flight *)(uintptr_t)flight;
    return wrap(type, group_make(&p));
}

/* Called when nothing refers to the group any more. Ends operations that still run, since they could wait for ever. */
static void drop(struct group *g) {
    Py_BEGIN_ALLOW_THREADS;
    group_stop(g);
    Py_END_ALLOW_THREADS;
    dispatch_cache_drop(g);
    PyObject *kept = g->kept;
    group_free(g);
    Py_XDECREF(kept); /* last: it keeps the memory mapped that the calls above use */
}

static void drop_at_end(void *group) {
    PyGILState_STATE state = PyGILState_Ensure();
    drop(group);
    PyGILState_Release(state);
}

static void group_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct group *g = group_of(self);
    if (g && async_inside(g)) async_at_end(g, drop_at_end, g); /* its own thread dropped the last reference */
    else if (g) drop(g);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *keep(PyObject *self, PyObject *object) {
    struct group *g = group_of(self);
    PyObject *before = g->kept;
    g->kept = Py_NewRef(object);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* --- leaving ------------------------------------------------------------------------------------------------------ */

static PyObject *leave(PyObject *self, PyObject *Py_UNUSED(none)) {
    Py_BEGIN_ALLOW_THREADS;
    group_leave(group_of(self));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *is_left_by_all(PyObject *self, PyObject *Py_UNUSED(none)) {
    return PyBool_FromLong(leave_is_done_by_all(group_of(self)));
}

static PyObject *forked(PyObject *self, PyObject *Py_UNUSED(none)) {
    group_forked(group_of(self));
    Py_RETURN_NONE;
}

/* For an aborted group: returns once these pieces of memory, which were windows of this rank, are its own again. A peer
 * that was stopped in the middle of a put keeps the old pages, at which no rank looks any more. */
static PyObject *reclaim(PyObject *self, PyObject *pieces) {
    struct group *g = group_of(self);
    bool over;
    if (!PyTuple_Check(pieces)) return PyErr_Format(PyExc_TypeError, "windows must be a tuple");
    Py_BEGIN_ALLOW_THREADS;
    over = group_await_puts(g);
    Py_END_ALLOW_THREADS;
    for (Py_ssize_t i = 0; !over && g->own_process && i < PyTuple_Size(pieces); i++) {
        unsigned long long address;
        long long nbytes;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pieces, i), "KL", &address, &nbytes)) return NULL;
        if (nbytes > 0) isolate((char *)(uintptr_t)address, nbytes);
    }
    Py_RETURN_NONE;
}

/* --- failing ------------------------------------------------------------------------------------------------------ */

static PyObject *py_abort(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct group *g = group_of(self);
    struct visit visit;
    if (visit_begin(&visit, g)) sync_fail(&visit, STATUS_ABORTED, g->rank); /* else the others see that it left */
    visit_end(&visit);
    Py_RETURN_NONE;
}

/* Fails the group. All ranks see that before this returns, unless this rank leaves meanwhile: then they see that. */
static PyObject *fail(PyObject *self, PyObject *args) {
    int status, culprit;
    if (!PyArg_ParseTuple(args, "ii", &status, &culprit)) return NULL;
    struct visit visit;
    int counts = visit_begin(&visit, group_of(self)) ? sync_fail(&visit, status, culprit) : sync_aborted(&visit);
    visit_end(&visit);
    return PyLong_FromLong(counts);
}

/* 0, or the status that the group failed with. Readers of peers' memory ask after their last read. */
static PyObject *py_status(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct visit visit;
    atomic_thread_fence(memory_order_seq_cst);
    visit_begin(&visit, group_of(self));
    int status = sync_aborted(&visit);
    visit_end(&visit);
    return PyLong_FromLong(status);
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static PyObject *set_timeout(PyObject *self, PyObject *nanoseconds) {
    int64_t timeout = PyLong_AsLongLong(nanoseconds);
    if (PyErr_Occurred()) return NULL;
    atomic_store(&group_of(self)->timeout, timeout);
    Py_RETURN_NONE;
}

/* Says how much of the stage has pages. Plans that reach farther are refused, since touching memory without pages would
 * raise a signal, not an error. */
static PyObject *reserved(PyObject *self, PyObject *arg) {
    struct group *g = group_of(self);
    int64_t bytes = PyLong_AsLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    if (bytes > g->stage_bytes)
        return PyErr_Format(PyExc_ValueError, "a staging half has %lld bytes", (long long)g->stage_bytes);
    /* Callers have the interpreter lock. */
    if (bytes > atomic_load(&g->reserved_bytes)) atomic_store(&g->reserved_bytes, bytes);
    Py_RETURN_NONE;
}

static PyObject *skip_number(PyObject *self, PyObject *Py_UNUSED(none)) {
    atomic_fetch_add(&group_of(self)->unnumbered, 1);
    Py_RETURN_NONE;
}

static PyObject *announce(PyObject *self, PyObject *arg) {
    int looks = (int)PyLong_AsLong(arg);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(group_announce(group_of(self), looks));
}

PyMethodDef group_life_methods[] = {
    METHOD_AS(abort, py_abort, METH_NOARGS, "(): every rank's pending and later operations fail."),
    METHOD(announce, METH_O, "(looks) -> whether all are about to run the same operation"),
    METHOD(fail, METH_VARARGS, "(status, culprit) -> the status that counts"),
    METHOD(forked, METH_NOARGS, "(): in a forked child, which takes no part: everything is refused."),
    METHOD(is_left_by_all, METH_NOARGS, "() -> whether all have left or died, and its memory may be given back"),
    METHOD(keep, METH_O, "(object): keep it for as long as the group exists."),
    METHOD(leave, METH_NOARGS, "(): this rank takes no further part."),
    METHOD(reclaim, METH_O, "(windows): each an address and its bytes; they become this rank's own again."),
    METHOD(reserved, METH_O, "(bytes): how much of each staging half has pages."),
    METHOD(set_timeout, METH_O, "(nanoseconds): of calls that do not say otherwise"),
    METHOD(skip_number, METH_NOARGS, "(): the next operation is not the program's; those after it count from 1."),
    METHOD_AS(status, py_status, METH_NOARGS, "() -> 0, or the status it failed with"),
    {NULL, NULL, 0, NULL},
};

/* --- the type ----------------------------------------------------------------------------------------------------- */

static PyMethodDef all_methods[MOST_METHODS + 1];

static PyType_Slot slots[] = {
    {Py_tp_doc, "A rank's part of a group."},
    {Py_tp_new, group_new},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_methods, all_methods},
    {0, NULL},
};

static PyType_Spec spec = {"symcomm._core._native.Group", sizeof(struct group_object), 0, Py_TPFLAGS_DEFAULT, slots};

static bool gather_methods(void) {
#define GROUP_TABLE(NAME) group_##NAME##_methods,
    PyMethodDef *const tables[] = {GROUP_METHODS(GROUP_TABLE)};
    size_t n = 0;
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        for (const PyMethodDef *m = tables[i]; m->ml_name; m++) {
            if (n == MOST_METHODS) return false;
            all_methods[n++] = *m;
        }
    return true;
}

static const struct constant constants[] = {
    {"CONTROL_BYTES", sizeof(struct control)},
    CONSTANT(STATUS_OK),
    CONSTANT(STATUS_MISMATCH),
    CONSTANT(STATUS_DEAD),
    CONSTANT(STATUS_LEFT),
    CONSTANT(STATUS_TIMEOUT),
    CONSTANT(STATUS_ABORTED),
    CONSTANT(STATUS_PLAN),
    CONSTANT(STATUS_INTERRUPTED),
    CONSTANT(STATUS_HALF_SENT),
    CONSTANT(STATUS_NESTED),
    CONSTANT(STATUS_UNREADABLE),
    CONSTANT(STATUS_REFUSED),
    CONSTANT(STATUS_SIZE),
    {NULL, 0},
};

int symcomm_add_group(PyObject *module) {
    if (symcomm_add_part(module, NULL, constants) < 0) return -1;
    if (!gather_methods()) return PyErr_Format(PyExc_SystemError, "native.Group has too many methods"), -1;
    group_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return group_type ? PyModule_AddObjectRef(module, "Group", (PyObject *)group_type) : -1;
}
