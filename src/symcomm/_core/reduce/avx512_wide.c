/* Kernels of 16-bit floats in vectors of 64 bytes, for CPUs that can run those of avx512.c. Conversions are most of
 * their work: from some size on, the time they win is more than what code after them loses. */
#include "reduce/target.h"

#include "reduce/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SYMCOMM_SET_AVX512 1
#define SYMCOMM_SET_WIDE 1
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#include "reduce/half_kernels.h"
TARGET_END

const struct reduce_type *symcomm_kernels_avx512_wide(void) { return symcomm_kernels_avx512() ? halves_types : NULL; }
#endif
