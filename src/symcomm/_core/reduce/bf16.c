/* Kernels of 16-bit floats for arm64 CPUs that also convert to bfloat16 (Armv8.6): Neoverse V1, N2 and later. */
#include "reduce/target.h"

#include "reduce/kernels.h"

#if defined(__clang__)
#define COMPILER_KNOWS_IT (__clang_major__ >= 16)
#else
#define COMPILER_KNOWS_IT (__GNUC__ >= 10)
#endif

#if defined(__aarch64__) && COMPILER_KNOWS_IT
#include <arm_neon.h>
#include <sys/auxv.h>

static int supported(void) {
    return (getauxval(AT_HWCAP) & 1ul << 10) && (getauxval(AT_HWCAP2) & 1ul << 14); /* HWCAP_ASIMDHP, HWCAP2_BF16 */
}

#define SYMCOMM_SET_FP16 1
#define SYMCOMM_SET_BF16 1
TARGET_BEGIN("arch=armv8.2-a+fp16+bf16")
#include "reduce/half_kernels.h"
TARGET_END

const struct reduce_type *symcomm_kernels_bf16(void) { return supported() ? halves_types : NULL; }
#elif defined(__aarch64__)
const struct reduce_type *symcomm_kernels_bf16(void) { return NULL; }
#endif
