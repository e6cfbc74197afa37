/* Combines N sources as a tree into one destination, in one pass.
 *
 * Pointers need no alignment. dst may be exactly one of the sources (same address), and may not overlap them
 * otherwise. dtype and op are numbers of reduce/types.h; reduce/kernel_set.h says what each pair computes. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SYMCOMM_MAX_SOURCES 1024

/* dst[i] = (sources[0][i] op sources[1][i]) op (sources[2][i] op ...) ..., for count elements. `factor`: PREMUL_SUM's;
 * or AVG's divisor if sources are sums of others: a whole number, at most 1 for the number of sources. Returns 0, or -1
 * when that pair is not defined (bitwise operations on floats, order of complex numbers) or n_sources is not from 1 to
 * SYMCOMM_MAX_SOURCES. */
int symcomm_reduce(int dtype, int op, void *dst, const void *const *sources, int n_sources, size_t count,
                   double factor);

/* Name of the set of kernels in use: the instructions that the whole core may use. */
const char *symcomm_kernel_set(void);

/* 1 when symcomm_reduce would accept the pair. */
int symcomm_reduce_defined(int dtype, int op);
