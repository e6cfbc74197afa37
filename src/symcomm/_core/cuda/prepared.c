/* Runs an all_reduce of a kind seen before in one call: the hosts arrive, then the kernel that does the rest is
 * launched. */
#include "cuda/driver.h"
#include "exec/async.h"
#include "exec/exec.h"
#include "group/group.h"
#include "module/arguments.h"
#include "module/module.h"

#define PREPARED_KERNEL "symcomm.prepared_kernel"

struct prepared_kernel {
    launch_function launch;
    uint64_t kernel[KERNEL_NUMBERS];
    int n;
    uint64_t places[]; /* n for each half of the staging area: source, target, ..., the barrier's number */
};

static void drop_prepared(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, PREPARED_KERNEL)); }

/* prepare_kernel(launch, kernel, places of one half, of the other) -> prepared */
static PyObject *prepare_kernel(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long launch;
    PyObject *kernel, *places[2];
    if (!PyArg_ParseTuple(args, "KO!O!O!", &launch, &PyTuple_Type, &kernel, &PyTuple_Type, &places[0], &PyTuple_Type,
                          &places[1]))
        return NULL;
    int n = (int)PyTuple_Size(places[0]);
    if (PyTuple_Size(kernel) != KERNEL_NUMBERS || n < 3 || n > MAX_PLACES || PyTuple_Size(places[1]) != n)
        return PyErr_Format(PyExc_ValueError, "prepare_kernel: numbers are missing, or too many");
    struct prepared_kernel *p = malloc(sizeof *p + 2 * (size_t)n * sizeof p->places[0]);
    if (p == NULL) return PyErr_NoMemory();
    p->launch = (launch_function)(uintptr_t)launch, p->n = n;
    PyObject *capsule = NULL;
    if (read_numbers(kernel, p->kernel, KERNEL_NUMBERS) > 0 && read_numbers(places[0], p->places, n) > 0 &&
        read_numbers(places[1], p->places + n, n) > 0)
        capsule = PyCapsule_New(p, PREPARED_KERNEL, drop_prepared);
    if (capsule == NULL) free(p);
    return capsule;
}

static int launch(const struct prepared_kernel *p, int half, uint64_t stream, uint64_t address, uint64_t value) {
    uint64_t places[MAX_PLACES];
    memcpy(places, p->places + half * p->n, (size_t)p->n * sizeof places[0]);
    places[0] = places[1] = address, places[p->n - 1] = value;
    return launch_kernel(p->launch, p->kernel, places, (void *)(uintptr_t)stream);
}

/* run_prepared(group, plan, timeout_ns, site, prepared, half, stream, address, value) -> 0, a failure's status, or the
 * driver's result below 0. The tensor at `address` is reduced in place; `value`: of the kernel's first barrier. */
static PyObject *run_prepared(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
    if (expect_arguments(n_args, 9, "run_prepared") < 0) return NULL;
    struct group *g = to_group(args[0]);
    struct plan *plan = g ? PyCapsule_GetPointer(args[1], PLAN_CAPSULE) : NULL;
    struct prepared_kernel *p = plan ? PyCapsule_GetPointer(args[4], PREPARED_KERNEL) : NULL;
    if (p == NULL) return NULL;
    int64_t timeout = PyLong_AsLongLong(args[2]);
    struct origin from = {.site = (uint32_t)PyLong_AsUnsignedLong(args[3])};
    int half = PyLong_AsLong(args[5]) != 0;
    uint64_t stream = PyLong_AsUnsignedLongLong(args[6]), address = PyLong_AsUnsignedLongLong(args[7]);
    uint64_t value = PyLong_AsUnsignedLongLong(args[8]);
    if (PyErr_Occurred()) return NULL;
    struct buffers none = {NULL, NULL, 0, 0};
    int64_t status;
    bool idle = async_idle(g);
    count_call(&g->collectives, false, !idle);
    Py_BEGIN_ALLOW_THREADS; /* the driver blocks while a stream is full */
    status = async_run_in_turn(g, plan, &none, timeout, from, idle);
    if (status == 0) status = -launch(p, half, stream, address, value);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(status);
}

static PyMethodDef methods[] = {
    METHOD(prepare_kernel, METH_VARARGS, "(launch, kernel, places, other_places) -> prepared"),
    METHOD(run_prepared, METH_FASTCALL,
           "(group, plan, timeout_ns, site, prepared, half, stream, address, value) -> status"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_prepared(PyObject *module) { return PyModule_AddFunctions(module, methods); }
