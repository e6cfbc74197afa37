/* One set of reduction kernels, for the instruction set that the including file has chosen. They are macros, written
 * once and expanded for each element type and operation.
 *
 * What each operation means:
 *   integers   arithmetic wraps around, as torch's; AVG divides the wrapped sum, toward zero;
 *              PREMUL_SUM multiplies by the factor as an integer (toward zero, then wrapped)
 *   bool       any nonzero byte is true and results are 0 or 1; SUM, MAX, BOR and AVG are "any", PRODUCT, MIN and BAND
 *              are "all", BXOR is "an odd number"; PREMUL_SUM is "any", or false when the factor is zero
 *   8 and 16-bit floats   become float32, are combined in float32 over all sources, and are rounded once at the end
 *   floats     combined as a tree (see TREE in reduce/vectors.h), never fused; AVG divides by the number of sources
 *   complex    componentwise but for PRODUCT, which is (ac - bd, ad + bc)
 *   MIN, MAX   a NaN in any source gives NaN; of equal values (0.0 and -0.0) the earliest source's is kept
 *
 * All CPUs and instruction sets give the same bits (except the payload of a NaN), however count is split. */
#include "reduce/float_formats.h"
#include "reduce/half_kernels.h"
#include "reduce/vectors.h"

/* clang-format is off where it would take products of macro arguments for pointers, or spread out tables. */

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

/* How many bytes of each source a pass takes. The accumulators stay in the L1 cache at either size. With small blocks
 * the prefetcher sees each source as a stream, unless there are too many. Sum of float32 out of memory on a Neoverse
 * N1: 8 sources run at 17 GB/s in blocks of 1 KiB and 12 in 4 KiB, 16 sources at 9 and 13. */
enum { SMALL_BLOCK = 1024, LARGE_BLOCK = 4096, MANY_SOURCES = 9 };

/* Keeps the compiler from merging passes over a block into one loop nest, which it could not vectorise. */
#define PASS_ENDS(BLOCK) __asm__ volatile("" : : "r"(BLOCK) : "memory")

/* A kernel stores elements of type S, accumulates in type A and has a scalar k of type K. Its three expressions:
 *   IN    what source element x brings to the accumulation
 *   FOLD  accumulator a combined with the next source's b
 *   OUT   what is stored for the final accumulator a
 * Up to three sources take one loop. More take passes over blocks: the first two or three, then two by two. That is no
 * tree, but gives its bits, since the order does not matter for integers. */
#define KERNEL(NAME, S, A, K, SCALAR, IN, FOLD, OUT)                                                                   \
    SYMCOMM_INLINE A NAME##_in(S x, K k) {                                                                             \
        (void)k;                                                                                                       \
        return IN;                                                                                                     \
    }                                                                                                                  \
    SYMCOMM_INLINE A NAME##_fold(A a, A b) { return FOLD; }                                                            \
    SYMCOMM_INLINE S NAME##_out(A a, K k) {                                                                            \
        (void)k;                                                                                                       \
        return OUT;                                                                                                    \
    }                                                                                                                  \
    SYMCOMM_INLINE A NAME##_two(S x, S y, K k) { return NAME##_fold(NAME##_in(x, k), NAME##_in(y, k)); }               \
    SYMCOMM_INLINE A NAME##_add(A a, S x, K k) { return NAME##_fold(a, NAME##_in(x, k)); }                             \
    static void NAME(void *dst, const void *const *sources, int n, size_t count, struct reduce_scalar scalar) {        \
        const K k = (K)(scalar.SCALAR);                                                                                \
        S *out = dst;                                                                                                  \
        const S *s0 = sources[0], *s1 = sources[n > 1], *s2 = sources[n > 2 ? 2 : 0];                                  \
        if (n == 1) EACH(count) out[i] = NAME##_out(NAME##_in(s0[i], k), k);                                           \
        if (n == 2) EACH(count) out[i] = NAME##_out(NAME##_two(s0[i], s1[i], k), k);                                   \
        if (n == 3) EACH(count) out[i] = NAME##_out(NAME##_add(NAME##_two(s0[i], s1[i], k), s2[i], k), k);             \
        if (n <= 3) return;                                                                                            \
        const size_t block = (n < MANY_SOURCES ? SMALL_BLOCK : LARGE_BLOCK) / sizeof(S);                               \
        A partial[LARGE_BLOCK / sizeof(S)];                                                                            \
        for (size_t start = 0; start < count; start += block) {                                                        \
            const size_t length = count - start < block ? count - start : block;                                       \
            const S *p = s0 + start, *q = s1 + start, *r = s2 + start;                                                 \
            if (n % 2) EACH(length) partial[i] = NAME##_add(NAME##_two(p[i], q[i], k), r[i], k);                       \
            else EACH(length) partial[i] = NAME##_two(p[i], q[i], k);                                                  \
            for (int s = 2 + n % 2; s < n; s += 2) {                                                                   \
                PASS_ENDS(partial);                                                                                    \
                p = (const S *)sources[s] + start, q = (const S *)sources[s + 1] + start;                              \
                if (s < n - 2) EACH(length) partial[i] = NAME##_add(NAME##_add(partial[i], p[i], k), q[i], k);         \
                else                                                                                                   \
                    EACH(length) out[start + i] = NAME##_out(NAME##_add(NAME##_add(partial[i], p[i], k), q[i], k), k); \
            }                                                                                                          \
        }                                                                                                              \
    }

/* --- integers ------------------------------------------------------------------------------------------------ */

/* Signed and unsigned sums and products have the same bits; unsigned arithmetic is the one that may wrap.
 * The 1u keeps uint16 * uint16 from being promoted to (signed) int. */
/* clang-format off */
#define WRAPPING_KERNELS(U)                                                \
    KERNEL(U##_sum, U##_stored, U##_t, int, integer, x, a + b, a)          \
    KERNEL(U##_product, U##_stored, U##_t, int, integer, x, a * 1u * b, a) \
    KERNEL(U##_premul_sum, U##_stored, U##_t, U##_t, integer, x * 1u * k, a + b, a)

WRAPPING_KERNELS(uint8)
WRAPPING_KERNELS(uint16)
WRAPPING_KERNELS(uint32)
WRAPPING_KERNELS(uint64)

/* Q is a type in which the quotient, truncated to an integer, is right for every sum of up to 1024 sources. */
#define SIGN_AWARE_KERNELS(T, U, Q)                                        \
    KERNEL(T##_avg, T##_stored, U##_t, Q, real, x, a + b, (Q)(T##_t)a / k) \
    KERNEL(T##_min, T##_stored, T##_t, int, integer, x, b < a ? b : a, a)  \
    KERNEL(T##_max, T##_stored, T##_t, int, integer, x, b > a ? b : a, a)

SIGN_AWARE_KERNELS(uint8, uint8, float)
SIGN_AWARE_KERNELS(int8, uint8, float)
SIGN_AWARE_KERNELS(uint16, uint16, float)
SIGN_AWARE_KERNELS(int16, uint16, float)
SIGN_AWARE_KERNELS(uint32, uint32, double)
SIGN_AWARE_KERNELS(int32, uint32, double)
SIGN_AWARE_KERNELS(uint64, uint64, uint64_t)
SIGN_AWARE_KERNELS(int64, uint64, int64_t)

/* Bitwise operations need not know where an element ends. */
KERNEL(bytes_and, uint8_t, uint8_t, int, integer, x, a & b, a)
KERNEL(bytes_or, uint8_t, uint8_t, int, integer, x, a | b, a)
KERNEL(bytes_xor, uint8_t, uint8_t, int, integer, x, a ^ b, a)

/* --- bool ---------------------------------------------------------------------------------------------------- */

KERNEL(bool_any, uint8_t, uint8_t, int, integer, x, a | b, a != 0)
KERNEL(bool_all, uint8_t, uint8_t, int, integer, x != 0, a & b, a)
KERNEL(bool_odd, uint8_t, uint8_t, int, integer, x != 0, a ^ b, a)
KERNEL(bool_premul_sum, uint8_t, uint8_t, uint8_t, real != 0, x, a | b, (a != 0) & k)
/* clang-format on */

/* --- floats -------------------------------------------------------------------------------------------------- */

FLOAT_KERNELS(float64, float64, float64, double, PLAIN)
FLOAT_KERNELS(float32, float32, float32, float, PLAIN)
FLOAT_KERNELS(float8_e4m3fn, float8_e4m3fn, float8_e4m3fn, float, SHORT)
FLOAT_KERNELS(float8_e5m2, float8_e5m2, float8_e5m2, float, SHORT)
FLOAT_KERNELS(float8_e4m3fnuz, float8_e4m3fnuz, float8_e4m3fnuz, float, SHORT)
FLOAT_KERNELS(float8_e5m2fnuz, float8_e5m2fnuz, float8_e5m2fnuz, float, SHORT)

/* --- complex: products; all else is done by parts ------------------------------------------------------------- */

FOLD_AND_KERNEL(complex64_product, complex64, float, PLAIN, x, complex64_times(a, b))
FOLD_AND_KERNEL(complex128_product, complex128, double, PLAIN, x, complex128_times(a, b))

/* --- the table ----------------------------------------------------------------------------------------------- */

/* clang-format off */
#define INTEGER_TYPE(T, U, SIZE)                                                                  \
    {#T, SIZE, 0,                                                                                 \
     {[RED_SUM] = {U##_sum, 1}, [RED_AVG] = {T##_avg, 1}, [RED_PRODUCT] = {U##_product, 1},       \
      [RED_MIN] = {T##_min, 1}, [RED_MAX] = {T##_max, 1}, [RED_PREMUL_SUM] = {U##_premul_sum, 1}, \
      [RED_BAND] = {bytes_and, SIZE}, [RED_BOR] = {bytes_or, SIZE}, [RED_BXOR] = {bytes_xor, SIZE}}}

#define COMPLEX_OPS(T, REAL)                                                                     \
    {[RED_SUM] = {REAL##_sum, 2}, [RED_AVG] = {REAL##_avg, 2}, [RED_PRODUCT] = {T##_product, 1}, \
     [RED_PREMUL_SUM] = {REAL##_premul_sum, 2}, [RED_MEAN] = {REAL##_mean, 2}}

static const struct reduce_type all_types[DT_COUNT] = {
    [DT_UINT8] = INTEGER_TYPE(uint8, uint8, 1),
    [DT_INT8] = INTEGER_TYPE(int8, uint8, 1),
    [DT_UINT16] = INTEGER_TYPE(uint16, uint16, 2),
    [DT_INT16] = INTEGER_TYPE(int16, uint16, 2),
    [DT_UINT32] = INTEGER_TYPE(uint32, uint32, 4),
    [DT_INT32] = INTEGER_TYPE(int32, uint32, 4),
    [DT_UINT64] = INTEGER_TYPE(uint64, uint64, 8),
    [DT_INT64] = INTEGER_TYPE(int64, uint64, 8),
    [DT_BOOL] = {"bool", 1, 0,
                 {[RED_SUM] = {bool_any, 1}, [RED_AVG] = {bool_any, 1}, [RED_PRODUCT] = {bool_all, 1},
                  [RED_MIN] = {bool_all, 1}, [RED_MAX] = {bool_any, 1}, [RED_PREMUL_SUM] = {bool_premul_sum, 1},
                  [RED_BAND] = {bool_all, 1}, [RED_BOR] = {bool_any, 1}, [RED_BXOR] = {bool_odd, 1}}},
    [DT_FLOAT16] = FLOAT16_TYPE,
    [DT_BFLOAT16] = BFLOAT16_TYPE,
    [DT_FLOAT32] = {"float32", 4, 1, FLOAT_OPS(float32)},
    [DT_FLOAT64] = {"float64", 8, 1, FLOAT_OPS(float64)},
    [DT_COMPLEX64] = {"complex64", 8, 1, COMPLEX_OPS(complex64, float32)},
    [DT_COMPLEX128] = {"complex128", 16, 1, COMPLEX_OPS(complex128, float64)},
    [DT_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1, 1, FLOAT_OPS(float8_e4m3fn)},
    [DT_FLOAT8_E5M2] = {"float8_e5m2", 1, 1, FLOAT_OPS(float8_e5m2)},
    [DT_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", 1, 1, FLOAT_OPS(float8_e4m3fnuz)},
    [DT_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", 1, 1, FLOAT_OPS(float8_e5m2fnuz)},
};
/* clang-format on */
