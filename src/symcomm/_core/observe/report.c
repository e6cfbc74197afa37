/* Reports on a group for Python: where its ranks are, which path calls took, and how waits ended. */
#include "group/group_module.h"
#include "module/module.h"
#include "observe/flight.h"
#include "sync/fail.h"

struct rank_facts {
    int64_t seq; /* its number, as in struct group_facts */
    uint64_t signature, count, progress;
    int gone, message;
};

/* The group at one moment. */
struct group_facts {
    uint64_t cause;
    int64_t abort_seq, seq;
    struct rank_facts ranks[];
};

static struct rank_facts look_at(const struct visit *v, int r) {
    struct control *c = block_of(v, r);
    uint64_t even = atomic_load(&c->arrival[0].seq), odd = atomic_load(&c->arrival[1].seq);
    struct arrival *last = &c->arrival[even > odd ? 0 : 1];
    return (struct rank_facts){
        .seq = number_of(v->group, even > odd ? even : odd),
        .signature = atomic_load(&last->signature),
        .count = atomic_load(&last->count),
        .progress = atomic_load(&c->progress),
        .gone = sync_gone(v, r),
        .message = atomic_load(&c->p2p_awaits),
    };
}

/* Looks at a group; one that was left looks as if every rank had left or died. Makes no Python objects during the
 * visit: that may run finalizers, for which a rank that leaves would wait. */
static void look_at_all(struct group *g, struct group_facts *facts) {
    struct visit visit;
    visit_begin(&visit, g);
    struct control *me = block_of(&visit, g->rank);
    for (int r = 0; r < g->world; r++) facts->ranks[r] = look_at(&visit, r);
    facts->cause = atomic_load(&me->abort);
    uint64_t aborted = atomic_load(&me->abort_seq);
    facts->abort_seq = aborted ? number_of(g, aborted) : 0;
    visit_end(&visit);
    facts->seq = number_of(g, g->seq);
}

static PyObject *rank_report(int r, const struct rank_facts *f) {
    return Py_BuildValue("{s:i,s:L,s:K,s:K,s:K,s:i,s:i}", "rank", r, "seq", (long long)f->seq, "signature",
                         (unsigned long long)f->signature, "count", (unsigned long long)f->count, "progress",
                         (unsigned long long)f->progress, "gone", f->gone, "message", f->message);
}

static PyObject *report(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct group *g = group_of(self);
    struct group_facts *facts = PyMem_Malloc(sizeof *facts + (size_t)g->world * sizeof facts->ranks[0]);
    if (facts == NULL) return PyErr_NoMemory();
    look_at_all(g, facts);
    PyObject *ranks = PyList_New(0);
    for (int r = 0; ranks && r < g->world; r++) append_new(&ranks, rank_report(r, &facts->ranks[r]));
    uint64_t cause = facts->cause;
    int64_t abort_seq = facts->abort_seq, seq = facts->seq;
    PyMem_Free(facts);
    if (ranks == NULL) return NULL;
    return Py_BuildValue("{s:i,s:i,s:i,s:L,s:L,s:d,s:N}", "status", (int)(cause & 0xff), "culprit",
                         (int)(cause >> 8 & 0xffff), "origin", (int)(cause >> 24 & 0xffff), "abort_seq",
                         (long long)abort_seq, "seq", (long long)seq, "running",
                         symcomm_seconds_since(atomic_load(&g->started)), "ranks", ranks);
}

/* (looked, yielded, slept, first looks at present): see struct wait_counts */
static PyObject *waits(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct group *g = group_of(self);
    const struct wait_counts *w = &g->waits;
    return Py_BuildValue("KKKi", (unsigned long long)w->looked, (unsigned long long)w->yielded,
                         (unsigned long long)w->slept, spins_now(g));
}

static PyObject *as_dict(const struct ways *w) {
    unsigned long long n[2][2];
    for (int i = 0; i < 4; i++) n[i / 2][i % 2] = atomic_load_explicit(&w->taken[i / 2][i % 2], memory_order_relaxed);
    for (int i = 0; i < 2; i++) {
        uint64_t moved = atomic_load_explicit(&w->by_waiter[i], memory_order_relaxed);
        n[i][0] += moved, n[i][1] -= moved;
    }
    return Py_BuildValue("{s:K,s:K,s:K,s:K}", "short", n[0][0] + n[0][1], "long", n[1][0] + n[1][1], "inline",
                         n[0][0] + n[1][0], "queued", n[0][1] + n[1][1]);
}

static PyObject *ways(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct group *g = group_of(self);
    return Py_BuildValue("{s:N,s:N,s:N}", "collectives", as_dict(&g->collectives), "messages", as_dict(&g->messages),
                         "puts", as_dict(&g->puts));
}

/* Whether this rank reports long waits in an operation: the first rank that asks does. */
static PyObject *tells(PyObject *self, PyObject *arg) {
    struct group *g = group_of(self);
    uint64_t seq = PyLong_AsUnsignedLongLong(arg) + (uint64_t)atomic_load(&g->unnumbered),
             mine = seq << 16 | (uint64_t)g->rank;
    if (PyErr_Occurred()) return NULL;
    struct visit visit;
    visit_begin(&visit, g);
    _Atomic uint64_t *told = &block_of(&visit, 0)->told;
    uint64_t seen = atomic_load(told);
    while (seen >> 16 != (seq & 0xffffffffffff) && !atomic_compare_exchange_weak(told, &seen, mine)) {}
    bool is_mine = atomic_load(told) == mine;
    visit_end(&visit);
    return PyBool_FromLong(is_mine);
}

static PyObject *copies(PyObject *self, PyObject *Py_UNUSED(none)) {
    static const char *const names[COPIES_KINDS] = {"no_plan", "direct", "attached", "ordinary_here", "ordinary_there"};
    const struct copy_counts *n = group_of(self)->copies;
    PyObject *all = PyDict_New();
    for (int i = 0; all && i < COPIES_KINDS; i++) {
        unsigned long long calls = atomic_load_explicit(&n[i].calls, memory_order_relaxed);
        unsigned long long bytes = atomic_load_explicit(&n[i].bytes, memory_order_relaxed);
        PyObject *one = Py_BuildValue("{s:K,s:K}", "calls", calls, "bytes", bytes);
        if (one == NULL || PyDict_SetItemString(all, names[i], one) < 0) Py_CLEAR(all);
        Py_XDECREF(one);
    }
    return all;
}

PyMethodDef group_report_methods[] = {
    METHOD(report, METH_NOARGS, "() -> what this rank can see of all ranks"),
    METHOD(tells, METH_O, "(seq) -> whether this rank tells of long waits in that operation"),
    METHOD(ways, METH_NOARGS, "() -> how many collectives, messages and puts took which way"),
    METHOD(copies, METH_NOARGS, "() -> how many collectives and bytes went directly, and why the others did not"),
    METHOD(waits, METH_NOARGS,
           "() -> how many of its long waits were over by looking, yielding, sleeping; and how often it looks first"),
    {NULL, NULL, 0, NULL},
};

static const struct constant constants[] = {
    CONSTANT(FLIGHT_ORDINARY_HERE), CONSTANT(FLIGHT_ORDINARY_THERE),
    CONSTANT(FLIGHT_DIRECT),        CONSTANT(FLIGHT_MESSAGE),
    CONSTANT(FLIGHT_ATTACHED),      CONSTANT(FLIGHT_ATTACHED_MESSAGE),
    CONSTANT(FLIGHT_PATHS),         CONSTANT(FLIGHT_SLOW_PATH),
    CONSTANT(FLIGHT_QUEUED),        {NULL, 0},
};

int symcomm_add_report(PyObject *module) { return symcomm_add_part(module, NULL, constants); }
