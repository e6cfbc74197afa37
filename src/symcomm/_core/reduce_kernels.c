/* The reduction kernels, written once as a macro and stamped out per element type and operation.
 *
 * What each operation means:
 *   integers   arithmetic wraps around, as torch's; AVG divides the wrapped sum, toward zero;
 *              PREMUL_SUM multiplies by the factor made an integer (toward zero, then wrapped)
 *   bool       any nonzero byte is true and results are 0 or 1; SUM, MAX, BOR and AVG are "any", PRODUCT, MIN and BAND
 *              are "all", BXOR is "an odd number"; PREMUL_SUM is "any", or false when the factor is zero
 *   8 and 16-bit floats   become float32, are combined in float32 over all sources, and are rounded once at the end
 *   floats     one operation after another, in the order of the sources, never fused; AVG divides by their number
 *   complex    componentwise but for PRODUCT, which is (ac - bd, ad + bc)
 *   MIN, MAX   a NaN in any source gives NaN; of equal values (0.0 and -0.0) the earliest source's is kept
 *
 * All CPUs and all instruction sets give the same bits (but for the payload of a NaN), wherever count is cut. */
#include "common.h"

#include "float_formats.h"
#include "reduce_kernels.h"

/* A fused multiply-add rounds once where two instructions round twice: bits would depend on the CPU. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off", "no-trapping-math") /* the latter lets a?b:c of floats vectorise */
#endif

/* The accumulators of one block stay in the L1 cache while each source passes by once. */
#ifndef REDUCE_BLOCK_BYTES
#define REDUCE_BLOCK_BYTES 8192
#endif

/* dst may be one of the sources: iteration i then reads and writes the same element i, which vectorises. */
#if defined(__clang__)
#define EACH(LENGTH) _Pragma("clang loop vectorize(assume_safety)") for (size_t i = 0; i < (LENGTH); i++)
#else
#define EACH(LENGTH) _Pragma("GCC ivdep") for (size_t i = 0; i < (LENGTH); i++)
#endif

/* Element types as they lie in memory: at any address. */
#define ANYWHERE __attribute__((aligned(1), may_alias))
typedef uint8_t uint8_stored;
typedef int8_t int8_stored;
typedef uint16_t uint16_stored ANYWHERE;
typedef int16_t int16_stored ANYWHERE;
typedef uint32_t uint32_stored ANYWHERE;
typedef int32_t int32_stored ANYWHERE;
typedef uint64_t uint64_stored ANYWHERE;
typedef int64_t int64_stored ANYWHERE;
typedef float float32_stored ANYWHERE;
typedef double float64_stored ANYWHERE;

/* A kernel stores elements of type S, accumulates in type A and has a scalar k of type K. Its three expressions:
 *   IN    what source element x brings to the accumulation
 *   FOLD  accumulator a combined with the next source's b
 *   OUT   what is stored for the final accumulator a */
#define KERNEL(NAME, S, A, K, SCALAR, IN, FOLD, OUT)                                                        \
    SYMCOMM_INLINE A NAME##_in(S x, K k) { (void)k; return IN; }                                       \
    SYMCOMM_INLINE A NAME##_fold(A a, A b) { return FOLD; }                                            \
    SYMCOMM_INLINE S NAME##_out(A a, K k) { (void)k; return OUT; }                                     \
    SYMCOMM_CLONES static void NAME(void *dst, const void *const *sources, int n_sources, size_t count,     \
                                    struct reduce_scalar scalar) {                                          \
        enum { BLOCK = REDUCE_BLOCK_BYTES / sizeof(A) };                                                    \
        const K k = (K)(scalar.SCALAR);                                                                     \
        const S *first = sources[0], *second = sources[n_sources > 1], *last = sources[n_sources - 1]; \
        S *out = dst;                                                                                  \
        if (n_sources == 1) {                                                                               \
            EACH(count) out[i] = NAME##_out(NAME##_in(first[i], k), k);                                     \
            return;                                                                                         \
        }                                                                                                   \
        if (n_sources == 2) {                                                                               \
            EACH(count) out[i] = NAME##_out(NAME##_fold(NAME##_in(first[i], k), NAME##_in(last[i], k)), k); \
            return;                                                                                         \
        }                                                                                                   \
        for (size_t start = 0; start < count; start += BLOCK) {                                             \
            A sum[BLOCK];                                                                                   \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                  \
            EACH(length) sum[i] = NAME##_fold(NAME##_in(first[start + i], k), NAME##_in(second[start + i], k)); \
            for (int s = 2; s < n_sources - 1; s++) {                                                       \
                const S *next = (const S *)sources[s] + start;                                    \
                EACH(length) sum[i] = NAME##_fold(sum[i], NAME##_in(next[i], k));                           \
            }                                                                                               \
            EACH(length) out[start + i] = NAME##_out(NAME##_fold(sum[i], NAME##_in(last[start + i], k)), k); \
        }                                                                                                   \
    }

/* --- integers ------------------------------------------------------------------------------------------------ */

/* Signed and unsigned sums and products have the same bits; unsigned arithmetic is the one that may wrap.
 * The 1u keeps uint16 * uint16 from being promoted to (signed) int. */
#define WRAPPING_KERNELS(U)                                                 \
    KERNEL(U##_sum, U##_stored, U##_t, int, integer, x, a + b, a)                \
    KERNEL(U##_product, U##_stored, U##_t, int, integer, x, a * 1u * b, a)       \
    KERNEL(U##_premul_sum, U##_stored, U##_t, U##_t, integer, x * 1u * k, a + b, a)

WRAPPING_KERNELS(uint8)
WRAPPING_KERNELS(uint16)
WRAPPING_KERNELS(uint32)
WRAPPING_KERNELS(uint64)

/* Q is a type in which the quotient, cut to an integer, is right for every sum and up to 1024 sources. */
#define SIGN_AWARE_KERNELS(T, U, Q)                                            \
    KERNEL(T##_avg, T##_stored, U##_t, Q, real, x, a + b, (Q)(T##_t)a / k)          \
    KERNEL(T##_min, T##_stored, T##_t, int, integer, x, b < a ? b : a, a)           \
    KERNEL(T##_max, T##_stored, T##_t, int, integer, x, b > a ? b : a, a)

SIGN_AWARE_KERNELS(uint8, uint8, float)
SIGN_AWARE_KERNELS(int8, uint8, float)
SIGN_AWARE_KERNELS(uint16, uint16, float)
SIGN_AWARE_KERNELS(int16, uint16, float)
SIGN_AWARE_KERNELS(uint32, uint32, double)
SIGN_AWARE_KERNELS(int32, uint32, double)
SIGN_AWARE_KERNELS(uint64, uint64, uint64_t)
SIGN_AWARE_KERNELS(int64, uint64, int64_t)

/* Bitwise operations do not care where an element ends. */
KERNEL(bytes_and, uint8_t, uint8_t, int, integer, x, a & b, a)
KERNEL(bytes_or, uint8_t, uint8_t, int, integer, x, a | b, a)
KERNEL(bytes_xor, uint8_t, uint8_t, int, integer, x, a ^ b, a)

/* --- bool ---------------------------------------------------------------------------------------------------- */

KERNEL(bool_any, uint8_t, uint8_t, int, integer, x, a | b, a != 0)
KERNEL(bool_all, uint8_t, uint8_t, int, integer, x != 0, a & b, a)
KERNEL(bool_odd, uint8_t, uint8_t, int, integer, x != 0, a ^ b, a)
KERNEL(bool_premul_sum, uint8_t, uint8_t, uint8_t, real != 0, x, a | b, (a != 0) & k)

/* --- floats -------------------------------------------------------------------------------------------------- */

/* k is the number of sources to `avg`, the factor to `premul_sum`, and to `sum` 1, or what its result is scaled by. */
#define FLOAT_KERNELS(T, A)                                                         \
    KERNEL(T##_sum, T##_stored, A, A, real, x, a + b, a * k)                                     \
    KERNEL(T##_avg, T##_stored, A, A, real, x, a + b, a / k)                                    \
    KERNEL(T##_product, T##_stored, A, int, integer, x, a * b, a)                                \
    KERNEL(T##_min, T##_stored, A, int, integer, x, (b < a) | (b != b) ? b : a, a)              \
    KERNEL(T##_max, T##_stored, A, int, integer, x, (b > a) | (b != b) ? b : a, a)              \
    KERNEL(T##_premul_sum, T##_stored, A, A, real, x * k, a + b, a)

FLOAT_KERNELS(float64, double)
FLOAT_KERNELS(float32, float)

/* --- small floats: to and from blocks of float32 ------------------------------------------------------------- */

#define CONVERSION_KERNELS(T, S)                                                      \
    SYMCOMM_CLONES static void T##_widen(float *out, const void *in, size_t count) {  \
        const S *codes = in;                                                          \
        EACH(count) out[i] = T##_decode(codes[i]);                                    \
    }                                                                                 \
    SYMCOMM_CLONES static void T##_narrow(void *out, const float *in, size_t count) { \
        S *codes = out;                                                               \
        EACH(count) codes[i] = T##_encode(in[i]);                                     \
    }

CONVERSION_KERNELS(bfloat16, uint16_stored)
CONVERSION_KERNELS(float8_e4m3fn, uint8_stored)
CONVERSION_KERNELS(float8_e5m2, uint8_stored)
CONVERSION_KERNELS(float8_e4m3fnuz, uint8_stored)
CONVERSION_KERNELS(float8_e5m2fnuz, uint8_stored)
#if defined(__aarch64__)
#define float16_widen float16_widen_neon
#define float16_narrow float16_narrow_neon
#else
CONVERSION_KERNELS(float16, uint16_stored)
#endif

/* --- complex ------------------------------------------------------------------------------------------------- */

typedef struct {
    float32_stored re, im;
} complex64;
typedef struct {
    float64_stored re, im;
} complex128;

#define COMPLEX_KERNELS(T)                                                                             \
    KERNEL(T##_product, T, T, int, integer, x,                                                         \
           ((T){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}), a)

COMPLEX_KERNELS(complex64)
COMPLEX_KERNELS(complex128)

/* --- the table ----------------------------------------------------------------------------------------------- */

#define INTEGER_TYPE(T, U, SIZE)                                                                           \
    {                                                                                                      \
        #T, SIZE, 0, NULL, NULL, {                                                                                     \
            [RED_SUM] = {U##_sum, 1}, [RED_AVG] = {T##_avg, 1}, [RED_PRODUCT] = {U##_product, 1},          \
            [RED_MIN] = {T##_min, 1}, [RED_MAX] = {T##_max, 1}, [RED_BAND] = {bytes_and, SIZE},            \
            [RED_BOR] = {bytes_or, SIZE}, [RED_BXOR] = {bytes_xor, SIZE},                                  \
            [RED_PREMUL_SUM] = {U##_premul_sum, 1}                                                         \
        }                                                                                                  \
    }

#define FLOAT_OPS(T)                                                                                   \
    {                                                                                                  \
        [RED_SUM] = {T##_sum, 1}, [RED_AVG] = {T##_avg, 1}, [RED_PRODUCT] = {T##_product, 1},          \
        [RED_MIN] = {T##_min, 1}, [RED_MAX] = {T##_max, 1}, [RED_PREMUL_SUM] = {T##_premul_sum, 1}     \
    }
#define FLOAT_TYPE(T, SIZE) {#T, SIZE, 1, NULL, NULL, FLOAT_OPS(T)}
#define SMALL_FLOAT_TYPE(T, SIZE) {#T, SIZE, 1, T##_widen, T##_narrow, FLOAT_OPS(float32)}

#define COMPLEX_TYPE(T, REAL, SIZE)                                                                        \
    {                                                                                                      \
        #T, SIZE, 1, NULL, NULL, {                                                                                     \
            [RED_SUM] = {REAL##_sum, 2}, [RED_AVG] = {REAL##_avg, 2}, [RED_PRODUCT] = {T##_product, 1},    \
            [RED_PREMUL_SUM] = {REAL##_premul_sum, 2}                                                      \
        }                                                                                                  \
    }

const struct reduce_type symcomm_reduce_types[DT_COUNT] = {
    [DT_UINT8] = INTEGER_TYPE(uint8, uint8, 1),
    [DT_INT8] = INTEGER_TYPE(int8, uint8, 1),
    [DT_UINT16] = INTEGER_TYPE(uint16, uint16, 2),
    [DT_INT16] = INTEGER_TYPE(int16, uint16, 2),
    [DT_UINT32] = INTEGER_TYPE(uint32, uint32, 4),
    [DT_INT32] = INTEGER_TYPE(int32, uint32, 4),
    [DT_UINT64] = INTEGER_TYPE(uint64, uint64, 8),
    [DT_INT64] = INTEGER_TYPE(int64, uint64, 8),
    [DT_BOOL] = {"bool", 1, 0, NULL, NULL, {
        [RED_SUM] = {bool_any, 1}, [RED_AVG] = {bool_any, 1}, [RED_PRODUCT] = {bool_all, 1},
        [RED_MIN] = {bool_all, 1}, [RED_MAX] = {bool_any, 1}, [RED_BAND] = {bool_all, 1},
        [RED_BOR] = {bool_any, 1}, [RED_BXOR] = {bool_odd, 1}, [RED_PREMUL_SUM] = {bool_premul_sum, 1},
    }},
    [DT_FLOAT16] = SMALL_FLOAT_TYPE(float16, 2),
    [DT_BFLOAT16] = SMALL_FLOAT_TYPE(bfloat16, 2),
    [DT_FLOAT32] = FLOAT_TYPE(float32, 4),
    [DT_FLOAT64] = FLOAT_TYPE(float64, 8),
    [DT_COMPLEX64] = COMPLEX_TYPE(complex64, float32, 8),
    [DT_COMPLEX128] = COMPLEX_TYPE(complex128, float64, 16),
    [DT_FLOAT8_E4M3FN] = SMALL_FLOAT_TYPE(float8_e4m3fn, 1),
    [DT_FLOAT8_E5M2] = SMALL_FLOAT_TYPE(float8_e5m2, 1),
    [DT_FLOAT8_E4M3FNUZ] = SMALL_FLOAT_TYPE(float8_e4m3fnuz, 1),
    [DT_FLOAT8_E5M2FNUZ] = SMALL_FLOAT_TYPE(float8_e5m2fnuz, 1),
};

const char *const symcomm_reduce_op_names[RED_COUNT] = {
    [RED_SUM] = "SUM", [RED_AVG] = "AVG",   [RED_PRODUCT] = "PRODUCT", [RED_MIN] = "MIN",
    [RED_MAX] = "MAX", [RED_BAND] = "BAND", [RED_BOR] = "BOR",         [RED_BXOR] = "BXOR",
    [RED_PREMUL_SUM] = "PREMUL_SUM",
};
