/* Tensors as the DLPack exchange interface shows them: a function that torch gives away for this purpose. */
#include "tensor.h"

#include "types.h"

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

struct dl_exchange {
    uint32_t major, minor;
    void *previous;
    void *allocate, *to_managed, *from_managed;
    int (*view)(void *object, struct dl_tensor *out);
    void *stream;
};

enum { DL_CPU = 1 };
enum { DL_INT, DL_UINT, DL_FLOAT, DL_BFLOAT = 4, DL_BOOL = 6, DL_E4M3FN = 10, DL_E4M3FNUZ, DL_E5M2, DL_E5M2FNUZ };

#define MAX_TYPES 4
static PyTypeObject *known[MAX_TYPES];
static PyObject *is_neg; /* the method of the first of them */
static int (*exchange_view)(void *object, struct dl_tensor *out);

static int dtype_of(const struct dl_tensor *t) {
    if (t->lanes != 1) return -1;
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
        if (t->shape[d] != 1 && t->strides[d] != count) dense = false;
        count *= t->shape[d];
    }
    return dense || count == 0 ? count : -1;
}

/* Imaginary parts come behind real parts, two elements from each other. Asking torch instead would take as long as all the
   rest of a look. */
static bool may_be_imaginary(const struct dl_tensor *t, int dtype) {
    if (dtype != DT_FLOAT16 && dtype != DT_FLOAT32 && dtype != DT_FLOAT64) return false;
    for (int32_t d = 0; d < t->ndim; d++)
        if (t->strides[d] != 1) return true;
    return ((uintptr_t)t->data + t->byte_offset) % (t->bits / 4) != 0;
}

/* A view of one element may be contiguous and yet stand for the negative of what memory holds: an imaginary part. */
static bool is_negated(PyObject *tensor) {
    PyObject *answer = PyObject_CallFunctionObjArgs(is_neg, tensor, NULL);
    bool negated = answer != Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return negated;
}

/* Storage that was given away starts at 0, and so do zeros that are only promised. Memory is hardly ever below; where it
   is, Python looks closer. */
#define LEAST_ADDRESS ((uintptr_t)1 << 32)

int tensor_view(PyObject *tensor, struct tensor_view *view) {
    PyTypeObject *type = Py_TYPE(tensor);
    if (exchange_view == NULL || (type != known[0] && type != known[1] && type != known[2] && type != known[3])) return 0;
    struct dl_tensor t;
    if (exchange_view(tensor, &t)) {
        PyErr_Clear();
        return 0;
    }
    view->dtype = dtype_of(&t);
    view->count = contiguous_count(&t);
    if (t.device_type != DL_CPU || view->dtype < 0 || view->count < 0) return 0;
    if (view->count == 1 && may_be_imaginary(&t, view->dtype) && is_negated(tensor)) return 0;
    view->address = (char *)t.data + t.byte_offset;
    return view->count == 0 || (uintptr_t)view->address >= LEAST_ADDRESS;
}

/* use_tensors((type, ...), exchange capsule): from now on, objects of exactly these types are viewed through it. */
static PyObject *use_tensors(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *types, *capsule;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &types, &capsule)) return NULL;
    struct dl_exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL) return NULL;
    if (api->major != 1 || api->view == NULL) Py_RETURN_FALSE;
    Py_ssize_t n = PyTuple_Size(types);
    for (Py_ssize_t i = 0; i < n && i < MAX_TYPES; i++) known[i] = (PyTypeObject *)Py_NewRef(PyTuple_GetItem(types, i));
    if (n > 0 && is_neg == NULL && (is_neg = PyObject_GetAttrString(PyTuple_GetItem(types, 0), "is_neg")) == NULL) return NULL;
    exchange_view = api->view;
    Py_RETURN_TRUE;
}

/* view_tensor(tensor) -> (address, count, dtype), or None */
static PyObject *view_tensor(PyObject *self, PyObject *tensor) {
    (void)self;
    struct tensor_view v;
    if (!tensor_view(tensor, &v)) Py_RETURN_NONE;
    return Py_BuildValue("KLi", (unsigned long long)(uintptr_t)v.address, (long long)v.count, v.dtype);
}

static PyMethodDef methods[] = {
    {"use_tensors", use_tensors, METH_VARARGS, "use_tensors(types, exchange_api) -> whether that version is understood"},
    {"view_tensor", view_tensor, METH_O, "view_tensor(tensor) -> (address, count, dtype), or None when Python must look"},
    {NULL, NULL, 0, NULL},
};

int symcomm_add_tensor(PyObject *module) { return PyModule_AddFunctions(module, methods); }
