/* Memory that ranks share: maps it, reserves its pages, and chooses their NUMA node. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory/isolate.h"
#include "memory/shared_bytes.h"
#include "module/module.h"
#include "sync/cores.h"

static PyObject *map_shared(PyObject *Py_UNUSED(self), PyObject *args) {
    int fd;
    long long bytes;
    if (!PyArg_ParseTuple(args, "iL", &fd, &bytes)) return NULL;
    void *at = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    madvise(at, (size_t)bytes, MADV_DONTDUMP);
    return PyLong_FromVoidPtr(at);
}

static PyObject *unmap(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return NULL;
    cores_forget((const char *)(uintptr_t)address, bytes); /* before the memory is gone */
    if (munmap((void *)(uintptr_t)address, (size_t)bytes)) return PyErr_SetFromErrno(PyExc_OSError);
    isolate_forget((const char *)(uintptr_t)address, bytes);
    Py_RETURN_NONE;
}

static PyObject *advise_huge(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return NULL;
    return PyBool_FromLong(madvise((void *)(uintptr_t)address, (size_t)bytes, MADV_HUGEPAGE) == 0);
}

#define NODES 1024
#define MPOL_PREFERRED 1 /* linux/mempolicy.h */

/* New pages of a shared mapping come from one NUMA node while it has some, whichever core touches them first. */
static PyObject *prefer_node(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    long long bytes;
    int node;
    if (!PyArg_ParseTuple(args, "KLi", &address, &bytes, &node)) return NULL;
    if (node < 0 || node >= NODES - 1) Py_RETURN_FALSE;
    const int bits = 8 * (int)sizeof(unsigned long);
    unsigned long mask[NODES / (8 * sizeof(unsigned long))] = {0};
    mask[node / bits] = 1UL << (node % bits);
    return PyBool_FromLong(
        syscall(SYS_mbind, (void *)(uintptr_t)address, (size_t)bytes, MPOL_PREFERRED, mask, NODES, 0) == 0);
}

/* Makes pages exist (create != 0), so that running out of memory is an error here and not a signal later; or gives them
 * back to the kernel. */
static PyObject *set_pages(PyObject *Py_UNUSED(self), PyObject *args) {
    int fd, create, failed;
    long long offset, bytes;
    if (!PyArg_ParseTuple(args, "iLLp", &fd, &offset, &bytes, &create)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    do failed = fallocate(fd, create ? 0 : FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
    while (failed && errno == EINTR);
    Py_END_ALLOW_THREADS;
    if (failed) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_is_isolated(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    long long bytes;
    if (!PyArg_ParseTuple(args, "KL", &address, &bytes)) return NULL;
    return PyBool_FromLong(is_isolated((const char *)(uintptr_t)address, bytes));
}

static PyObject *peek(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn", &address, &bytes)) return NULL;
    PyObject *copy = PyBytes_FromStringAndSize(NULL, bytes);
    if (copy) shared_load(PyBytes_AsString(copy), (const void *)(uintptr_t)address, (size_t)bytes);
    return copy;
}

static PyObject *poke(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address;
    const char *data;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Ky#", &address, &data, &bytes)) return NULL;
    shared_store((void *)(uintptr_t)address, data, (size_t)bytes);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(map_shared, METH_VARARGS, "(fd, bytes) -> address"),
    METHOD(unmap, METH_VARARGS, "(address, bytes)"),
    METHOD(advise_huge, METH_VARARGS, "(address, bytes) -> whether the kernel took the advice"),
    METHOD(prefer_node, METH_VARARGS, "(address, bytes, node) -> whether new pages will come from there"),
    METHOD(set_pages, METH_VARARGS, "(fd, offset, bytes, create)"),
    METHOD_AS(is_isolated, py_is_isolated, METH_VARARGS,
              "(address, bytes) -> whether these bytes are now isolated from stopped peers"),
    METHOD(peek, METH_VARARGS, "(address, bytes) -> bytes"),
    METHOD(poke, METH_VARARGS, "(address, bytes)"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_mapping(PyObject *module) { return PyModule_AddFunctions(module, methods); }
