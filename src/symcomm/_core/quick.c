/* Blocking calls of a kind seen before: look at the tensors, find the plan, run it, all without Python. */
#include <stdlib.h>

#include "async.h"
#include "common.h"
#include "exec.h"
#include "tensor.h"

#define SLOTS 4096 /* a power of two; when three quarters are full it starts anew */

struct kind { /* what a plan depends on */
    int64_t call, detail, dtype, count, out_count;
};

struct known_plan {
    struct kind kind;
    const struct plan *plan;
    PyObject *capsule; /* owns the plan */
};

struct quick {
    int used;
    struct known_plan slots[SLOTS];
};

static uint64_t hash_of(const struct kind *k) {
    uint64_t h = (uint64_t)k->call * 0x9e3779b97f4a7c15u ^ (uint64_t)k->count;
    h = (h ^ (uint64_t)k->detail << 8 ^ (uint64_t)k->dtype) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 32 ^ (uint64_t)k->out_count) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 29;
}

static struct known_plan *find(struct quick *q, const struct kind *k) {
    for (uint64_t i = hash_of(k);; i++) {
        struct known_plan *slot = &q->slots[i % SLOTS];
        if (slot->plan == NULL || memcmp(&slot->kind, k, sizeof *k) == 0) return slot;
    }
}

static void forget_all(struct quick *q) {
    for (int i = 0; i < SLOTS; i++) {
        PyObject *capsule = q->slots[i].capsule;
        q->slots[i] = (struct known_plan){0};
        Py_XDECREF(capsule);
    }
    q->used = 0;
}

void quick_drop(struct group *g) {
    if (g->quick) forget_all(g->quick);
    free(g->quick);
    g->quick = NULL;
}

/* Fills kind and buffers from (group, call, detail, input, output). False: Python must look. */
static bool describe(PyObject *const *args, struct kind *k, char **in, char **out) {
    struct tensor_view input, output;
    if (!PyLong_Check(args[1]) || !PyLong_Check(args[2]) || !tensor_view(args[3], &input)) return false;
    if (args[4] == args[3]) output = input;
    else if (!tensor_view(args[4], &output) || output.dtype != input.dtype) return false;
    k->call = PyLong_AsLongLong(args[1]), k->detail = PyLong_AsLongLong(args[2]);
    k->dtype = input.dtype, k->count = input.count, k->out_count = output.count;
    *in = input.address, *out = output.address;
    return true;
}

/* again(group, call, detail, input, output, timeout_ns) -> 0, a failure's status, or -1: not known, take the long way */
static PyObject *again(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    struct group *g = n_args == 6 ? PyCapsule_GetPointer(args[0], "symcomm.group") : NULL;
    if (g == NULL) return n_args == 6 ? NULL : PyErr_Format(PyExc_TypeError, "again takes 6 arguments");
    struct kind k;
    char *in, *out;
    if (g->quick == NULL || !describe(args, &k, &in, &out)) return PyLong_FromLong(-1);
    struct known_plan *known = find(g->quick, &k);
    if (known->plan == NULL) return PyLong_FromLong(-1);
    int64_t timeout = PyLong_AsLongLong(args[5]);
    PyObject *capsule = Py_NewRef(known->capsule); /* another thread may make the table forget it meanwhile */
    const struct plan *plan = known->plan;
    struct buffers b = {&in, &out, 1, 1};
    int64_t status;
    WITHOUT_LOCK(status = async_idle(g) ? exec_run(g, plan, &b, timeout) : async_run_queued(g, plan, &b, timeout));
    Py_DECREF(capsule);
    if ((status & 0xff) == STATUS_INTERRUPTED && PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(status);
}

/* remember(group, call, detail, input, output, plan): again() will know calls of this kind, if it can. */
static PyObject *remember(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    struct group *g = n_args == 6 ? PyCapsule_GetPointer(args[0], "symcomm.group") : NULL;
    struct plan *plan = g ? PyCapsule_GetPointer(args[5], "symcomm.plan") : NULL;
    if (plan == NULL) return g || n_args == 6 ? NULL : PyErr_Format(PyExc_TypeError, "remember takes 6 arguments");
    struct kind k;
    char *in, *out;
    if (!describe(args, &k, &in, &out)) Py_RETURN_FALSE;
    if (g->quick == NULL && (g->quick = calloc(1, sizeof *g->quick)) == NULL) return PyErr_NoMemory();
    if (g->quick->used > SLOTS * 3 / 4) forget_all(g->quick);
    struct known_plan *slot = find(g->quick, &k);
    if (slot->plan == NULL) {
        *slot = (struct known_plan){k, plan, Py_NewRef(args[5])};
        g->quick->used++;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"again", (PyCFunction)(void (*)(void))again, METH_FASTCALL,
     "again(group, call, detail, input, output, timeout_ns) -> status, or -1: take the long way"},
    {"remember", (PyCFunction)(void (*)(void))remember, METH_FASTCALL,
     "remember(group, call, detail, input, output, plan) -> whether again() will know it"},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_quick(PyObject *module) { return PyModule_AddFunctions(module, methods); }
