/* Python's view of the store's server. */
#include "module/module.h"

#include "store/server.h"

/* --- StoreServer ----------------------------------------------------------------------------------- */

struct server_object {
    PyObject_HEAD
    struct server *server; /* NULL once stopped */
};

static bool fill_listeners(PyObject *list, int listeners[MAX_LISTENERS], int *count) {
    Py_ssize_t size = PyList_Size(list);
    if (size < 1 || size > MAX_LISTENERS) {
        PyErr_Format(PyExc_ValueError, "StoreServer: listeners must be 1 to %d descriptors", MAX_LISTENERS);
        return false;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        listeners[i] = (int)PyLong_AsLong(PyList_GetItem(list, i));
        if (listeners[i] < 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "StoreServer: a listener is no descriptor");
            return false;
        }
    }
    *count = (int)size;
    return true;
}

static PyObject *server_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"listeners", "token",      "report_fd",   "max_key",           "max_value", "max_frame",
                            "max_keys",  "max_memory", "handshake_s", "token_is_optional", NULL};
    PyObject *list;
    const char *token = NULL;
    Py_ssize_t token_size = 0;
    int report_fd = -1, listeners[MAX_LISTENERS], count = 0, token_is_optional = 0;
    unsigned long long key, value, frame, keys, memory;
    double handshake_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!z#iKKKKKd|p", names, &PyList_Type, &list, &token, &token_size,
                                     &report_fd, &key, &value, &frame, &keys, &memory, &handshake_s,
                                     &token_is_optional))
        return NULL;
    if (!fill_listeners(list, listeners, &count)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    struct server_object *self = (struct server_object *)allocate(type, 0);
    if (self == NULL) return NULL;
    struct limits limits = {.key = key,
                            .value = value,
                            .frame = frame,
                            .count = keys,
                            .memory = memory,
                            .handshake_ns = (int64_t)(handshake_s * 1e9),
                            .token_is_optional = token_is_optional};
    self->server = server_start(listeners, count, &limits, (const uint8_t *)token, (size_t)token_size, report_fd);
    if (self->server == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *server_stop_method(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct server *server = ((struct server_object *)self)->server;
    ((struct server_object *)self)->server = NULL;
    if (server != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        server_stop(server);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

/* The thread did not survive fork(): leaves its memory alone, and only closes its descriptors. */
static PyObject *server_after_fork(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct server *server = ((struct server_object *)self)->server;
    ((struct server_object *)self)->server = NULL;
    if (server != NULL) server_close_in_child(server);
    Py_RETURN_NONE;
}

static PyObject *copy_reports(struct server *server) {
    char reports[REPORTS][REPORT_SIZE];
    pthread_mutex_lock(&server->report_lock);
    uint64_t count = server->report_count;
    memcpy(reports, server->reports, sizeof reports);
    pthread_mutex_unlock(&server->report_lock);
    PyObject *list = PyList_New(0);
    for (uint64_t i = count > REPORTS ? count - REPORTS : 0; i < count && list != NULL; i++) {
        const char *text = reports[i % REPORTS];
        append_new(&list, PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"));
    }
    return list;
}

static PyObject *server_stats(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    struct server *server = ((struct server_object *)self)->server;
    if (server == NULL) return PyDict_New();
    PyObject *reports = copy_reports(server);
    if (reports == NULL) return NULL;
#define COUNTER(name) (unsigned long long)atomic_load_explicit(&server->name, memory_order_relaxed)
    return Py_BuildValue("{sKsKsKsKsKsKsN}", "clients", COUNTER(clients), "accepted", COUNTER(accepted), "refused",
                         COUNTER(refused), "requests", COUNTER(requests), "keys", COUNTER(keys), "bytes",
                         COUNTER(bytes), "reasons", reports);
#undef COUNTER
}

static void server_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(server_stop_method(self, NULL));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef server_methods[] = {
    {"stop", server_stop_method, METH_NOARGS, "End the server; waits for its thread. Clients see a closed connection."},
    {"stats", server_stats, METH_NOARGS, "Counters, and the last reasons for which clients were refused."},
    {"after_fork_in_child", server_after_fork, METH_NOARGS, "Close the server's descriptors in a forked child."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot server_slots[] = {
    {Py_tp_doc, "A TCPStore server with a thread of its own that never takes the interpreter lock."},
    {Py_tp_new, server_new},
    {Py_tp_dealloc, server_dealloc},
    {Py_tp_methods, server_methods},
    {0, NULL},
};

static PyType_Spec server_spec = {"symcomm._core._native.StoreServer", sizeof(struct server_object), 0,
                                  Py_TPFLAGS_DEFAULT, server_slots};

/* --- the module ------------------------------------------------------------------------------------- */

int store_add_client(PyObject *module); /* store/client.c */

static PyObject *store_hmac(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *key, *message;
    Py_ssize_t key_size, message_size;
    uint8_t digest[SHA256_SIZE];
    if (!PyArg_ParseTuple(args, "y#y#", &key, &key_size, &message, &message_size)) return NULL;
    hmac_sha256(key, (size_t)key_size, message, (size_t)message_size, digest);
    return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

static PyMethodDef functions[] = {
    METHOD(store_hmac, METH_VARARGS, "(key, message): HMAC-SHA-256, as the server signs."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_store(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) < 0 || store_add_client(module) < 0) return -1;
    PyObject *type = PyType_FromSpec(&server_spec);
    if (type == NULL) return -1;
    if (PyModule_AddObjectRef(module, "StoreServer", type) < 0) {
        Py_DECREF(type);
        return -1;
    }
    Py_DECREF(type);
    return 0;
}
