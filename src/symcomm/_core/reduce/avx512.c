/* Kernels for x86-64 CPUs with AVX-512: Skylake-SP, Zen 4 and later. AVX-512's own conversion to bfloat16 flushes
 * subnormals to zero, and is not used. */
#include "reduce/target.h"

#include "reduce/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

static int supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#define SYMCOMM_SET_AVX512 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif

#include "reduce/kernel_set.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const struct reduce_type *symcomm_kernels_avx512(void) { return supported() ? all_types : NULL; }
#endif
