/* Kernels of 16-bit floats, for which more CPUs have instructions of their own than for other small formats. */
#pragma once

#include "reduce/float_formats.h"
#include "reduce/vectors.h"

/* clang-format is off where it would take products of macro arguments for pointers, or spread tables out. */

/* All operations on a type of floats. FORMAT rounds results, EXACT takes results that are elements of the sources; k,
 * of type K, is the number of sources to `avg`, its inverse to `mean` and the factor to `premul_sum`. */
/* clang-format off */
#define FLOAT_KERNELS(T, FORMAT, EXACT, K, STYLE)               \
    ROUNDING_KERNELS(T, FORMAT, K, STYLE)                       \
    ORDER_KERNELS(T, EXACT, K, STYLE)
#define ROUNDING_KERNELS(T, FORMAT, K, STYLE)                   \
    VECTOR_FOLD(T##_sum, FORMAT, K, x, a + b)                   \
    STYLE##_FOLDS(T##_sum, FORMAT, K)                           \
    STYLE##_KERNEL(T##_sum, T##_sum, FORMAT, K, a)              \
    STYLE##_KERNEL(T##_mean, T##_sum, FORMAT, K, a * k)         \
    STYLE##_KERNEL(T##_avg, T##_sum, FORMAT, K, a / k)          \
    FOLD_AND_KERNEL(T##_product, FORMAT, K, STYLE, x, a * b)    \
    FOLD_AND_KERNEL(T##_premul_sum, FORMAT, K, STYLE, x * k, a + b)
#define ORDER_KERNELS(T, EXACT, K, STYLE)                       \
    FOLD_AND_KERNEL(T##_min, EXACT, K, STYLE, x, LESSER(a, b))  \
    FOLD_AND_KERNEL(T##_max, EXACT, K, STYLE, x, GREATER(a, b))
#define FOLD_AND_KERNEL(NAME, T, K, STYLE, IN, FOLD)            \
    VECTOR_FOLD(NAME, T, K, IN, FOLD)                           \
    STYLE##_FOLDS(NAME, T, K)                                   \
    STYLE##_KERNEL(NAME, NAME, T, K, a)

#define FLOAT_OPS(T)                                                                             \
    {[RED_SUM] = {T##_sum, 1}, [RED_AVG] = {T##_avg, 1}, [RED_PRODUCT] = {T##_product, 1},       \
     [RED_MIN] = {T##_min, 1}, [RED_MAX] = {T##_max, 1}, [RED_PREMUL_SUM] = {T##_premul_sum, 1}, \
     [RED_MEAN] = {T##_mean, 1}}

FLOAT_KERNELS(bfloat16, bfloat16, bfloat16_exact, float, PADDED)

#define BFLOAT16_TYPE {"bfloat16", 2, 1, FLOAT_OPS(bfloat16)}
/* clang-format on */

#if !defined(SYMCOMM_SET_FP16)
FLOAT_KERNELS(float16, float16, float16, float, FLOAT16_STYLE)
#define FLOAT16_TYPE {"float16", 2, 1, FLOAT_OPS(float16)}
#else

/* --- arithmetic on float16 itself, where the CPU has it ------------------------------------------------------ */

ROUNDING_KERNELS(float16, float16, float, PADDED)

/* One operation on two float16 gives the same bits in float16 as in float32 rounded to float16: rounding twice gives
 * the same as rounding once if the first result has at least twice the bits and two more (24 = 2 * 11 + 2). Three
 * sources take two operations with one rounding at the end, so they stay in float32. */
typedef float16x8_t native_vector;
typedef struct {
    float16x8_t v0, v1, v2, v3;
} native_quad;
enum { native_size = 2, native_unit = 4 * VECTOR_BYTES };
PLAIN_FORMAT(native)

SYMCOMM_INLINE native_vector pick_native(halves mask, native_vector yes, native_vector no) {
    return (native_vector)pick_ints((ints)mask, (ints)yes, (ints)no);
}

/* b if it comes first or is a NaN, else a. */
SYMCOMM_INLINE native_vector native_order(uint16x8_t b_first, native_vector a, native_vector b) {
    return pick_native((halves)vornq_u16(b_first, vceqq_f16(b, b)), b, a);
}

/* Halving a sum is exact: a sum so small that its half is subnormal was not rounded. If the sum overflows, the terms
 * are halved first, which is exact since both are large. */
SYMCOMM_INLINE native_vector native_mean_of(native_vector a, native_vector b) {
    const native_vector half = (native_vector)(halves){0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800, 0x3800};
    native_vector sum = a + b;
    halves overflown = (halves)(((halves)sum & 0x7fff) >= 0x7c00);
    return pick_native(overflown, a * half + b * half, sum * half);
}

/* clang-format off */
FOLD_AND_KERNEL(native_sum, native, int, PADDED, x, a + b)
FOLD_AND_KERNEL(native_product, native, int, PADDED, x, a * b)
FOLD_AND_KERNEL(native_mean, native, int, PADDED, x, native_mean_of(a, b))
FOLD_AND_KERNEL(native_min, native, int, PADDED, x, native_order(vcltq_f16(b, a), a, b))
FOLD_AND_KERNEL(native_max, native, int, PADDED, x, native_order(vcgtq_f16(b, a), a, b))
/* clang-format on */

#define TWO_NATIVE(OP, SUITS)                                                                \
    static void float16_two_##OP(void *dst, const void *const *sources, int n, size_t count, \
                                 struct reduce_scalar scalar) {                              \
        (n == 2 && SUITS ? native_##OP : float16_##OP)(dst, sources, n, count, scalar);      \
    }
TWO_NATIVE(sum, 1)
TWO_NATIVE(product, 1)
TWO_NATIVE(mean, scalar.real == 0.5)

/* clang-format off */
#define FLOAT16_TYPE                                                                                         \
    {"float16", 2, 1,                                                                                        \
     {[RED_SUM] = {float16_two_sum, 1}, [RED_AVG] = {float16_avg, 1}, [RED_PRODUCT] = {float16_two_product, 1}, \
      [RED_MIN] = {native_min, 1}, [RED_MAX] = {native_max, 1}, [RED_PREMUL_SUM] = {float16_premul_sum, 1},  \
      [RED_MEAN] = {float16_two_mean, 1}}}
/* clang-format on */
#endif

#if defined(SYMCOMM_SET_FP16) || defined(SYMCOMM_SET_WIDE) /* sets that have nothing else */
static const struct reduce_type halves_types[DT_COUNT] = {
    [DT_FLOAT16] = FLOAT16_TYPE,
    [DT_BFLOAT16] = BFLOAT16_TYPE,
};
#endif
