/* The Python type native.Request. Works are made of it, so that waiting for a call of a known kind needs no Python. */
#include "exec/request_module.h"

#include <stdlib.h>
#include <structmember.h>

#include "exec/exec.h"
#include "group/group_module.h"
#include "module/gil.h"
#include "torch/tensor.h"

struct request_object {
    PyObject_HEAD;
    struct request *request;        /* NULL: not queued yet, or never */
    PyObject *kept, *state, *group; /* until it has ended: tensors that the core uses, and whose call it is */
    PyObject *pending;              /* the list that keeps it as long, or NULL */
    PyObject *call, *site, *results, *outputs, *callbacks, *error, *lock; /* Python's, for what is rarely needed */
    int64_t started, ended;                                               /* ns; 0: not yet */
    char settled;                                                         /* bool: its end was seen here */
    char is_plain; /* bool: then there is nothing else to do, unless it failed */
};

static PyTypeObject *request_type;

static struct request_object *own(PyObject *self) { return (struct request_object *)self; }

struct request *request_of(PyObject *object) {
    if (!PyObject_TypeCheck(object, request_type)) PyErr_SetString(PyExc_TypeError, "not a Request");
    else if (own(object)->request == NULL) PyErr_SetString(PyExc_ValueError, "the request was not queued");
    else return own(object)->request;
    return NULL;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static PyObject *allocate(PyTypeObject *type) {
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self) own(self)->started = symcomm_now_ns();
    return self;
}

static PyObject *request_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    return allocate(type);
}

static void fill(struct request_object *o, PyObject *state, PyObject *group, PyObject *call, PyObject *site) {
    o->state = Py_NewRef(state), o->group = Py_NewRef(group), o->call = Py_NewRef(call), o->site = Py_NewRef(site);
}

static int request_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *state = Py_None, *group = Py_None, *call = Py_None, *site = Py_None, *results = Py_None;
    if (!PyArg_ParseTuple(args, "|OOOOO", &state, &group, &call, &site, &results)) return -1;
    if (own(self)->state) return PyErr_Format(PyExc_TypeError, "a Request is made once"), -1;
    fill(own(self), state, group, call, site);
    own(self)->results = Py_NewRef(results);
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    struct request_object *o = own(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->kept);
    Py_VISIT(o->state);
    Py_VISIT(o->group);
    Py_VISIT(o->pending);
    Py_VISIT(o->results);
    Py_VISIT(o->outputs);
    Py_VISIT(o->callbacks);
    Py_VISIT(o->error);
    return 0;
}

/* What it needs, and who needs it, only until it has ended. */
static void let_go(struct request_object *o) {
    PyObject *pending = o->pending;
    o->pending = NULL;
    if (pending && PyList_Check(pending)) request_drop_ended(pending);
    Py_XDECREF(pending);
    Py_CLEAR(o->kept);
    Py_CLEAR(o->state);
    Py_CLEAR(o->group);
}

static int clear(PyObject *self) {
    struct request_object *o = own(self);
    let_go(o);
    Py_CLEAR(o->results);
    Py_CLEAR(o->outputs);
    Py_CLEAR(o->callbacks);
    Py_CLEAR(o->error);
    return 0;
}

static bool has_ended_well(const struct request_object *o) {
    struct request *r = o->request;
    return o->is_plain && r && atomic_load_explicit(&r->done, memory_order_acquire) && r->status == STATUS_OK;
}

static void settle(struct request_object *o) {
    o->ended = o->request && o->request->ended ? o->request->ended : symcomm_now_ns();
    o->settled = true;
    let_go(o);
}

static void request_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct request_object *o = own(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_XDECREF(o->call);
    Py_XDECREF(o->site);
    Py_XDECREF(o->lock);
    if (o->request) async_release(o->request);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* --- queueing ----------------------------------------------------------------------------------------------------- */

static void call_back(struct request *r) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *callback = r->context;
    PyObject *result = PyObject_CallFunction(callback, "L", (long long)r->status);
    if (result == NULL) PyErr_WriteUnraisable(callback);
    Py_XDECREF(result);
    Py_DECREF(callback);
    PyGILState_Release(state);
}

static void watch_version(struct request *r, PyObject *written) {
    _Atomic uint32_t *version = tensor_version(written);
    if (version) r->versions[r->n_versions++] = version;
}

/* The caller may look at the tensors, or save them for backward, while the operation runs: their versions are raised
 * now and when it ends. Until then the caller keeps the tensors, as it does their memory. False: no memory. */
static bool watch_versions(struct request *r, PyObject *written) {
    bool several = PyTuple_Check(written);
    Py_ssize_t n = several ? PyTuple_Size(written) : 1;
    tensors_change(written);
    if (n == 0) return true;
    r->versions = n == 1 ? &r->one_version : malloc((size_t)n * sizeof *r->versions);
    if (r->versions == NULL) return false;
    if (!several) watch_version(r, written);
    for (Py_ssize_t i = 0; several && i < n; i++) watch_version(r, PyTuple_GetItem(written, i));
    return true;
}

bool request_submit(PyObject *object, struct request *r, PyObject *written, PyObject *callback) {
    if (r == NULL) return PyErr_NoMemory() != NULL;
    if (!PyObject_TypeCheck(object, request_type) || own(object)->request) {
        async_release(r);
        return PyErr_Format(PyExc_TypeError, "not a Request that was not queued yet") != NULL;
    }
    if (written && !watch_versions(r, written)) {
        async_release(r);
        return PyErr_NoMemory() != NULL;
    }
    if (callback) r->context = Py_NewRef(callback), r->finished = call_back;
    own(object)->request = r;
    if (async_submit(r->group, r) == 0) {
        count_call(&r->group->collectives, (r->from.way & FLIGHT_SLOW_PATH) != 0, true);
        return true;
    }
    own(object)->request = NULL;
    Py_XDECREF((PyObject *)r->context);
    async_release(r);
    return PyErr_Format(PyExc_OSError, "can't start new thread") != NULL;
}

PyObject *request_plain(const struct asked *a, PyObject *kept, PyObject *target) {
    PyObject *self = allocate((PyTypeObject *)a->type);
    if (self == NULL) return NULL;
    struct request_object *o = own(self);
    fill(o, a->state, a->group, a->call, a->site);
    o->kept = Py_NewRef(kept), o->is_plain = true;
    o->results = target == Py_None       ? PyTuple_New(0)
                 : PyTuple_Check(target) ? Py_NewRef(target)
                                         : PyTuple_Pack(1, target);
    o->pending = Py_NewRef(a->pending);
    if (o->results && PyList_Append(a->pending, self) == 0) return self;
    Py_DECREF(self);
    return NULL;
}

void request_cancel(PyObject *object) { settle(own(object)); }

void request_drop_ended(PyObject *pending) {
    while (PyList_Size(pending) > 0) {
        PyObject *first = PyList_GetItem(pending, 0);
        struct request_object *o = own(first);
        if (!PyObject_TypeCheck(first, request_type) || !(o->settled || has_ended_well(o))) return;
        Py_INCREF(first);
        if (PyList_SetSlice(pending, 0, 1, NULL) < 0) PyErr_Clear();
        Py_CLEAR(o->pending); /* which its caller holds: settle() would come back here, once for each */
        if (!o->settled) settle(o);
        Py_DECREF(first); /* which may run any code, another call too */
    }
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* As async_wait() says it; STATUS_TIMEOUT: r is not done. The forked child of a rank has nothing to wait for. A
 * negative timeout only looks. */
static int wait_for_end(struct request *r, int64_t timeout, bool runs) {
    if (atomic_load_explicit(&r->done, memory_order_acquire)) return STATUS_OK;
    if (r->group->forked) return STATUS_LEFT; /* it is the parent's, and ends there */
    if (timeout < 0) return STATUS_TIMEOUT;
    bool soon = runs && timeout == 0 && async_is_next(r) && exec_is_short(r->group, r->plan);
    int status;
    WITHOUT_GIL_UNLESS(soon, status = async_wait(r, timeout, runs));
    return status;
}

static PyObject *wait_for(PyObject *self, PyObject *args) {
    long long timeout;
    int runs;
    if (!PyArg_ParseTuple(args, "Lp", &timeout, &runs)) return NULL;
    struct request *r = own(self)->request;
    if (r == NULL) Py_RETURN_NONE;
    int status = wait_for_end(r, timeout, runs);
    if (PyErr_Occurred()) return NULL;
    if (status == STATUS_NESTED) return PyLong_FromLong(-1);
    if (status == STATUS_LEFT) return PyLong_FromLong(STATUS_LEFT);
    return status == STATUS_OK ? PyLong_FromLongLong(r->status) : Py_NewRef(Py_None);
}

static PyObject *end(PyObject *self, PyObject *Py_UNUSED(none)) {
    if (!own(self)->settled) settle(own(self));
    Py_RETURN_NONE;
}

/* Waits for one whose end needs no Python. False: look closer, or there is an exception. */
static bool finish(struct request_object *o) {
    if (!o->is_plain) return false;
    if (o->settled) return true;
    wait_for_end(o->request, 0, true);
    if (PyErr_Occurred() || !has_ended_well(o)) return false;
    settle(o);
    return true;
}

static PyObject *py_wait(PyObject *self, PyObject *const *args, Py_ssize_t n_args, PyObject *names) {
    PyObject *timeout;
    if (!read_timeout(args, n_args, names, &timeout)) return NULL;
    if (timeout == Py_None && finish(own(self))) Py_RETURN_TRUE;
    return PyErr_Occurred() ? NULL : PyObject_CallMethod(self, "_wait", "(O)", timeout);
}

static PyObject *give_up(PyObject *self, PyObject *Py_UNUSED(none)) {
    struct request *r = own(self)->request;
    if (r == NULL) Py_RETURN_NONE;
    WITHOUT_GIL(async_give_up(r));
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(r->status);
}

/* --- facts -------------------------------------------------------------------------------------------------------- */

static PyObject *get_number(PyObject *self, void *Py_UNUSED(closure)) {
    struct request *r = own(self)->request;
    return r ? PyLong_FromLongLong(r->number) : Py_NewRef(Py_None);
}

static PyObject *get_age(PyObject *self, void *Py_UNUSED(closure)) {
    return PyFloat_FromDouble((double)(symcomm_now_ns() - own(self)->started) / 1e9);
}

static PyObject *get_seconds(PyObject *self, void *Py_UNUSED(closure)) {
    struct request_object *o = own(self);
    return o->ended ? PyFloat_FromDouble((double)(o->ended - o->started) / 1e9) : Py_NewRef(Py_None);
}

/* Only whoever looks at the rest needs it. */
static PyObject *get_lock(PyObject *self, void *Py_UNUSED(closure)) {
    struct request_object *o = own(self);
    if (o->lock == NULL) {
        PyObject *threading = PyImport_ImportModule("threading"), *lock = NULL;
        if (threading) lock = PyObject_CallMethod(threading, "RLock", NULL);
        Py_XDECREF(threading);
        if (lock == NULL) return NULL;
        if (o->lock == NULL) o->lock = lock; /* else another thread was faster, or a signal handler */
        else Py_DECREF(lock);
    }
    return Py_NewRef(o->lock);
}

static PyObject *drop_ended(PyObject *Py_UNUSED(self), PyObject *pending) {
    if (!PyList_Check(pending)) return PyErr_Format(PyExc_TypeError, "drop_ended takes a list");
    request_drop_ended(pending);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(
        wait_for, METH_VARARGS,
        "(timeout_ns, runs) -> status; None when it is not done by then; -1: this thread is in the middle of what it "
        "stands behind. A negative timeout only looks."),
    METHOD_AS(
        wait, py_wait, METH_FASTCALL | METH_KEYWORDS,
        "($self, timeout=None)\n--\n\nBlock until done; returns True, or raises what the operation failed with. If "
        "``timeout`` passes first, it and\nthe group fail with a DeadlineError on every rank that has not done it, as "
        "at the call's own time-out."),
    METHOD_AS(_end, end, METH_NOARGS, "(): it has ended, and needs nothing any more."),
    METHOD(give_up, METH_NOARGS, "() -> status, once nobody uses its tensors any more; None: it was never queued"),
    {NULL, NULL, 0, NULL},
};

#define FIELD(NAME, TYPE, FIELD, WORDS) {NAME, TYPE, offsetof(struct request_object, FIELD), 0, WORDS}

static PyMemberDef members[] = {
    FIELD("call", T_OBJECT, call, "its name"),
    FIELD("_site", T_OBJECT, site, "file and line"),
    FIELD("results", T_OBJECT, results, "the caller's tensors that it writes"),
    FIELD("outputs", T_OBJECT, outputs, "buffers of these that have to be finished; None: none"),
    FIELD("callbacks", T_OBJECT, callbacks, "to be called at its end; None: none"),
    FIELD("_error", T_OBJECT, error, "how it ended, or None"),
    FIELD("kept", T_OBJECT, kept, "tensors that the core still reads or writes"),
    FIELD("_state", T_OBJECT, state, "of its group, until it has ended"),
    FIELD("_group", T_OBJECT, group, "until it has ended: nobody else may hold the group"),
    FIELD("pending", T_OBJECT, pending, "the list that keeps it until it has ended, or None"),
    FIELD("settled", T_BOOL, settled, "whether its end was seen"),
    FIELD("is_plain", T_BOOL, is_plain, "whether its end needs no Python, unless it failed"),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef facts[] = {
    {"_lock", get_lock, NULL, "of what follows its end", NULL},
    {"number", get_number, NULL, "which operation of its group it is", NULL},
    {"age", get_age, NULL, "seconds since the call", NULL},
    {"seconds", get_seconds, NULL, "from the call to its end, once known", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An asynchronous call."},
    {Py_tp_new, request_new},
    {Py_tp_init, request_init},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, request_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, facts},
    {0, NULL},
};

static PyType_Spec spec = {"symcomm._core._native.Request", sizeof(struct request_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

static PyMethodDef functions[] = {
    METHOD(drop_ended, METH_O, "(pending): drop the first of these Requests, as long as they have ended."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_request(PyObject *module) {
    if (symcomm_add_part(module, functions, NULL) < 0) return -1;
    request_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return request_type ? PyModule_AddObjectRef(module, "Request", (PyObject *)request_type) : -1;
}
