/* Kernels that every CPU of the architecture can run: SSE2 on x86-64, NEON on arm64. */
#include "reduce/target.h"

#include "reduce/kernel_set.h"

const struct reduce_type *symcomm_kernels_baseline(void) { return all_types; }
