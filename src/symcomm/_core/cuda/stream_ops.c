/* The driver calls of a GPU collective, in one call of the core.
 *
 * The core knows nothing of CUDA: cuda/driver.py passes it the addresses of driver functions, which it found in the
 * driver's library. The interpreter lock is released meanwhile, since the driver blocks while a stream is full. */
#include "cuda/driver.h"
#include "group/group.h"
#include "module/module.h"
#include "reduce/reduce.h"

/* cuMemcpyAsync */
typedef int (*copy_function)(uint64_t target, uint64_t source, size_t nbytes, void *stream);
/* cuStream{Write,Wait}Value32 */
typedef int (*word_function)(void *stream, uint64_t address, uint32_t value, unsigned flags);
/* cuLaunchHostFunc */
typedef int (*host_function)(void *stream, void (*function)(void *), void *argument);

struct stream_op {
    copy_function copy;
    word_function write, wait;
    launch_function launch;
    void *stream;
    uint64_t source, target, nbytes; /* the copy before the handshake */
    uint32_t value;                  /* of the handshake */
    int peers;
    uint64_t theirs[MAX_WORLD], mine[MAX_WORLD];
    uint64_t kernel[KERNEL_NUMBERS]; /* after it */
    uint64_t places[MAX_PLACES];
};

static int enqueue(struct stream_op *t) {
    int result = t->nbytes ? t->copy(t->target, t->source, t->nbytes, t->stream) : 0;
    /* Flags 0: a write comes after all earlier work of the stream, and a wait ends at that value or more, counted
     * cyclically. */
    for (int i = 0; i < t->peers && result == 0; i++) result = t->write(t->stream, t->theirs[i], t->value, 0);
    for (int i = 0; i < t->peers && result == 0; i++) result = t->wait(t->stream, t->mine[i], t->value, 0);
    if (result || !t->kernel[KERNEL_FUNCTION]) return result;
    return launch_kernel(t->launch, t->kernel, t->places, t->stream);
}

/* enqueue_collective(functions, stream, copy, value, theirs, mine, kernel, places) -> the driver's result, 0 for
 * success. functions: addresses of copy, write, wait, launch. copy: (source, target, bytes), or () for none. The stream
 * then tells every address in `theirs` that it has come to `value`, and waits until all in `mine` say so. kernel:
 * (function, blocks, threads, count, packs) to start then on `places`, or () for none. */
static PyObject *enqueue_collective(PyObject *Py_UNUSED(self), PyObject *args) {
    struct stream_op t; /* large, so it is not cleared: every field that is read is set below */
    unsigned long long stream, value;
    PyObject *functions, *copy, *theirs, *mine, *kernel, *places;
    if (!PyArg_ParseTuple(args, "OKOKOOOO", &functions, &stream, &copy, &value, &theirs, &mine, &kernel, &places))
        return NULL;
    uint64_t f[4] = {0}, c[3] = {0};
    memset(t.kernel, 0, sizeof t.kernel);
    t.peers = read_numbers(theirs, t.theirs, MAX_WORLD);
    if (read_numbers(functions, f, 4) != 4 || t.peers < 0 || read_numbers(mine, t.mine, MAX_WORLD) != t.peers ||
        read_numbers(copy, c, 3) < 0 || read_numbers(kernel, t.kernel, KERNEL_NUMBERS) < 0 ||
        read_numbers(places, t.places, MAX_PLACES) < 0) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "enqueue_collective: numbers are missing");
    }
    t.copy = (copy_function)(uintptr_t)f[0], t.write = (word_function)(uintptr_t)f[1],
    t.wait = (word_function)(uintptr_t)f[2];
    t.launch = (launch_function)(uintptr_t)f[3];
    t.stream = (void *)(uintptr_t)stream, t.value = (uint32_t)value;
    t.source = c[0], t.target = c[1], t.nbytes = c[2];
    int result;
    Py_BEGIN_ALLOW_THREADS;
    result = enqueue(&t);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(result);
}

struct host_reduce {
    int dtype, op, world;
    size_t count;
    void *out;
    const void *sources[];
};

/* Runs in a thread of the driver, when the stream gets here. */
static void reduce_on_host(void *argument) {
    struct host_reduce *s = argument;
    symcomm_reduce(s->dtype, s->op, s->out, s->sources, s->world, s->count, 1.0);
    free(s);
}

/* enqueue_host_reduce(function, stream, dtype, op, sources, out, count) -> the driver's result, 0 for success.
 * Has the host combine `count` elements of host memory from every address in `sources` into `out`, in stream order. */
static PyObject *enqueue_host_reduce(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long function, stream, out, count;
    int dtype, op;
    PyObject *sources;
    if (!PyArg_ParseTuple(args, "KKiiOKK", &function, &stream, &dtype, &op, &sources, &out, &count)) return NULL;
    Py_ssize_t world = PyTuple_Size(sources);
    if (world < 0) return NULL;
    if (world < 1 || world > MAX_WORLD || !symcomm_reduce_defined(dtype, op)) {
        return PyErr_Format(PyExc_ValueError, "enqueue_host_reduce: dtype %d, op %d, %zd sources", dtype, op, world);
    }
    uint64_t places[MAX_WORLD];
    if (read_numbers(sources, places, MAX_WORLD) < 0) return NULL;
    struct host_reduce *s = malloc(sizeof *s + (size_t)world * sizeof s->sources[0]);
    if (!s) return PyErr_NoMemory();
    *s = (struct host_reduce){
        .dtype = dtype, .op = op, .world = (int)world, .count = count, .out = (void *)(uintptr_t)out};
    for (Py_ssize_t i = 0; i < world; i++) s->sources[i] = (const void *)(uintptr_t)places[i];
    int result;
    Py_BEGIN_ALLOW_THREADS;
    result = ((host_function)(uintptr_t)function)((void *)(uintptr_t)stream, reduce_on_host, s);
    Py_END_ALLOW_THREADS;
    if (result) free(s);
    return PyLong_FromLong(result);
}

/* --- words that hosts and GPUs share ------------------------------------------------------------------------ */

/* store_word(address, value): a GPU or process that sees the word sees all earlier writes, and no later write before
 * the word. */
static PyObject *store_word(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long address, value;
    if (!PyArg_ParseTuple(args, "KK", &address, &value)) return NULL;
    atomic_store((_Atomic uint32_t *)(uintptr_t)address, (uint32_t)value);
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    METHOD(store_word, METH_VARARGS, "(address, value): 32 bits, in order with what comes before and after"),
    METHOD(enqueue_host_reduce, METH_VARARGS,
           "(function, stream, dtype, op, sources, out, count) -> the driver's result"),
    METHOD(enqueue_collective, METH_VARARGS,
           "(functions, stream, copy, value, theirs, mine, kernel, places) -> the driver's result"),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_stream_ops(PyObject *module) { return PyModule_AddFunctions(module, methods); }
