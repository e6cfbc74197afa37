/* What Python is told of a group: where its ranks are, which way calls took, and how long waits ended. */
#include "module/arguments.h"
#include "module/module.h"
#include "observe/flight.h"
#include "sync/sync.h"

static PyObject *rank_report(struct group *g, int r) {
    struct control *c = g->control[r];
    uint64_t even = atomic_load(&c->arrival[0].seq), odd = atomic_load(&c->arrival[1].seq);
    struct arrival *last = &c->arrival[even > odd ? 0 : 1];
    return Py_BuildValue(
        "{s:i,s:K,s:K,s:K,s:K,s:i,s:i}", "rank", r, "seq", (unsigned long long)(even > odd ? even : odd), "signature",
        (unsigned long long)atomic_load(&last->signature), "count", (unsigned long long)atomic_load(&last->count),
        "progress", (unsigned long long)atomic_load(&c->progress), "gone", sync_gone(g, r), "message",
        (int)atomic_load(&c->p2p_awaits));
}

static PyObject *group_report(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    PyObject *ranks = PyList_New(0);
    for (int r = 0; ranks && r < g->world; r++) {
        PyObject *one = rank_report(g, r);
        if (one == NULL || PyList_Append(ranks, one) < 0) Py_CLEAR(ranks);
        Py_XDECREF(one);
    }
    if (ranks == NULL) return NULL;
    struct control *me = g->control[g->rank];
    uint64_t cause = atomic_load(&me->abort);
    double running = symcomm_seconds_since(atomic_load(&g->started));
    return Py_BuildValue("{s:i,s:i,s:i,s:K,s:K,s:d,s:N}", "status", (int)(cause & 0xff), "culprit",
                         (int)(cause >> 8 & 0xffff), "origin", (int)(cause >> 24 & 0xffff), "abort_seq",
                         (unsigned long long)atomic_load(&me->abort_seq), "seq", (unsigned long long)g->seq, "running",
                         running, "ranks", ranks);
}

/* group_waits(group) -> (looked, yielded, slept, first looks at present): see struct wait_counts */
static PyObject *group_waits(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    const struct wait_counts *w = &g->waits;
    return Py_BuildValue("KKKi", (unsigned long long)w->looked, (unsigned long long)w->yielded,
                         (unsigned long long)w->slept, spins_now(g));
}

static PyObject *as_dict(const struct ways *w) {
    unsigned long long n[2][2];
    for (int i = 0; i < 4; i++) n[i / 2][i % 2] = atomic_load_explicit(&w->taken[i / 2][i % 2], memory_order_relaxed);
    return Py_BuildValue("{s:K,s:K,s:K,s:K}", "short", n[0][0] + n[0][1], "long", n[1][0] + n[1][1], "inline",
                         n[0][0] + n[1][0], "queued", n[0][1] + n[1][1]);
}

static PyObject *group_ways(PyObject *Py_UNUSED(self), PyObject *arg) {
    struct group *g = to_group(arg);
    if (g == NULL) return NULL;
    return Py_BuildValue("{s:N,s:N,s:N}", "collectives", as_dict(&g->collectives), "messages", as_dict(&g->messages),
                         "puts", as_dict(&g->puts));
}

static PyMethodDef methods[] = {
    METHOD(group_report, METH_O, "(group) -> what this rank can see of all ranks"),
    METHOD(group_ways, METH_O, "(group) -> how many collectives, messages and puts took which way"),
    METHOD(
        group_waits, METH_O,
        "(group) -> how many of its long waits were over by looking, yielding, sleeping; and how often it looks first"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(FLIGHT_DIRECT), CONSTANT(FLIGHT_MESSAGE),   CONSTANT(FLIGHT_ATTACHED), CONSTANT(FLIGHT_ATTACHED_MESSAGE),
    CONSTANT(FLIGHT_PATHS),  CONSTANT(FLIGHT_SLOW_PATH), CONSTANT(FLIGHT_QUEUED),   {NULL, 0},
};

int symcomm_add_report(PyObject *module) { return symcomm_add_part(module, methods, constants); }
