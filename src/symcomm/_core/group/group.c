/* Python's view of groups, plans and requests. They are capsules; the classes are in symcomm/group. */
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "exec/async.h"
#include "exec/cma.h"
#include "exec/exec.h"
#include "memory/isolate.h"
#include "memory/shared_bytes.h"
#include "module/module.h"
#include "observe/flight.h"
#include "p2p/p2p.h"
#include "sync/cores.h"
#include "sync/sync.h"

static const char GROUP[] = "symcomm.group", PLAN[] = "symcomm.plan", REQUEST[] = "symcomm.request";
#define MAX_BUFFERS MAX_WORLD

/* --- the interpreter lock and Ctrl-C ------------------------------------------------------------------------ */

_Thread_local PyThreadState *gil_released;

void gil_release(void) {
    symcomm_before_waiting = NULL;
    gil_released = PyEval_SaveThread();
}

static PyObject *call_site_callable; /* a callable: the number of the site that calls us */

uint32_t gil_ask_call_site(void) {
    symcomm_call_site = NULL; /* once is enough */
    if (call_site_callable == NULL) return 0;
    PyEval_RestoreThread(gil_released);
    /* What it raises comes from a signal handler, and is for our caller. */
    PyObject *site = PyObject_CallNoArgs(call_site_callable);
    uint32_t number = site ? (uint32_t)PyLong_AsUnsignedLong(site) : 0;
    Py_XDECREF(site);
    symcomm_interrupted = gil_check_signals; /* a finalizer may have run an operation of its own */
    gil_released = PyEval_SaveThread();
    return number;
}

/* ticks_to_ns(ticks) -> nanoseconds since the epoch of CLOCK_MONOTONIC */
static PyObject *ticks_to_ns(PyObject *self, PyObject *arg) {
    (void)self;
    uint64_t ticks = PyLong_AsUnsignedLongLong(arg);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(symcomm_ticks_to_ns(ticks));
}

static PyObject *use_locator(PyObject *self, PyObject *callable) {
    (void)self;
    PyObject *before = call_site_callable;
    call_site_callable = Py_NewRef(callable);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

int gil_check_signals(void) {
    PyEval_RestoreThread(gil_released);
    int raised = PyErr_Occurred() != NULL || PyErr_CheckSignals();
    symcomm_interrupted = gil_check_signals; /* the handler may have run an operation of its own */
    gil_released = PyEval_SaveThread();
    return raised;
}

/* --- arguments ------------------------------------------------------------------------------------------------ */

static int to_address(PyObject *object, char **address) {
    *address = PyLong_AsVoidPtr(object);
    return *address == NULL && PyErr_Occurred() ? -1 : 0;
}

/* An int or a tuple of ints. Returns how many, or -1. */
static int to_addresses(PyObject *object, char **addresses) {
    if (PyLong_Check(object)) return to_address(object, addresses) < 0 ? -1 : 1;
    Py_ssize_t n = PyTuple_Size(object);
    if (n < 0) return -1;
    if (n > MAX_BUFFERS) {
        PyErr_Format(PyExc_ValueError, "at most %d buffers", MAX_BUFFERS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (to_address(PyTuple_GetItem(object, i), &addresses[i]) < 0) return -1;
    return (int)n;
}

static int want(Py_ssize_t got, Py_ssize_t expected, const char *name) {
    if (got == expected) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, got);
    return -1;
}

/* --- plans ---------------------------------------------------------------------------------------------------- */

static void drop_plan(PyObject *capsule) { plan_free(PyCapsule_GetPointer(capsule, PLAN)); }

static PyObject *make_plan(PyObject *self, PyObject *arg) {
    (void)self;
    char *bytes;
    Py_ssize_t size;
    const char *why;
    if (PyBytes_AsStringAndSize(arg, &bytes, &size) < 0) return NULL;
    struct plan *plan = plan_load(bytes, (size_t)size, &why);
    if (plan == NULL) return PyErr_Format(PyExc_ValueError, "not a plan: %s", why);
    return PyCapsule_New(plan, PLAN, drop_plan);
}

static PyObject *plan_stage(PyObject *self, PyObject *arg) {
    (void)self;
    struct plan *p = PyCapsule_GetPointer(arg, PLAN);
    return p ? PyLong_FromLongLong(p->stage_bytes) : NULL;
}

/* --- groups --------------------------------------------------------------------------------------------------- */

static void free_group(struct group *g) {
    free(g->control);
    free(g->stage);
    free(g->arena);
    free(g->own_copy);
    free(g->readable);
    free((void *)g->life);
    async_free(g);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static void release_core(struct group *g) {
    if (atomic_exchange(&g->needs_core, false)) atomic_fetch_add(&life_of(g->life[g->rank])->cpu.left, 1);
}

/* Nobody refers to the group any more. What still runs on it could wait for ever, so it is ended. */
static void drop_now(struct group *g) {
    Py_BEGIN_ALLOW_THREADS;
    if (!async_idle(g)) sync_fail(g, STATUS_ABORTED, g->rank);
    atomic_store(&g->control[g->rank]->state, CONTROL_LEFT);
    release_core(g);
    async_stop(g);
    p2p_drop(g);
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
    struct group *g = PyCapsule_GetPointer(capsule, GROUP);
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

static PyObject *make_group(PyObject *self, PyObject *args) {
    (void)self;
    int rank, world, own_process, spin;
    PyObject *control, *stage, *arena, *life, *channels;
    unsigned long long flight;
    unsigned flight_group;
    long long stage_bytes, arena_bytes, poll_ns, yield_ns;
    unsigned long long seq;
    if (!PyArg_ParseTuple(args, "iiO!O!LO!LO!O!KIpiLLK", &rank, &world, &PyTuple_Type, &control, &PyTuple_Type, &stage,
                          &stage_bytes, &PyTuple_Type, &arena, &arena_bytes, &PyTuple_Type, &life, &PyTuple_Type,
                          &channels, &flight, &flight_group, &own_process, &spin, &poll_ns, &yield_ns, &seq))
        return NULL;
    if (world < 1 || world > MAX_BUFFERS || rank < 0 || rank >= world)
        return PyErr_Format(PyExc_ValueError, "rank %d of %d: a group has 1 to %d ranks", rank, world, MAX_BUFFERS);
    struct group *g = calloc(1, sizeof *g);
    if (g == NULL) return PyErr_NoMemory();
    pthread_mutex_init(&g->lock, NULL);
    size_t n = (size_t)world;
    g->rank = rank, g->world = world, g->spin = spin, g->poll_ns = poll_ns, g->yield_ns = yield_ns;
    atomic_init(&g->spin_now, spin);
    g->own_process = own_process;
    g->seq = seq;
    g->flight = (struct flight *)(uintptr_t)flight, g->flight_group = flight_group;
    g->stage_bytes = stage_bytes, g->arena_bytes = arena_bytes;
    g->control = calloc(n, sizeof *g->control), g->stage = calloc(n, sizeof *g->stage);
    g->arena = calloc(n, sizeof *g->arena), g->life = calloc(n, sizeof *g->life);
    g->readable = calloc(n, 1);
    if (!g->control || !g->stage || !g->arena || !g->life || !g->readable) {
        free_group(g);
        return PyErr_NoMemory();
    }
    if (fill(control, world, (void **)g->control) < 0 || fill(stage, world, (void **)g->stage) < 0 ||
        fill(arena, world, (void **)g->arena) < 0 || fill(life, world, (void **)g->life) < 0) {
        free_group(g);
        return NULL;
    }
    char *outgoing[MAX_BUFFERS];
    if (fill(channels, world, (void **)outgoing) < 0 || p2p_open(g, outgoing) < 0) {
        free_group(g);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    atomic_store(&g->control[rank]->progress, g->seq << PLAN_SIGNAL_BITS);
    cma_introduce(g);
    atomic_store(&g->control[rank]->state, CONTROL_IN_USE);
    atomic_fetch_add(&life_of(g->life[rank])->cpu.joined, 1);
    atomic_store(&g->needs_core, true);
    return g->capsule = PyCapsule_New(g, GROUP, drop_group);
}

static struct group *to_group(PyObject *capsule) { return PyCapsule_GetPointer(capsule, GROUP); }

static PyObject *group_keep(PyObject *self, PyObject *args) {
    (void)self;
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
static PyObject *group_reserved(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    long long bytes;
    struct group *g;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &bytes) || (g = to_group(capsule)) == NULL) return NULL;
    if (bytes > g->stage_bytes)
        return PyErr_Format(PyExc_ValueError, "a staging half has %lld bytes", (long long)g->stage_bytes);
    /* Callers have the interpreter lock. */
    if (bytes > atomic_load(&g->reserved_bytes)) atomic_store(&g->reserved_bytes, bytes);
    Py_RETURN_NONE;
}

static PyObject *group_abort(PyObject *self, PyObject *arg) {
    (void)self;
    struct group *g = to_group(arg);
    struct visit visit;
    if (g == NULL) return NULL;
    if (!visit_begin(&visit, g)) Py_RETURN_NONE; /* the others learn that it is left */
    sync_fail(g, STATUS_ABORTED, g->rank);
    visit_end(&visit);
    Py_RETURN_NONE;
}

static PyObject *group_leave(PyObject *self, PyObject *arg) {
    (void)self;
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    if (g->left) Py_RETURN_NONE;
    struct control *me = g->control[g->rank];
    atomic_store(&g->leaving, true);
    atomic_store(&me->state, CONTROL_LEFT);
    release_core(g);
    uint64_t none = 0, cause = STATUS_LEFT | (uint64_t)g->rank << 8 | (uint64_t)g->rank << 24;
    atomic_compare_exchange_strong(&me->abort, &none, cause); /* ends and refuses operations here, and only here */
    Py_BEGIN_ALLOW_THREADS;
    async_stop(g);
    p2p_close(g);
    leave_group(g);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* group_detach(group) -> whether every rank has left or died, so that this rank's part may be used for other things. */
static PyObject *group_detach(PyObject *self, PyObject *arg) {
    (void)self;
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    if (!g->left) leave_late(g); /* two calls that ended at once may have left it to each other */
    if (!g->left) Py_RETURN_FALSE;
    for (int r = 0; r < g->world && g->own_block; r++) {
        bool dead = life_has_ended(g->life[r]);
        if (!dead && !atomic_load_explicit(&g->own_block->departed[r], memory_order_acquire)) Py_RETURN_FALSE;
    }
    g->own_block = NULL;
    Py_RETURN_TRUE;
}

static bool is_put_to(struct group *g) {
    for (int r = 0; r < g->world; r++)
        if (r != g->rank && atomic_load(&g->control[r]->putting) && sync_marked_gone(g, r) != STATUS_DEAD) return true;
    return false;
}

/* group_reclaim(group, ((address, bytes), ...)): the group was aborted. Returns once these pieces of memory, which were
 * windows of this rank, are its own again. A peer that was stopped in the middle of a put keeps pages that nobody looks
 * at any more. */
static PyObject *group_reclaim(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *pieces;
    struct group *g;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyTuple_Type, &pieces) || (g = to_group(capsule)) == NULL)
        return NULL;
    struct visit visit;
    if (!visit_begin(&visit, g)) Py_RETURN_NONE;
    bool busy;
    Py_BEGIN_ALLOW_THREADS;
    int64_t end = symcomm_now_ns() + (g->own_process ? SOON_ENOUGH_NS : LONG_ENOUGH_NS);
    atomic_thread_fence(memory_order_seq_cst);
    while ((busy = is_put_to(g)) && symcomm_now_ns() < end) usleep(100);
    Py_END_ALLOW_THREADS;
    visit_end(&visit);
    for (Py_ssize_t i = 0; busy && g->own_process && i < PyTuple_Size(pieces); i++) {
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
static PyObject *group_announce(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int looks;
    struct group *g;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &looks) || (g = to_group(capsule)) == NULL) return NULL;
    struct visit visit;
    if (!visit_begin(&visit, g)) Py_RETURN_FALSE;
    uint64_t number = atomic_load(&g->seq) + 1;
    atomic_store_explicit(&g->control[g->rank]->announced, number, memory_order_relaxed);
    int here = 0; /* ranks below it are there */
    for (int i = 0; i < looks && here < g->world; i++) {
        while (here < g->world && (here == g->rank || has_come(g->control[here], number))) here++;
        cpu_relax();
    }
    visit_end(&visit);
    return PyBool_FromLong(here == g->world);
}

/* group_forked(group): in a forked child, which has the group's memory but is not the rank. From now on the group looks
 * at a copy of its control block, which refuses every operation, and nothing it does reaches the other ranks. Threads
 * did not come along, and locks may be held by one of them. */
static PyObject *group_forked(PyObject *self, PyObject *arg) {
    (void)self;
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    struct control *copy = aligned_alloc(64, (sizeof *copy + 63) / 64 * 64);
    if (copy == NULL) return PyErr_NoMemory();
    memset(copy, 0, sizeof *copy);
    atomic_store(&copy->state, CONTROL_LEFT);
    atomic_store(&copy->abort, STATUS_LEFT | (uint64_t)g->rank << 8 | (uint64_t)g->rank << 24);
    for (int r = 0; r < g->world; r++) g->control[r] = copy;
    free(g->own_copy);
    g->own_copy = copy, g->own_block = NULL;
    g->forked = g->left = true;
    atomic_store(&g->needs_core, false); /* it is the parent's */
    atomic_store(&g->leaving, true);
    atomic_store(&g->visitors, 0);
    g->worker = NULL, g->flight = NULL, g->recording = NULL;
    pthread_mutex_init(&g->lock, NULL);
    atomic_store(&g->holder, NULL);
    p2p_forked(g);
    Py_RETURN_NONE;
}

enum record_kind { RECORD_CALL, RECORD_VOTE };

/* A record of a rank, where its words lie and how long they may be. */
struct place {
    struct record *record;
    char *text;
    uint32_t room;
};

static struct place record_of(struct control *c, int kind) {
    if (kind == RECORD_VOTE) return (struct place){&c->vote, c->vote_text[0], VOTE_BYTES};
    return (struct place){&c->call, c->call_text[0], CALL_BYTES};
}

/* group_publish(group, kind, text). Words that are too long are refused: half of them would be worse than none. */
static PyObject *group_publish(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int kind;
    const char *text;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "Oiy#", &capsule, &kind, &text, &n)) return NULL;
    struct group *g = to_group(capsule);
    if (g == NULL) return NULL;
    struct visit visit;
    if (!visit_begin(&visit, g)) Py_RETURN_NONE;
    struct place mine = record_of(g->control[g->rank], kind);
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

/* A rank's record as it was at one moment, or None. The next words go to the other place, so these stay as they are at
 * least until the version changes. */
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

static PyObject *group_records(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int kind;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &kind)) return NULL;
    struct group *g = to_group(capsule);
    PyObject *records = g ? PyList_New(0) : NULL;
    for (int r = 0; records && r < g->world; r++) {
        PyObject *one = read_record(record_of(g->control[r], kind));
        if (one == NULL || PyList_Append(records, one) < 0) Py_CLEAR(records);
        Py_XDECREF(one);
    }
    return records;
}

/* group_agree(group, before, after) -> what the ranks' common word was; it becomes `after` if that is `before`. It lies
 * in rank 0's block, which stays mapped when that rank is gone. */
static PyObject *group_agree(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long before, after;
    if (!PyArg_ParseTuple(args, "OKK", &capsule, &before, &after)) return NULL;
    struct group *g = to_group(capsule);
    if (g == NULL) return NULL;
    uint64_t found = before;
    struct visit visit;
    if (!visit_begin(&visit, g)) return PyErr_Format(PyExc_RuntimeError, "the group was left meanwhile");
    atomic_compare_exchange_strong(&g->control[0]->agreed, &found, (uint64_t)after);
    visit_end(&visit);
    return PyLong_FromUnsignedLongLong(found);
}

/* --- operations ----------------------------------------------------------------------------------------------- */

/* run(group, plan, inputs, outputs, timeout_ns, site) -> status */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    char *in[MAX_BUFFERS], *out[MAX_BUFFERS];
    if (want(n_args, 6, "run") < 0) return NULL;
    struct group *g = to_group(args[0]);
    struct plan *p = g ? PyCapsule_GetPointer(args[1], PLAN) : NULL;
    if (p == NULL) return NULL;
    struct buffers b = {in, out, to_addresses(args[2], in), to_addresses(args[3], out)};
    int64_t timeout = PyLong_AsLongLong(args[4]);
    struct origin from = {.site = (uint32_t)PyLong_AsUnsignedLong(args[5]), .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    if (b.n_in < 0 || b.n_out < 0 || PyErr_Occurred()) return NULL;
    int64_t status;
    bool idle = async_idle(g);
    count_call(&g->collectives, true, !idle);
    WITHOUT_GIL_UNLESS(idle && exec_is_short(g, p),
                       status = idle ? exec_run(g, p, &b, timeout, from) : async_run_queued(g, p, &b, timeout, from));
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(status);
}

static void call_back(struct request *r) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *callback = r->context;
    PyObject *result = PyObject_CallFunction(callback, "L", (long long)r->status);
    if (result == NULL) PyErr_WriteUnraisable(callback);
    Py_XDECREF(result);
    Py_DECREF(callback);
    PyGILState_Release(state);
}

static void drop_request(PyObject *capsule) { async_release(PyCapsule_GetPointer(capsule, REQUEST)); }

/* submit(group, plan, inputs, outputs, timeout_ns, site, callback or None) -> request */
static PyObject *submit(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    char *in[MAX_BUFFERS], *out[MAX_BUFFERS];
    if (want(n_args, 7, "submit") < 0) return NULL;
    struct group *g = to_group(args[0]);
    struct plan *p = g ? PyCapsule_GetPointer(args[1], PLAN) : NULL;
    if (p == NULL) return NULL;
    int n_in = to_addresses(args[2], in), n_out = n_in < 0 ? -1 : to_addresses(args[3], out);
    int64_t timeout = PyLong_AsLongLong(args[4]);
    struct origin from = {.site = (uint32_t)PyLong_AsUnsignedLong(args[5]), .exact_site = 1, .way = FLIGHT_SLOW_PATH};
    if (n_in < 0 || n_out < 0 || PyErr_Occurred()) return NULL;
    struct request *r = calloc(1, sizeof *r);
    char **ins = malloc(sizeof(char *) * (size_t)(n_in + 1)), **outs = malloc(sizeof(char *) * (size_t)(n_out + 1));
    if (!r || !ins || !outs) {
        free(r), free(ins), free(outs);
        return PyErr_NoMemory();
    }
    memcpy(ins, in, sizeof(char *) * (size_t)n_in);
    memcpy(outs, out, sizeof(char *) * (size_t)n_out);
    *r = (struct request){
        .group = g, .plan = p, .buffers = {ins, outs, n_in, n_out}, .timeout = timeout, .from = from, .references = 1};
    if (args[6] != Py_None) r->context = Py_NewRef(args[6]), r->finished = call_back;
    PyObject *capsule = PyCapsule_New(r, REQUEST, drop_request);
    if (capsule && async_submit(g, r) < 0) {
        Py_DECREF(capsule);
        return PyErr_Format(PyExc_OSError, "can't start new thread");
    }
    if (capsule) count_call(&g->collectives, true, true);
    return capsule;
}

/* request_wait(request, timeout_ns) -> status, or None when it is not done by then; a negative timeout only looks. */
static PyObject *request_wait(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    long long timeout;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &timeout)) return NULL;
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    if (r == NULL) return NULL;
    bool done = atomic_load_explicit(&r->done, memory_order_acquire);
    if (!done && r->group->forked) return PyLong_FromLong(STATUS_LEFT); /* it is the parent's, and ends there */
    if (!done && timeout >= 0) {
        WITHOUT_GIL(done = async_wait(r, timeout));
        if (PyErr_Occurred()) return NULL;
    }
    return done ? PyLong_FromLongLong(r->status) : Py_NewRef(Py_None);
}

/* request_number(request) -> which operation of its group it is */
static PyObject *request_number(PyObject *self, PyObject *capsule) {
    (void)self;
    struct request *r = PyCapsule_GetPointer(capsule, REQUEST);
    return r ? PyLong_FromUnsignedLongLong(r->number) : NULL;
}

static PyMethodDef methods[] = {
    {"make_plan", make_plan, METH_O, "make_plan(encoded) -> plan"},
    {"plan_stage", plan_stage, METH_O, "plan_stage(plan) -> how many bytes of a staging half it uses"},
    {"make_group", make_group, METH_VARARGS,
     "make_group(rank, world, controls, stages, stage_bytes, arenas, arena_bytes, lives, channels, flight, flight_group, own_process,"
     " spin, poll_ns, yield_ns, operations so far) -> group"},
    {"group_reserved", group_reserved, METH_VARARGS,
     "group_reserved(group, bytes): so much of each staging half has pages."},
    {"group_abort", group_abort, METH_O, "group_abort(group): every rank's pending and later operations fail."},
    {"group_leave", group_leave, METH_O, "group_leave(group): this rank takes no further part."},
    {"group_reclaim", group_reclaim, METH_VARARGS,
     "group_reclaim(group, ((address, bytes), ...)): windows become this rank's own again."},
    {"group_announce", group_announce, METH_VARARGS,
     "group_announce(group, looks) -> whether all are about to run the same operation"},
    {"group_detach", group_detach, METH_O,
     "group_detach(group) -> whether all have left, and its memory may be given back"},
    {"group_forked", group_forked, METH_O,
     "group_forked(group): a forked child takes no part; it is refused everything."},
    {"group_keep", group_keep, METH_VARARGS, "group_keep(group, object): hold on to it as long as the group exists."},
    {"group_publish", group_publish, METH_VARARGS,
     "group_publish(group, kind, text): show the others a record of this rank."},
    {"group_records", group_records, METH_VARARGS,
     "group_records(group, kind) -> what each rank has published, or None"},
    {"group_agree", group_agree, METH_VARARGS, "group_agree(group, before, after) -> what the word of all ranks was"},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(group, plan, inputs, outputs, timeout_ns, site) -> status"},
    {"submit", (PyCFunction)(void (*)(void))submit, METH_FASTCALL,
     "submit(group, plan, inputs, outputs, timeout_ns, site, callback) -> request"},
    {"ticks_to_ns", ticks_to_ns, METH_O, "ticks_to_ns(ticks) -> nanoseconds of CLOCK_MONOTONIC"},
    {"use_locator", use_locator, METH_O, "use_locator(callable): asked for a site's number when a call has to sleep."},
    {"request_number", request_number, METH_O, "request_number(request) -> which operation of its group it is"},
    {"request_wait", request_wait, METH_VARARGS, "request_wait(request, timeout_ns) -> status or None"},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_group(PyObject *module) {
    PyModule_AddIntConstant(module, "CONTROL_BYTES", (long)sizeof(struct control));
    PyModule_AddIntConstant(module, "CALL_BYTES", CALL_BYTES);
    PyModule_AddIntConstant(module, "RECORD_CALL", RECORD_CALL);
    PyModule_AddIntConstant(module, "RECORD_VOTE", RECORD_VOTE);
    return PyModule_AddFunctions(module, methods);
}
