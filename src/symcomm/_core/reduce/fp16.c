/* Kernels of 16-bit floats for arm64 CPUs that compute with float16 (Armv8.2): Cortex-A55, Neoverse N1 and later. */
#include "reduce/target.h"

#include "reduce/kernels.h"

#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16) /* older ones take no architecture here */
#include <arm_neon.h>
#include <sys/auxv.h>

static int supported(void) { return (getauxval(AT_HWCAP) & 1ul << 10) != 0; } /* HWCAP_ASIMDHP */

#define SYMCOMM_SET_FP16 1
TARGET_BEGIN("arch=armv8.2-a+fp16")
#include "reduce/half_kernels.h"
TARGET_END

const struct reduce_type *symcomm_kernels_fp16(void) { return supported() ? halves_types : NULL; }
#elif defined(__aarch64__)
const struct reduce_type *symcomm_kernels_fp16(void) { return NULL; }
#endif
