/* Views tensors: torch's by a few words of its C++ objects where their places are known, or else through DLPack by a C
 * function that torch exports for it; NumPy's by a method. */
#include "torch/tensor.h"

#include "reduce/types.h"

/* The parts of DLPack 1.x that we read. The layout is fixed by that standard. */
struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_managed {
    struct dl_tensor tensor;
    void *context, *deleter;
};

struct dl_exchange {
    uint32_t major, minor;
    void *previous;
    void *allocate, *to_managed, *from_managed;
    int (*view)(void *object, struct dl_tensor *out);
    void *stream;
};

enum { DL_CPU = 1, DL_CUDA };
enum {
    DL_INT,
    DL_UINT,
    DL_FLOAT,
    DL_BFLOAT = 4,
    DL_COMPLEX,
    DL_BOOL,
    DL_E4M3FN = 10,
    DL_E4M3FNUZ,
    DL_E5M2,
    DL_E5M2FNUZ
};

#define MAX_TYPES 4
static PyTypeObject *known[MAX_TYPES];
static int (*exchange_view)(void *object, struct dl_tensor *out);
static PyTypeObject *array_type; /* NumPy's, once a program has passed one */
static PyObject *export_array;   /* its __dlpack__ */

/* DLPack does not say that a tensor is the negative or the conjugate of its memory, that it stands for zeros that were
 * never written, or that its storage was given away. torch's C++ object says the first three in its set of dispatch
 * keys, and the last by where in its storage the tensor begins. symcomm/group/torch_layout.py finds these two words. */
#define MAX_PLAIN 4
static struct {
    Py_ssize_t object_at;         /* of the pointer to the C++ object in the Python object; 0: not known */
    Py_ssize_t keys_at, start_at; /* in the C++ object */
    Py_ssize_t counter_at;        /* there too: of the pointer to the version counter, which views share; -1: unknown */
    Py_ssize_t version_at;        /* in the counter */
    uint64_t plain[MAX_PLAIN];    /* keys of tensors whose value is what their memory holds; 0: no more of them */
    uint64_t plain_on_gpu[MAX_PLAIN];
} layout;

/* Where torch's objects say where a tensor's values are, and how many of what type (symcomm/group/torch_values.py). */
#define MOST_CODES 64 /* torch's numbers of dtypes are below that */
static struct {
    bool known;
    Py_ssize_t storage_at, count_at, code_at, dense_at; /* in the C++ object */
    Py_ssize_t data_at, asks_at;                        /* in its storage; asks: whether torch has to be asked */
    unsigned char dense;                                /* the bit of contiguous tensors */
    uint8_t dtypes[MOST_CODES];                         /* 255: none of ours */
} values;

static PyObject *is_neg, *storage_offset; /* methods of the first type, asked where the layout is not known */
static PyObject *increment_version, *is_grad_enabled, *requires_grad; /* functions of torch's; a name */
static _Thread_local bool keeps_versions;                             /* for calls that this thread makes now */
static bool (*asks_requires_grad)(const void *cpp_object);            /* torch's C++ form of it; NULL: not known */

static int dtype_of(const struct dl_tensor *t) {
    if (t->lanes != 1) return -1;
    if (t->code == DL_COMPLEX) return t->bits == 64 ? DT_COMPLEX64 : t->bits == 128 ? DT_COMPLEX128 : -1;
    int size = t->bits == 8 ? 0 : t->bits == 16 ? 1 : t->bits == 32 ? 2 : t->bits == 64 ? 3 : -1;
    if (size < 0) return -1;
    static const int ints[] = {DT_INT8, DT_INT16, DT_INT32, DT_INT64};
    static const int uints[] = {DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64};
    static const int floats[] = {-1, DT_FLOAT16, DT_FLOAT32, DT_FLOAT64};
    switch (t->code) {
    case DL_INT: return ints[size];
    case DL_UINT: return uints[size];
    case DL_FLOAT: return floats[size];
    case DL_BFLOAT: return size == 1 ? DT_BFLOAT16 : -1;
    case DL_BOOL: return size == 0 ? DT_BOOL : -1;
    case DL_E4M3FN: return DT_FLOAT8_E4M3FN;
    case DL_E4M3FNUZ: return DT_FLOAT8_E4M3FNUZ;
    case DL_E5M2: return DT_FLOAT8_E5M2;
    case DL_E5M2FNUZ: return DT_FLOAT8_E5M2FNUZ;
    default: return -1;
    }
}

/* Elements of a contiguous tensor, or -1. */
static int64_t contiguous_count(const struct dl_tensor *t) {
    int64_t count = 1;
    bool dense = true;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        if (t->strides && t->shape[d] != 1 && t->strides[d] != count) dense = false;
        count *= t->shape[d];
    }
    return dense || count == 0 ? count : -1;
}

static const char *cpp_object(PyObject *tensor) { return *(const char **)(void *)((char *)tensor + layout.object_at); }

static bool has_keys(PyObject *tensor, const uint64_t *plain) {
    uint64_t keys;
    memcpy(&keys, cpp_object(tensor) + layout.keys_at, sizeof keys);
    for (int i = 0; i < MAX_PLAIN && plain[i]; i++)
        if (plain[i] == keys) return true;
    return false;
}

static bool says_false(PyObject *method, PyObject *tensor) {
    PyObject *answer = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer == Py_False;
}

/* Where in its storage a tensor begins, in elements; -1: unknown. */
static int64_t start_of(PyObject *tensor) {
    int64_t start = -1;
    if (layout.object_at) {
        memcpy(&start, cpp_object(tensor) + layout.start_at, sizeof start);
        return start;
    }
    PyObject *answer = PyObject_CallFunctionObjArgs(storage_offset, tensor, NULL);
    if (answer) start = PyLong_AsLongLong(answer);
    Py_XDECREF(answer);
    PyErr_Clear();
    return start;
}

/* A storage without memory begins at 0, and the tensors in it behind that. */
static bool has_memory(PyObject *tensor, const struct tensor_view *view) {
    if (view->count == 0) return true;
    int64_t start = start_of(tensor);
    return start >= 0 && (uintptr_t)view->address != (uintptr_t)start * symcomm_itemsize[view->dtype];
}

static inline bool is_known(PyTypeObject *type) {
    return exchange_view && (type == known[0] || type == known[1] || type == known[2] || type == known[3]);
}

/* All classes of tensors have the same C++ object. */
static inline bool is_tensor(PyObject *object) {
    return is_known(Py_TYPE(object)) || (exchange_view && PyType_IsSubtype(Py_TYPE(object), known[0]));
}

/* False: it is not contiguous, or has a dtype that we do not know. */
static inline bool describe(const struct dl_tensor *t, struct tensor_view *view) {
    view->dtype = dtype_of(t);
    view->count = contiguous_count(t);
    view->address = (char *)t->data + t->byte_offset;
    return view->dtype >= 0 && view->count >= 0;
}

/* The same, and fills `t`. False also if torch cannot view the tensor. */
static inline bool look(PyObject *tensor, struct dl_tensor *t, struct tensor_view *view) {
    if (exchange_view(tensor, t)) {
        PyErr_Clear();
        return false;
    }
    return describe(t, view);
}

/* NumPy refuses to export arrays that are read-only, in another byte order or of an odd type. The array outlives its
 * export. */
static int view_array(PyObject *array, struct tensor_view *view) {
    PyObject *capsule = PyObject_CallFunctionObjArgs(export_array, array, NULL);
    struct dl_managed *m = capsule ? PyCapsule_GetPointer(capsule, "dltensor") : NULL;
    int known_kind = m && m->tensor.device_type == DL_CPU && describe(&m->tensor, view);
    Py_XDECREF(capsule);
    if (m == NULL) PyErr_Clear();
    return known_kind;
}

/* 1 or 0 as tensor_view(); -1: torch has to be asked, as its storage is shared until it is written to. */
static int read_values(const char *cpp, struct tensor_view *view) {
    const char *storage, *data;
    uint16_t code;
    int64_t start;
    memcpy(&storage, cpp + values.storage_at, sizeof storage);
    memcpy(&code, cpp + values.code_at, sizeof code);
    if (storage == NULL || storage[values.asks_at]) return -1;
    if (!(cpp[values.dense_at] & values.dense) || code >= MOST_CODES || values.dtypes[code] == 255) return 0;
    memcpy(&data, storage + values.data_at, sizeof data);
    memcpy(&view->count, cpp + values.count_at, sizeof view->count);
    memcpy(&start, cpp + layout.start_at, sizeof start);
    view->dtype = values.dtypes[code];
    view->address = view->count && data ? (char *)data + start * symcomm_itemsize[view->dtype] : NULL;
    return view->count == 0 || data;
}

int tensor_view(PyObject *tensor, struct tensor_view *view) {
    struct dl_tensor t;
    if (Py_TYPE(tensor) == array_type) return view_array(tensor, view);
    if (!is_known(Py_TYPE(tensor)) || (layout.object_at && !has_keys(tensor, layout.plain))) return 0;
    int there = values.known ? read_values(cpp_object(tensor), view) : -1;
    if (there >= 0) return there;
    if (!look(tensor, &t, view) || t.device_type != DL_CPU) return 0;
    if (!layout.object_at && (t.code == DL_COMPLEX || !says_false(is_neg, tensor))) return 0;
    return has_memory(tensor, view);
}

_Atomic uint32_t *tensor_version(PyObject *tensor) {
    if (!layout.object_at || layout.counter_at < 0 || keeps_versions || !is_tensor(tensor)) return NULL;
    char *counter = *(char *const *)(const void *)(cpp_object(tensor) + layout.counter_at);
    return counter ? (_Atomic uint32_t *)(void *)(counter + layout.version_at) : NULL;
}

static void change(PyObject *tensor) {
    _Atomic uint32_t *version = tensor_version(tensor);
    if (version) atomic_fetch_add_explicit(version, 1, memory_order_relaxed);
    bool has_none = layout.object_at && layout.counter_at >= 0;
    if (version || has_none || keeps_versions || !increment_version || !is_tensor(tensor)) return;
    Py_XDECREF(PyObject_CallFunctionObjArgs(increment_version, tensor, NULL));
    PyErr_Clear();
}

void tensors_change(PyObject *tensors) {
    if (!PyTuple_Check(tensors)) change(tensors);
    else
        for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) change(PyTuple_GetItem(tensors, i));
}

static bool is_tracked(PyObject *tensor) {
    if (!is_grad_enabled || !is_tensor(tensor)) return false; /* NULL: use_autograd() was not called */
    if (layout.object_at && asks_requires_grad) {
        if (!asks_requires_grad(cpp_object(tensor))) return false;
    } else {
        PyObject *wants = PyObject_GetAttr(tensor, requires_grad);
        Py_XDECREF(wants);
        if (wants == NULL) PyErr_Clear();
        if (wants != Py_True) return false;
    }
    PyObject *enabled = PyObject_CallNoArgs(is_grad_enabled);
    Py_XDECREF(enabled);
    if (enabled == NULL) PyErr_Clear();
    return enabled == Py_True;
}

bool tensors_tracked(PyObject *tensors) {
    if (!PyTuple_Check(tensors)) return is_tracked(tensors);
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++)
        if (is_tracked(PyTuple_GetItem(tensors, i))) return true;
    return false;
}

static int use_method(PyObject *types, const char *name, PyObject **method) {
    PyObject *found = PyObject_GetAttrString(PyTuple_GetItem(types, 0), name);
    if (found) replace_kept(method, found);
    Py_XDECREF(found);
    return found ? 0 : -1;
}

static int read_keys(PyObject *keys, uint64_t *into) {
    for (Py_ssize_t i = 0; i < MAX_PLAIN; i++)
        into[i] = i < PyTuple_Size(keys) ? PyLong_AsUnsignedLongLong(PyTuple_GetItem(keys, i)) : 0;
    return PyErr_Occurred() ? -1 : 0;
}

static int use_layout(PyObject *found) {
    layout.object_at = 0;
    values.known = false;
    if (found == Py_None) return 0;
    Py_ssize_t object_at, keys_at, start_at, counter_at, version_at;
    PyObject *plain;
    if (!PyArg_ParseTuple(found, "nnnO!nn", &object_at, &keys_at, &start_at, &PyTuple_Type, &plain, &counter_at,
                          &version_at))
        return -1;
    if (read_keys(plain, layout.plain) < 0) return -1;
    layout.keys_at = keys_at, layout.start_at = start_at, layout.object_at = object_at;
    layout.counter_at = counter_at, layout.version_at = version_at;
    return 0;
}

/* use_autograd(increment_version, is_grad_enabled, address of asks_requires_grad or 0): torch's. */
static PyObject *use_autograd(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 3) return PyErr_Format(PyExc_TypeError, "use_autograd takes 3 arguments");
    unsigned long long address = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    asks_requires_grad = (bool (*)(const void *))(uintptr_t)address;
    if (requires_grad == NULL && (requires_grad = PyUnicode_InternFromString("requires_grad")) == NULL) return NULL;
    replace_kept(&increment_version, args[0]);
    replace_kept(&is_grad_enabled, args[1]);
    Py_RETURN_NONE;
}

/* keep_versions(bool) -> what it was: whether to hide from autograd what calls of this thread write. */
static PyObject *keep_versions(PyObject *Py_UNUSED(self), PyObject *wanted) {
    bool before = keeps_versions;
    keeps_versions = PyObject_IsTrue(wanted) == 1;
    return PyBool_FromLong(before);
}

static PyObject *py_keeps_versions(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    return PyBool_FromLong(keeps_versions);
}

static PyObject *change_tensors(PyObject *Py_UNUSED(self), PyObject *tensors) {
    tensors_change(tensors);
    Py_RETURN_NONE;
}

/* use_tensors((type, ...), exchange capsule, layout or None): from now on, objects of exactly these types are viewed
 * through it. */
static PyObject *use_tensors(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *types, *capsule, *found;
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &types, &capsule, &found)) return NULL;
    struct dl_exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL) return NULL;
    if (api->major != 1 || api->view == NULL) Py_RETURN_FALSE;
    Py_ssize_t n = PyTuple_Size(types);
    if (n < 1 || n > MAX_TYPES) return PyErr_Format(PyExc_ValueError, "1 to %d types", MAX_TYPES);
    if (use_method(types, "is_neg", &is_neg) < 0 || use_method(types, "storage_offset", &storage_offset) < 0)
        return NULL;
    if (use_layout(found) < 0) return NULL;
    for (Py_ssize_t i = 0; i < MAX_TYPES; i++) { /* which live as long as the process */
        known[i] = i < n ? (PyTypeObject *)Py_NewRef(PyTuple_GetItem(types, i)) : NULL;
    }
    exchange_view = api->view;
    Py_RETURN_TRUE;
}

/* use_values((place, ...) or None): after use_tensors() with a layout, whose C++ objects these places are in. */
static PyObject *use_values(PyObject *Py_UNUSED(self), PyObject *found) {
    values.known = false;
    if (found == Py_None || !layout.object_at) Py_RETURN_NONE;
    const char *dtypes;
    Py_ssize_t n;
    if (!PyTuple_Check(found)) return PyErr_Format(PyExc_TypeError, "use_values takes a tuple or None");
    if (!PyArg_ParseTuple(found, "nnnnbnny#", &values.storage_at, &values.count_at, &values.code_at, &values.dense_at,
                          &values.dense, &values.data_at, &values.asks_at, &dtypes, &n))
        return NULL;
    if (n != MOST_CODES) return PyErr_Format(PyExc_ValueError, "a number for each of %d dtypes", MOST_CODES);
    memcpy(values.dtypes, dtypes, MOST_CODES);
    values.known = true;
    Py_RETURN_NONE;
}

/* use_arrays(ndarray): from now on, objects of exactly this type are viewed, too. Once. */
static PyObject *use_arrays(PyObject *Py_UNUSED(self), PyObject *type) {
    PyObject *found = array_type ? NULL : PyObject_GetAttrString(type, "__dlpack__");
    if (found) {
        export_array = found;
        array_type = (PyTypeObject *)Py_NewRef(type); /* which lives as long as the process */
    }
    PyErr_Clear(); /* before NumPy 1.22 there was none */
    return PyBool_FromLong(array_type != NULL);
}

static PyObject *view_tensor(PyObject *Py_UNUSED(self), PyObject *tensor) {
    struct tensor_view v;
    if (!tensor_view(tensor, &v)) Py_RETURN_NONE;
    return Py_BuildValue("KLi", (unsigned long long)(uintptr_t)v.address, (long long)v.count, v.dtype);
}

static PyObject *view_gpu_tensor(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (n_args != 2) return PyErr_Format(PyExc_TypeError, "view_gpu_tensor takes 2 arguments");
    struct tensor_view v;
    struct dl_tensor t;
    long device = PyLong_AsLong(args[1]);
    if (device == -1 && PyErr_Occurred()) return NULL;
    if (!is_known(Py_TYPE(args[0])) || !layout.object_at || !has_keys(args[0], layout.plain_on_gpu)) Py_RETURN_NONE;
    if (!look(args[0], &t, &v) || t.device_type != DL_CUDA || t.device_id != device || !has_memory(args[0], &v))
        Py_RETURN_NONE;
    return Py_BuildValue("KLi", (unsigned long long)(uintptr_t)v.address, (long long)v.count, v.dtype);
}

static PyObject *use_gpu_keys(PyObject *Py_UNUSED(self), PyObject *keys) {
    if (!PyTuple_Check(keys)) return PyErr_Format(PyExc_TypeError, "use_gpu_keys takes a tuple");
    return read_keys(keys, layout.plain_on_gpu) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    METHOD(use_tensors, METH_VARARGS, "(types, exchange_api, layout) -> whether that version is understood"),
    METHOD(use_values, METH_O, "(places or None): where torch's tensors say where their values are"),
    METHOD(use_arrays, METH_O, "(ndarray) -> whether its objects can be viewed"),
    METHOD(view_tensor, METH_O, "(tensor) -> (address, count, dtype), or None when Python must look"),
    METHOD(view_gpu_tensor, METH_FASTCALL,
           "(tensor, device) -> (address, count, dtype), or None when Python must look"),
    METHOD(use_autograd, METH_FASTCALL, "(increment_version, is_grad_enabled, asks_requires_grad): torch's"),
    METHOD(keep_versions, METH_O, "(bool) -> what it was: autograd does not notice what this thread's calls write"),
    METHOD_AS(keeps_versions, py_keeps_versions, METH_NOARGS, "() -> whether it does"),
    METHOD(change_tensors, METH_O, "(tensor or tuple of any objects): tell autograd that they change now"),
    METHOD(use_gpu_keys, METH_O, "(keys): of tensors on a GPU that are what their memory holds"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_tensor(PyObject *module) { return PyModule_AddFunctions(module, methods); }
