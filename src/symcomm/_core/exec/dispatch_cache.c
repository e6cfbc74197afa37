/* Runs calls of a kind seen before, without Python: views the tensors, finds the plan, runs or queues it.
 *
 * A kind is all that a plan depends on: call, detail (root, operation), dtype, counts and numbers of tensors. The table
 * only points to plans: group/executor.py makes and keeps them. Unusual calls are left to Python, which serves them or
 * words the error. */
#include "exec/dispatch_cache.h"

#include <stdlib.h>

#include "exec/async.h"
#include "exec/exec.h"
#include "exec/request_module.h"
#include "group/group_module.h"
#include "module/gil.h"
#include "module/module.h"
#include "reduce/types.h"
#include "torch/options.h"
#include "torch/tensor.h"

#define FIRST_SLOTS 16  /* a power of two, doubled when three quarters are full: most groups know a few calls */
#define MOST_SLOTS 4096 /* a full table of that size is emptied */

enum { /* what autograd must know of a call's effect on this rank's outputs */
       EFFECT_WRITES = 1,
       EFFECT_COPIES = 2, /* as if by torch's copy_, which torch may refuse */
};

/* Numbers of symcomm/ops.py: the call that cannot work in place, and the calls that take no lists of tensors. */
enum {
    CALL_ALL_TO_ALL_SINGLE = 5,
    CALL_SCATTER = 8,
    CALLS_OF_SINGLES = 1 << 2 | 1 << 4 | 1 << CALL_ALL_TO_ALL_SINGLE | 1 << 10
};

struct call_key { /* what a plan depends on */
    int64_t call, detail, dtype, count, out_count, n_in, n_out;
};

struct call_tensors { /* the tensors of one call */
    char *in[MAX_WORLD], *out[MAX_WORLD];
    PyObject *inputs, *outputs; /* of a list: its tensors, as another thread may empty it during the call */
    PyObject *written;          /* borrowed: the output, or the tuple of outputs */
};

struct cached_plan {
    struct call_key key;
    struct plan *plan;
    PyObject *capsule; /* keeps the plan; the group's executor has it as well */
    uint32_t site;     /* of the first call of this kind, for the flight recorder */
    uint32_t effects;
};

struct dispatch_cache {
    int used, size;
    struct cached_plan *slots;
};

static uint64_t hash_of(const struct call_key *k) {
    uint64_t h = (uint64_t)k->call * 0x9e3779b97f4a7c15u ^ (uint64_t)k->count;
    h = (h ^ (uint64_t)k->detail << 8 ^ (uint64_t)k->dtype) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 32 ^ (uint64_t)k->out_count ^ (uint64_t)(k->n_in << 12 ^ k->n_out) << 40) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 29;
}

static struct cached_plan *find(struct dispatch_cache *q, const struct call_key *k) {
    for (uint64_t i = hash_of(k);; i++) {
        struct cached_plan *slot = &q->slots[i & (uint64_t)(q->size - 1)];
        if (slot->plan == NULL || memcmp(&slot->key, k, sizeof *k) == 0) return slot;
    }
}

static void clear_cache(struct dispatch_cache *q) {
    for (int i = 0; i < q->size; i++) {
        PyObject *capsule = q->slots[i].capsule;
        q->slots[i] = (struct cached_plan){0};
        Py_XDECREF(capsule);
    }
    q->used = 0;
}

/* Makes room for one more. False: out of memory. */
static bool make_room(struct dispatch_cache *q) {
    if (q->used < q->size * 3 / 4) return true;
    if (q->size == MOST_SLOTS) {
        clear_cache(q);
        return true;
    }
    struct dispatch_cache larger = {.used = q->used, .size = q->size ? q->size * 2 : FIRST_SLOTS};
    larger.slots = calloc((size_t)larger.size, sizeof *larger.slots);
    if (larger.slots == NULL) return false;
    for (int i = 0; i < q->size; i++)
        if (q->slots[i].plan) *find(&larger, &q->slots[i].key) = q->slots[i];
    free(q->slots);
    *q = larger;
    return true;
}

void dispatch_cache_drop(struct group *g) {
    if (g->dispatch_cache == NULL) return;
    clear_cache(g->dispatch_cache);
    free(g->dispatch_cache->slots);
    free(g->dispatch_cache);
    g->dispatch_cache = NULL;
}

/* Views the i-th of several tensors. False: it cannot be viewed, or differs from those before. */
static bool view_next(PyObject *tensor, Py_ssize_t i, char **addresses, int64_t *count, int64_t *dtype) {
    struct tensor_view view;
    if (!tensor_view(tensor, &view) || (i > 0 && view.count != *count) || (*dtype >= 0 && view.dtype != *dtype))
        return false;
    addresses[i] = view.address, *count = view.count, *dtype = view.dtype;
    return true;
}

/* Views one tensor, a list or tuple of at least `fewest`, or None. A rank that is not the root may pass None or an
 * empty list. Returns how many tensors there are, or -1: Python must look. */
static int view_all(PyObject *object, int fewest, PyObject **kept, char **addresses, int64_t *count, int64_t *dtype) {
    if (object == Py_None) return 0;
    if (view_next(object, 0, addresses, count, dtype)) return 1;
    if (PyList_Check(object)) object = *kept = PyList_AsTuple(object);
    Py_ssize_t n = object && PyTuple_Check(object) ? PyTuple_Size(object) : -1;
    if (n == 0 && *kept) return 0;
    if (n < fewest || n > MAX_WORLD) return -1;
    for (Py_ssize_t i = 0; i < n; i++)
        if (!view_next(PyTuple_GetItem(object, i), i, addresses, count, dtype)) return -1;
    return (int)n;
}

/* Whether an output overlaps an input so that results would overwrite what peers still read. In place is fine if one is
 * this rank's part of the other. Request.keep_apart() in group/request.py has the same rule, and makes a copy. */
static bool overlaps(const struct group *g, const struct call_key *k, const struct call_tensors *t) {
    int64_t item = k->dtype >= 0 ? symcomm_itemsize[k->dtype] : 0, in_bytes = k->count * item,
            out_bytes = k->out_count * item;
    for (int64_t i = 0; i < k->n_in; i++)
        for (int64_t o = 0; o < k->n_out; o++) {
            const char *in = t->in[i], *out = t->out[o];
            if (in + in_bytes <= out || out + out_bytes <= in) continue;
            bool listed = k->n_in > 1 || k->n_out > 1, mine = in == out && (i | o) == g->rank;
            if (!listed) mine = in_bytes > out_bytes ? out == in + g->rank * out_bytes : in == out + g->rank * in_bytes;
            if (k->call == CALL_ALL_TO_ALL_SINGLE && g->world > 1) mine = false;
            if (!mine) return true;
        }
    return false;
}

static void release_tensors(struct call_tensors *t) {
    Py_XDECREF(t->inputs);
    Py_XDECREF(t->outputs);
}

/* Fills the rest of a key that has its call and detail, and the tensors; a list has at least `fewest`. False: Python
 * must look. The caller releases the tensors in any case. */
static bool view_tensors(const struct group *g, PyObject *input, PyObject *output, int fewest, struct call_key *k,
                         struct call_tensors *t) {
    t->inputs = t->outputs = NULL;
    if (CALLS_OF_SINGLES >> (k->call & 31) & 1) fewest = 2;               /* so a list is never known */
    int fewest_in = k->call == CALL_SCATTER && g->world > 1 ? 2 : fewest; /* a list of one is not one tensor */
    k->n_in = view_all(input, fewest_in, &t->inputs, t->in, &k->count, &k->dtype);
    if (k->n_in < 0) return false;
    if (input == output && k->n_in == 1) {
        t->out[0] = t->in[0], k->out_count = k->count, k->n_out = 1;
        t->written = t->inputs ? t->inputs : output;
        return k->call != CALL_ALL_TO_ALL_SINGLE || g->world == 1;
    }
    k->n_out = view_all(output, fewest, &t->outputs, t->out, &k->out_count, &k->dtype);
    t->written = t->outputs ? t->outputs : output;
    return k->n_out >= 0 && !overlaps(g, k, t);
}

/* Fills key and tensors from (call, detail, input, output), as view_tensors() does. In a group of several ranks, a list
 * of one is neither a tensor nor a list with one for each rank. */
static bool describe_call(const struct group *g, PyObject *const *args, struct call_key *k, struct call_tensors *t) {
    t->inputs = t->outputs = NULL;
    if (!PyLong_Check(args[0]) || !PyLong_Check(args[1])) return false;
    *k = (struct call_key){.call = PyLong_AsLongLong(args[0]), .detail = PyLong_AsLongLong(args[1]), .dtype = -1};
    if (k->detail == -1 && PyErr_Occurred()) { /* a root beyond 63 bits: Python words the error */
        PyErr_Clear();
        return false;
    }
    return view_tensors(g, args[2], args[3], g->world > 1 ? 2 : 1, k, t);
}

/* NULL: Python must look. */
static inline struct cached_plan *find_usable(struct group *g, const struct call_key *k, const struct call_tensors *t) {
    struct cached_plan *known = find(g->dispatch_cache, k);
    return known->plan == NULL || (known->effects & EFFECT_COPIES && tensors_tracked(t->written)) ? NULL : known;
}

/* Inlined into both callers: calling it took 10 ns of a barrier's 460. */
static inline __attribute__((always_inline)) int64_t run_cached_plan(struct group *g, const struct call_key *k,
                                                                     struct call_tensors *t) {
    struct cached_plan *known = find_usable(g, k, t);
    if (known == NULL) return -1;
    if (known->effects) tensors_change(t->written);
    int64_t timeout = atomic_load_explicit(&g->timeout, memory_order_relaxed);
    PyObject *capsule = Py_NewRef(known->capsule); /* another thread may make the table forget it meanwhile */
    struct plan *plan = known->plan;
    struct origin from = {.site = known->site};
    struct buffers b = {t->in, t->out, (int)k->n_in, (int)k->n_out};
    int64_t status;
    bool idle = async_idle(g);
    count_call(&g->collectives, false, !idle);
    WITHOUT_GIL_UNLESS(idle && exec_is_short(g, plan), status = async_run_in_turn(g, plan, &b, timeout, from, idle));
    Py_DECREF(capsule);
    return status;
}

PyObject *dispatch_cache_run(struct group *g, PyObject *const *args) {
    if (g->dispatch_cache == NULL) return PyLong_FromLong(-1);
    int64_t status = -1;
    struct call_key k;
    struct call_tensors t;
    if (describe_call(g, args, &k, &t)) status = run_cached_plan(g, &k, &t);
    release_tensors(&t);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(status);
}

static PyObject *run_cached(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (expect_arguments(n_args, 4, "run_cached") < 0) return NULL;
    return dispatch_cache_run(group_of(self), args);
}

/* For groups that have no cache: their calls are never known. */
static PyObject *call_unseen(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n)) {
    return PyLong_FromLong(-1);
}

/* run_cached_options(call, options, input, output): run_cached() with torch's options object. Returns one of enum
 * options if nothing was run. */
static PyObject *run_cached_options(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    if (expect_arguments(n_args, 4, "run_cached_options") < 0) return NULL;
    struct group *g = group_of(self);
    struct call_key k = {.call = PyLong_AsLongLong(args[0]), .dtype = -1};
    if (PyErr_Occurred()) return NULL;
    int64_t status = options_read(k.call, args[1], &k.detail);
    if (status != OPTIONS_FAST || g->dispatch_cache == NULL) return PyLong_FromLongLong(status ? status : OPTIONS_SLOW);
    struct call_tensors t;
    status = view_tensors(g, args[2], args[3], 1, &k, &t) ? run_cached_plan(g, &k, &t) : OPTIONS_SLOW;
    release_tensors(&t);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(status);
}

/* Queues a call, as run_cached_plan() runs one. A native.Request that keeps what the call needs, or -1. */
static PyObject *queue_cached_plan(struct group *g, const struct asked *a, PyObject *input, const struct call_key *k,
                                   const struct call_tensors *t) {
    struct cached_plan *known = find_usable(g, k, t);
    if (known == NULL) return PyLong_FromLong(-1);
    struct origin from = {.site = a->site_number, .exact_site = 1};
    struct buffers b = {(char *const *)t->in, (char *const *)t->out, (int)k->n_in, (int)k->n_out};
    int64_t timeout = atomic_load_explicit(&g->timeout, memory_order_relaxed);
    struct request *r = async_request(g, known->plan, &b, timeout, from);
    /* Whatever the table forgets, and lists lose. */
    PyObject *kept = PyTuple_Pack(3, known->capsule, t->inputs ? t->inputs : input, t->written);
    PyObject *written = known->effects ? t->written : NULL;
    PyObject *request = kept ? request_plain(a, kept, t->written) : NULL;
    Py_XDECREF(kept);
    if (request && request_submit(request, r, written, NULL)) {
        request_drop_ended(a->pending);
        return request;
    }
    if (request) request_cancel(request);
    else if (r) async_release(r);
    Py_XDECREF(request);
    if (!PyErr_ExceptionMatches(PyExc_OSError)) return NULL;
    PyErr_Clear(); /* no thread: Python says so, if it cannot start one either */
    return PyLong_FromLong(-1);
}

/* Fills key and tensors from (call, detail, input, output); `detail` is as run_cached() or run_cached_options() has it.
 * False: Python must look. */
static bool describe_queued(const struct group *g, PyObject *const *args, struct call_key *k, struct call_tensors *t) {
    if (PyLong_Check(args[1])) return describe_call(g, args, k, t);
    *k = (struct call_key){.call = PyLong_AsLongLong(args[0]), .dtype = -1};
    if (PyErr_Occurred() || args[1] == Py_None) return false;
    return options_read(k->call, args[1], &k->detail) == OPTIONS_ASYNC && view_tensors(g, args[2], args[3], 1, k, t);
}

PyObject *dispatch_cache_queue(struct group *g, const struct asked *a, PyObject *const *args) {
    struct call_key k;
    struct call_tensors t; /* not cleared as a whole: it is large */
    t.inputs = t.outputs = NULL;
    PyObject *request = NULL;
    bool known = g->dispatch_cache && describe_queued(g, args, &k, &t);
    if (known) request = queue_cached_plan(g, a, args[2], &k, &t);
    else if (!PyErr_Occurred()) request = PyLong_FromLong(-1);
    release_tensors(&t);
    return request;
}

/* cache_plan(call, detail, input, output, plan, site, effects): run_cached() will know calls of this kind, if it
 * can. */
static PyObject *cache_plan(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct group *g = group_of(self);
    if (expect_arguments(n_args, 7, "cache_plan") < 0) return NULL;
    struct plan *plan = PyCapsule_GetPointer(args[4], PLAN_CAPSULE);
    if (plan == NULL) return NULL;
    struct call_key k;
    struct call_tensors t;
    bool known = describe_call(g, args, &k, &t);
    release_tensors(&t);
    if (!known) return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    if (g->dispatch_cache == NULL && (g->dispatch_cache = calloc(1, sizeof *g->dispatch_cache)) == NULL)
        return PyErr_NoMemory();
    if (!make_room(g->dispatch_cache)) {
        if (g->dispatch_cache->size == 0) dispatch_cache_drop(g); /* run_cached() relies on slots to look at */
        return PyErr_NoMemory();
    }
    struct cached_plan *slot = find(g->dispatch_cache, &k);
    if (slot->plan == NULL) {
        *slot = (struct cached_plan){k, plan, Py_NewRef(args[4]), (uint32_t)PyLong_AsUnsignedLong(args[5]),
                                     (uint32_t)PyLong_AsUnsignedLong(args[6])};
        g->dispatch_cache->used++;
    }
    Py_RETURN_TRUE;
}

PyMethodDef group_dispatch_cache_methods[] = {
    METHOD(run_cached, METH_FASTCALL, "(call, detail, input, output) -> status, or -1: take the slow path"),
    METHOD(run_cached_options, METH_FASTCALL, "(call, options, input, output) -> status, or below 0: nothing was run"),
    METHOD(cache_plan, METH_FASTCALL,
           "(call, detail, input, output, plan, site, effects) -> whether run_cached() will know it"),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef functions[] = {
    METHOD(call_unseen, METH_FASTCALL,
           "(call, detail, input, output, async_op, name) -> -1, as SeenCalls.call_seen() of no group"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(CALL_ALL_TO_ALL_SINGLE), CONSTANT(CALL_SCATTER),  CONSTANT(CALLS_OF_SINGLES),
    CONSTANT(EFFECT_WRITES),          CONSTANT(EFFECT_COPIES), {NULL, 0},
};

int symcomm_add_dispatch_cache(PyObject *module) { return symcomm_add_part(module, functions, constants); }
