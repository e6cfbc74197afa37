/* The table of reduction kernels: one function per element type and operation. */
#ifndef SYMCOMM_REDUCE_KERNELS_H
#define SYMCOMM_REDUCE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "types.h"

/* The one number a kernel may need, as a real and as an integer; see the kernels for what it means to each. */
struct reduce_scalar {
    double real;
    uint64_t integer;
};

typedef void reduce_kernel(void *dst, const void *const *sources, int n_sources, size_t count,
                           struct reduce_scalar scalar);

struct reduce_entry {
    reduce_kernel *run; /* NULL: not defined for this type */
    size_t parts;       /* how many of the kernel's elements make one of the type: a complex number is two floats */
};

/* AVG of floats over a power of two: multiplying by 1/n is then as exact as dividing, and far faster. */
enum { RED_MEAN = RED_COUNT, RED_KERNELS };

struct reduce_type {
    const char *name;
    size_t itemsize;
    int floating; /* real or complex floats, of any width */
    /* How many elements the kernels take at a time. What is left of the count, or everything where this is 0, is
     * widened to float32 in blocks, combined with float32's kernels, and narrowed again. */
    size_t lanes;
    void (*widen)(float *out, const void *in, size_t count);
    void (*narrow)(void *out, const float *in, size_t count);
    struct reduce_entry ops[RED_KERNELS];
};

extern const struct reduce_type symcomm_reduce_types[DT_COUNT];
extern const char *const symcomm_reduce_op_names[RED_COUNT];

#endif
