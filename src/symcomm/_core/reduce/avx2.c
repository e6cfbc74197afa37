/* Kernels for x86-64 CPUs with AVX2 and F16C: Haswell, Zen and later. No FMA: nothing may be fused. */
#include "reduce/target.h"

#include "reduce/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static int supported(void) {
    unsigned eax, ebx, ecx, edx; /* GCC 10 and older do not know F16C by name */
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

#define SYMCOMM_SET_AVX2 1
TARGET_BEGIN("avx2,f16c")
#include "reduce/kernel_set.h"
TARGET_END

const struct reduce_type *symcomm_kernels_avx2(void) { return supported() ? all_types : NULL; }
#endif
