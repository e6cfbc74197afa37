/* Sets of reduction kernels: one function per element type and operation, for one instruction set. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "reduce/types.h"

/* The one number that a kernel may need, as a real and as an integer; each kernel says what it is. */
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
    const char *name; /* NULL: this set has nothing better than the one before it */
    size_t itemsize;
    int floating; /* real or complex floats, of any width */
    struct reduce_entry ops[RED_KERNELS];
};

/* A table of DT_COUNT types for each instruction set; NULL if this CPU cannot run it. */
enum { REDUCE_SETS = 3 }; /* at most, on any architecture */
const struct reduce_type *symcomm_kernels_baseline(void);
const struct reduce_type *symcomm_kernels_avx2(void);
const struct reduce_type *symcomm_kernels_avx512(void);
const struct reduce_type *symcomm_kernels_avx512_wide(void); /* for long sums, beside the former */
const struct reduce_type *symcomm_kernels_fp16(void);
const struct reduce_type *symcomm_kernels_bf16(void);
