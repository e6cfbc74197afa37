/* Kernels for x86-64 CPUs with AVX-512: Skylake-SP, Zen 4 and later. They use its masks and registers, but vectors of
 * 32 bytes: for milliseconds after a sum in vectors of 64, a Cascade Lake runs all code a tenth slower (see
 * avx512_wide.c). AVX-512's own conversion to bfloat16 flushes subnormals to zero, and is not used. */
#include "reduce/target.h"

#include "reduce/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

static int supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#define SYMCOMM_SET_AVX2 1
#define SYMCOMM_SET_AVX512 1
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#include "reduce/kernel_set.h"
TARGET_END

const struct reduce_type *symcomm_kernels_avx512(void) { return supported() ? all_types : NULL; }
#endif
