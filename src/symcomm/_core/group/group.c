/* Groups as Python sees them: capsules, whose classes are in symcomm/group. */
#include <stdlib.h>

#include "exec/async.h"
#include "exec/cma.h"
#include "exec/dispatch_cache.h"
#include "exec/exec.h"
#include "exec/refusal.h"
#include "memory/isolate.h"
#include "memory/life.h"
#include "module/arguments.h"
#include "module/module.h"
#include "observe/flight.h"
#include "os/futex.h"
#include "p2p/p2p.h"
#include "sync/cores.h"
#include "sync/fail.h"
#include "sync/wait.h"

static void free_group(struct group *g) {
    blocks_free(g->blocks);
    free(g->arena);
    free(g->readable);
    free((void *)g->life);
    async_free(g);
    refusals_free(g);
    free(g);
}

static void release_core(struct group *g) {
    if (atomic_exchange(&g->needs_core, false)) atomic_fetch_add(&life_of(g->life[g->rank])->cpu.left, 1);
}

/* Nobody refers to the group any more. What still runs on it could wait for ever, so it is ended. */
static void drop_now(struct group *g) {
    struct visit visit;
    Py_BEGIN_ALLOW_THREADS;
    visit_begin(&visit, g);
    if (!async_idle(g)) sync_fail(&visit, STATUS_ABORTED, g->rank);
    atomic_store(&block_of(&visit, g->rank)->state, CONTROL_LEFT);
    release_core(g);
    async_stop(g);
    p2p_drop(&visit);
    visit_end(&visit);
    Py_END_ALLOW_THREADS;
    dispatch_cache_drop(g);
    PyObject *kept = g->kept;
    free_group(g);
    Py_XDECREF(kept); /* only now: the above used the memory this keeps mapped */
}

static void drop_at_end(void *group) {
    PyGILState_STATE state = PyGILState_Ensure();
    drop_now(group);
    PyGILState_Release(state);
}

static void drop_group(PyObject *capsule) {
    struct group *g = to_group(capsule);
    g->kept = PyCapsule_GetContext(capsule);
    if (async_inside(g)) async_at_end(g, drop_at_end, g); /* the last who knew it was called back by its thread */
    else drop_now(g);
}

static int fill(PyObject *tuple, int world, void **into) {
    if (PyTuple_Size(tuple) != world) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one address per rank");
        return -1;
    }
    return to_addresses(tuple, (char **)into) == world ? 0 : -1;
}

static struct group *allocate_group(int rank, int world) {
    struct group *g = calloc(1, sizeof *g);
    if (g == NULL) return NULL;
    size_t n = (size_t)world;
    g->rank = rank, g->world = world;
    g->arena = calloc(n, sizeof *g->arena), g->life = calloc(n, sizeof *g->life);
    g->readable = calloc(n, 1);
    if (g->arena && g->life && g->readable) return g;
    free_group(g);
    return NULL;
}

/* False: out of memory, or an exception is set. */
static bool make_blocks(struct group *g, PyObject *controls, PyObject *stages) {
    char *control[MAX_BUFFERS], *stage[MAX_BUFFERS];
    if (fill(controls, g->world, (void **)control) < 0 || fill(stages, g->world, (void **)stage) < 0) return false;
    return (g->blocks = blocks_make(g->rank, g->world, control, stage)) != NULL;
}

/* The same. */
static bool open_channels(struct group *g, PyObject *channels) {
    char *outgoing[MAX_BUFFERS];
    return fill(channels, g->world, (void **)outgoing) == 0 && p2p_open(g, outgoing) == 0;
}

/* Shows the other ranks that this one is there. */
static void introduce(struct group *g) {
    struct visit visit;
    visit_begin(&visit, g);
    struct control *me = block_of(&visit, g->rank);
    atomic_store(&me->progress, g->seq << PLAN_SIGNAL_BITS);
    cma_introduce(&visit);
    atomic_store(&me->state, CONTROL_IN_USE);
    visit_end(&visit);
}

static PyObject *make_group(PyObject *Py_UNUSED(self), PyObject *args) {
    int rank, world, own_process, spin;
    PyObject *control, *stage, *arena, *life, *channels;
    unsigned long long flight;
    unsigned flight_group;
    long long stage_bytes, arena_bytes, poll_ns, yield_ns, timeout;
    unsigned long long seq;
    if (!PyArg_ParseTuple(args, "iiO!O!LO!LO!O!KIpiLLKL", &rank, &world, &PyTuple_Type, &control, &PyTuple_Type, &stage,
                          &stage_bytes, &PyTuple_Type, &arena, &arena_bytes, &PyTuple_Type, &life, &PyTuple_Type,
                          &channels, &flight, &flight_group, &own_process, &spin, &poll_ns, &yield_ns, &seq, &timeout))
        return NULL;
    if (world < 1 || world > MAX_BUFFERS || rank < 0 || rank >= world)
        return PyErr_Format(PyExc_ValueError, "rank %d of %d: a group has 1 to %d ranks", rank, world, MAX_BUFFERS);
    struct group *g = allocate_group(rank, world);
    if (g == NULL) return PyErr_NoMemory();
    g->spin = spin, g->poll_ns = poll_ns, g->yield_ns = yield_ns;
    atomic_init(&g->spin_now, spin);
    atomic_init(&g->timeout, timeout);
    g->own_process = own_process;
    g->seq = seq;
    g->flight = (struct flight *)(uintptr_t)flight, g->flight_group = flight_group;
    g->stage_bytes = stage_bytes, g->arena_bytes = arena_bytes;
    if (fill(arena, world, (void **)g->arena) < 0 || fill(life, world, (void **)g->life) < 0 ||
        !make_blocks(g, control, stage) || !open_channels(g, channels)) {
        free_group(g);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    introduce(g);
    atomic_fetch_add(&life_of(g->life[rank])->cpu.joined, 1);
    atomic_store(&g->needs_core, true);
    return g->capsule = PyCapsule_New(g, GROUP_CAPSULE, drop_group);
}

static PyObject *group_set_timeout(PyObject *Py_UNUSED(self), PyObject *args) {
    struct group *g;
    long long timeout;
    if (!PyArg_ParseTuple(args, "O&L", convert_group, &g, &timeout)) return NULL;
    atomic_store(&g->timeout, timeout);
    Py_RETURN_NONE;
}

static PyObject *group_keep(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule, *object;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &object) || to_group(capsule) == NULL) return NULL;
    PyObject *before = PyCapsule_GetContext(capsule);
    if (PyCapsule_SetContext(capsule, Py_NewRef(object)) < 0) return NULL;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static bool has_come(const struct control *c, uint64_t number) {
    return atomic_load_explicit(&c->announced, memory_order_relaxed) >= number ||
           atomic_load_explicit(&c->arrival[number & 1].seq, memory_order_relaxed) >= number;
}

/* group_reserved(group, bytes): the pages of so much of each half of this rank's staging area exist. Plans that reach
 * farther are refused: touching memory that the kernel has not got would be a signal, not an error. */
static PyObject *group_reserved(PyObject *Py_UNUSED(self), PyObject *args) {
    long long bytes;
    struct group *g;
    if (!PyArg_ParseTuple(args, "O&L", convert_group, &g, &bytes)) return NULL;
    if (bytes > g->stage_bytes)
        return PyErr_Format(PyExc_ValueError, "a staging half has %lld bytes", (long long)g->stage_bytes);
    /* Callers have the interpreter lock. */
    if (bytes > atomic_load(&g->reserved_bytes)) atomic_store(&g->reserved_bytes, bytes);
    Py_RETURN_NONE;
}

static PyObject *group_abort(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    struct visit visit;
    if (g == NULL) return NULL;
    if (!visit_begin(&visit, g)) Py_RETURN_NONE; /* the others learn that it is left */
    sync_fail(&visit, STATUS_ABORTED, g->rank);
    visit_end(&visit);
    Py_RETURN_NONE;
}

static PyObject *group_leave(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    struct visit visit;
    if (!leave_begin(&visit, g)) Py_RETURN_NONE;
    release_core(g);
    Py_BEGIN_ALLOW_THREADS;
    async_stop(g);
    p2p_close(&visit);
    leave_end(&visit);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* group_detach(group) -> whether every rank has left or died, so that this rank's part may be used for other things. */
static PyObject *group_detach(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    return g ? PyBool_FromLong(leave_is_done_by_all(g)) : NULL;
}

/* Whether no peer is in the middle of a put. */
static bool is_put_over(void *context) {
    const struct visit *v = context;
    const struct group *g = v->group;
    for (int r = 0; r < g->world; r++)
        if (r != g->rank && atomic_load(&block_of(v, r)->putting) && !life_has_ended(g->life[r])) return false;
    return true;
}

/* group_reclaim(group, ((address, bytes), ...)): the group was aborted. Returns once these pieces of memory, which were
 * windows of this rank, are its own again. A peer that was stopped in the middle of a put keeps pages that nobody looks
 * at any more. */
static PyObject *group_reclaim(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *pieces;
    struct group *g;
    if (!PyArg_ParseTuple(args, "O&O!", convert_group, &g, &PyTuple_Type, &pieces)) return NULL;
    struct visit visit;
    if (!visit_begin(&visit, g)) Py_RETURN_NONE;
    bool over;
    Py_BEGIN_ALLOW_THREADS;
    atomic_thread_fence(memory_order_seq_cst);
    over = wait_briefly(is_put_over, &visit, g->own_process ? SOON_ENOUGH_NS : LONG_ENOUGH_NS);
    Py_END_ALLOW_THREADS;
    visit_end(&visit);
    for (Py_ssize_t i = 0; !over && g->own_process && i < PyTuple_Size(pieces); i++) {
        unsigned long long address;
        long long nbytes;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pieces, i), "KL", &address, &nbytes)) return NULL;
        if (nbytes > 0) isolate((char *)(uintptr_t)address, nbytes);
    }
    Py_RETURN_NONE;
}

/* group_announce(group, looks) -> whether all other ranks are at this operation too, or soon will be. Says so of this
 * rank. The words only ever grow, and whoever wrote one runs its operation whatever it sees: one seen late costs only
 * time. */
static PyObject *group_announce(PyObject *Py_UNUSED(self), PyObject *args) {
    int looks;
    struct group *g;
    if (!PyArg_ParseTuple(args, "O&i", convert_group, &g, &looks)) return NULL;
    struct visit visit;
    if (!visit_begin(&visit, g)) Py_RETURN_FALSE;
    uint64_t number = atomic_load(&g->seq) + 1;
    atomic_store_explicit(&block_of(&visit, g->rank)->announced, number, memory_order_relaxed);
    int here = 0; /* ranks below it are there */
    for (int i = 0; i < looks && here < g->world; i++) {
        while (here < g->world && (here == g->rank || has_come(block_of(&visit, here), number))) here++;
        cpu_relax();
    }
    visit_end(&visit);
    return PyBool_FromLong(here == g->world);
}

/* group_forked(group): in a forked child, which has the group's memory but is not the rank. Nothing it does reaches the
 * other ranks from now on. */
static PyObject *group_forked(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    leave_as_child(g);
    g->forked = true;
    atomic_store(&g->needs_core, false); /* it is the parent's */
    atomic_store(&g->worker, NULL);
    g->flight = NULL, g->recording = NULL;
    p2p_forked(g);
    Py_RETURN_NONE;
}

/* group_fail(group, status, culprit) -> the status that counts. Every rank sees it before this returns, unless this
 * rank leaves the group meanwhile: then the others see that. */
static PyObject *group_fail(PyObject *Py_UNUSED(self), PyObject *args) {
    int status, culprit;
    struct group *g;
    if (!PyArg_ParseTuple(args, "O&ii", convert_group, &g, &status, &culprit)) return NULL;
    struct visit visit;
    int counts = visit_begin(&visit, g) ? sync_fail(&visit, status, culprit) : sync_aborted(&visit);
    visit_end(&visit);
    return PyLong_FromLong(counts);
}

/* group_status(group) -> 0, or why it has failed. Whoever has read peers' memory asks after its last read. */
static PyObject *group_status(PyObject *Py_UNUSED(self), PyObject *capsule) {
    struct group *g = to_group(capsule);
    if (g == NULL) return NULL;
    struct visit visit;
    atomic_thread_fence(memory_order_seq_cst);
    visit_begin(&visit, g);
    int status = sync_aborted(&visit);
    visit_end(&visit);
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    METHOD(group_status, METH_O, "(group) -> 0, or the status it failed with"),
    METHOD(group_fail, METH_VARARGS, "(group, status, culprit) -> the status that counts"),
    METHOD(
        make_group, METH_VARARGS,
        "(rank, world, controls, stages, stage_bytes, arenas, arena_bytes, lives, channels, flight, flight_group, own_process,"
        " spin, poll_ns, yield_ns, operations so far, timeout_ns) -> group"),
    METHOD(group_reserved, METH_VARARGS, "(group, bytes): so much of each staging half has pages."),
    METHOD(group_abort, METH_O, "(group): every rank's pending and later operations fail."),
    METHOD(group_leave, METH_O, "(group): this rank takes no further part."),
    METHOD(group_reclaim, METH_VARARGS, "(group, ((address, bytes), ...)): windows become this rank's own again."),
    METHOD(group_announce, METH_VARARGS, "(group, looks) -> whether all are about to run the same operation"),
    METHOD(group_detach, METH_O, "(group) -> whether all have left, and its memory may be given back"),
    METHOD(group_forked, METH_O, "(group): a forked child takes no part; it is refused everything."),
    METHOD(group_set_timeout, METH_VARARGS, "(group, ns): of calls that do not say otherwise"),
    METHOD(group_keep, METH_VARARGS, "(group, object): hold on to it as long as the group exists."),
    {NULL, NULL, 0, NULL},
};

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

int symcomm_add_group(PyObject *module) { return symcomm_add_part(module, methods, constants); }
