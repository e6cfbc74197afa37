/* The CUDA driver's functions that the core calls, and a reader of their arguments from tuples. */
#pragma once

#include "module/module.h"

#define MAX_PLACES 500 /* a kernel takes 4 KiB of arguments */

/* cuLaunchKernel */
typedef int (*launch_function)(uint64_t kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, void *stream, void **arguments, void **extra);

enum kernel_numbers { KERNEL_FUNCTION, KERNEL_BLOCKS, KERNEL_THREADS, KERNEL_COUNT, KERNEL_PACKS, KERNEL_NUMBERS };

/* Launches the kernel on `places`. Returns the driver's result, 0 for success. */
static inline int launch_kernel(launch_function launch, const uint64_t kernel[KERNEL_NUMBERS], uint64_t *places,
                                void *stream) {
    uint64_t count = kernel[KERNEL_COUNT], packs = kernel[KERNEL_PACKS];
    void *arguments[] = {places, &count, &packs};
    return launch(kernel[KERNEL_FUNCTION], (unsigned)kernel[KERNEL_BLOCKS], 1, 1, (unsigned)kernel[KERNEL_THREADS], 1,
                  1, 0, stream, arguments, NULL);
}

/* Reads a tuple of numbers; returns how many, or -1 with an exception set. */
static inline int read_numbers(PyObject *tuple, uint64_t *into, int most) {
    Py_ssize_t n = PyTuple_Size(tuple);
    if (n < 0) return -1;
    if (n > most) {
        PyErr_Format(PyExc_ValueError, "%zd numbers, where %d are the most", n, most);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) into[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : (int)n;
}
