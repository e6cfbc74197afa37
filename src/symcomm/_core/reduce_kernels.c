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

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "float_formats.h"
#include "reduce_kernels.h"

/* A fused multiply-add rounds once where two instructions round twice: bits would depend on the CPU.
 * Assuming that no float traps lets choices between floats vectorise. Vectors are all that -O3 adds here: its other
 * loop transformations cost 40% more code and time to build, and gain nothing. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("O2", "tree-loop-vectorize", "vect-cost-model=dynamic", "fp-contract=off", "no-trapping-math")
#endif

/* How many bytes of each source a pass takes. The accumulators stay in the L1 cache at either size; small blocks let the
 * prefetcher see all sources as streams, until they are too many for it. Sum of float32 out of memory on a Neoverse N1:
 * 8 sources run at 17 GB/s in blocks of 1 KiB and 12 in 4 KiB, 16 sources at 9 and 13. */
enum { SMALL_BLOCK = 1024, LARGE_BLOCK = 4096, MANY_SOURCES = 9 };

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
#if defined(__aarch64__) /* every CPU converts four float16 at a time */
typedef float16x4_t float16x4_stored ANYWHERE;
#endif

/* Keeps the compiler from merging passes over a block into one loop nest, which it then fails to vectorise. */
#define PASS_ENDS(BLOCK) __asm__ volatile("" : : "r"(BLOCK) : "memory")

/* A kernel stores elements of type S, accumulates in type A and has a scalar k of type K. Its three expressions:
 *   IN    what source element x brings to the accumulation
 *   FOLD  accumulator a combined with the next source's b
 *   OUT   what is stored for the final accumulator a
 * Up to three sources take one loop. More take passes over blocks: the first two or three, then two by two. */
#define KERNEL(NAME, S, A, K, SCALAR, IN, FOLD, OUT)                                                                    \
    SYMCOMM_INLINE A NAME##_in(S x, K k) { (void)k; return IN; }                                                        \
    SYMCOMM_INLINE A NAME##_fold(A a, A b) { return FOLD; }                                                             \
    SYMCOMM_INLINE S NAME##_out(A a, K k) { (void)k; return OUT; }                                                      \
    SYMCOMM_INLINE A NAME##_two(S x, S y, K k) { return NAME##_fold(NAME##_in(x, k), NAME##_in(y, k)); }                \
    SYMCOMM_INLINE A NAME##_add(A a, S x, K k) { return NAME##_fold(a, NAME##_in(x, k)); }                              \
    SYMCOMM_CLONES static void NAME(void *dst, const void *const *sources, int n, size_t count,                         \
                                    struct reduce_scalar scalar) {                                                      \
        const K k = (K)(scalar.SCALAR);                                                                                 \
        S *out = dst;                                                                                                   \
        const S *s0 = sources[0], *s1 = sources[n > 1], *s2 = sources[n > 2 ? 2 : 0];                                   \
        if (n == 1) EACH(count) out[i] = NAME##_out(NAME##_in(s0[i], k), k);                                            \
        if (n == 2) EACH(count) out[i] = NAME##_out(NAME##_two(s0[i], s1[i], k), k);                                    \
        if (n == 3) EACH(count) out[i] = NAME##_out(NAME##_add(NAME##_two(s0[i], s1[i], k), s2[i], k), k);              \
        if (n <= 3) return;                                                                                             \
        const size_t block = (n < MANY_SOURCES ? SMALL_BLOCK : LARGE_BLOCK) / sizeof(S);                                \
        A partial[LARGE_BLOCK / sizeof(S)];                                                                             \
        for (size_t start = 0; start < count; start += block) {                                                         \
            const size_t length = count - start < block ? count - start : block;                                        \
            const S *p = s0 + start, *q = s1 + start, *r = s2 + start;                                                  \
            if (n % 2) EACH(length) partial[i] = NAME##_add(NAME##_two(p[i], q[i], k), r[i], k);                        \
            else EACH(length) partial[i] = NAME##_two(p[i], q[i], k);                                                   \
            for (int s = 2 + n % 2; s < n; s += 2) {                                                                    \
                PASS_ENDS(partial);                                                                                     \
                p = (const S *)sources[s] + start, q = (const S *)sources[s + 1] + start;                               \
                if (s < n - 2) EACH(length) partial[i] = NAME##_add(NAME##_add(partial[i], p[i], k), q[i], k);          \
                else EACH(length) out[start + i] = NAME##_out(NAME##_add(NAME##_add(partial[i], p[i], k), q[i], k), k); \
            }                                                                                                           \
        }                                                                                                               \
    }

/* --- integers ------------------------------------------------------------------------------------------------ */

/* Signed and unsigned sums and products have the same bits; unsigned arithmetic is the one that may wrap.
 * The 1u keeps uint16 * uint16 from being promoted to (signed) int. */
#define WRAPPING_KERNELS(U)                                                \
    KERNEL(U##_sum, U##_stored, U##_t, int, integer, x, a + b, a)          \
    KERNEL(U##_product, U##_stored, U##_t, int, integer, x, a * 1u * b, a) \
    KERNEL(U##_premul_sum, U##_stored, U##_t, U##_t, integer, x * 1u * k, a + b, a)

WRAPPING_KERNELS(uint8)
WRAPPING_KERNELS(uint16)
WRAPPING_KERNELS(uint32)
WRAPPING_KERNELS(uint64)

/* Q is a type in which the quotient, cut to an integer, is right for every sum and up to 1024 sources. */
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

/* k is the number of sources to `avg`, its inverse to `mean` and the factor to `premul_sum`. */
#define FLOAT_KERNELS(T, S, A, K, LOAD, STORE, SELECT)                                       \
    KERNEL(T##_sum, S, A, int, integer, LOAD(x), a + b, STORE(a))                            \
    KERNEL(T##_mean, S, A, K, real, LOAD(x), a + b, STORE(a * k))                            \
    KERNEL(T##_avg, S, A, K, real, LOAD(x), a + b, STORE(a / k))                             \
    KERNEL(T##_product, S, A, int, integer, LOAD(x), a * b, STORE(a))                        \
    KERNEL(T##_min, S, A, int, integer, LOAD(x), SELECT((b < a) | (b != b), b, a), STORE(a)) \
    KERNEL(T##_max, S, A, int, integer, LOAD(x), SELECT((b > a) | (b != b), b, a), STORE(a)) \
    KERNEL(T##_premul_sum, S, A, K, real, LOAD(x) * k, a + b, STORE(a))

#define AS_IT_IS(value) (value)
#define CHOOSE(condition, yes, no) ((condition) ? (yes) : (no))

FLOAT_KERNELS(float64, float64_stored, double, double, AS_IT_IS, AS_IT_IS, CHOOSE)
FLOAT_KERNELS(float32, float32_stored, float, float, AS_IT_IS, AS_IT_IS, CHOOSE)
FLOAT_KERNELS(bfloat16, uint16_stored, float, float, bfloat16_decode, bfloat16_encode, CHOOSE)
#if defined(__aarch64__)
FLOAT_KERNELS(float16, float16x4_stored, float32x4_t, float, vcvt_f32_f16, vcvt_f16_f32, vbslq_f32)
#define FLOAT16_LANES 4
#define FLOAT16_OPS FLOAT_OPS(float16)
#else
#define FLOAT16_LANES 0
#define FLOAT16_OPS FLOAT_OPS(float32)
#endif

/* --- small floats to and from blocks of float32 ------------------------------------------------------------- */

#define CONVERSION_KERNELS(T, S, FORMAT)                                              \
    SYMCOMM_CLONES static void T##_widen(float *out, const void *in, size_t count) {  \
        const S *codes = in;                                                          \
        EACH(count) out[i] = FORMAT##_decode(codes[i]);                               \
    }                                                                                 \
    SYMCOMM_CLONES static void T##_narrow(void *out, const float *in, size_t count) { \
        S *codes = out;                                                               \
        EACH(count) codes[i] = FORMAT##_encode(in[i]);                                \
    }

CONVERSION_KERNELS(float8_e4m3fn, uint8_stored, float8_e4m3fn)
CONVERSION_KERNELS(float8_e5m2, uint8_stored, float8_e5m2)
CONVERSION_KERNELS(float8_e4m3fnuz, uint8_stored, float8_e4m3fnuz)
CONVERSION_KERNELS(float8_e5m2fnuz, uint8_stored, float8_e5m2fnuz)
#if !defined(__x86_64__)
CONVERSION_KERNELS(float16, uint16_stored, float16)
#else
CONVERSION_KERNELS(float16_any_cpu, uint16_stored, float16)

/* Most x86 CPUs convert eight at a time; these return how many they did. */
__attribute__((target("avx,f16c"))) static size_t float16_widen_f16c(float *out, const void *in, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m128i codes = _mm_loadu_si128((const __m128i_u *)((const uint16_stored *)in + i));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(codes));
    }
    return i;
}

__attribute__((target("avx,f16c"))) static size_t float16_narrow_f16c(void *out, const float *in, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m128i codes = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i_u *)((uint16_stored *)out + i), codes);
    }
    return i;
}

static void float16_widen(float *out, const void *in, size_t count) {
    size_t done = __builtin_cpu_supports("f16c") ? float16_widen_f16c(out, in, count) : 0;
    float16_any_cpu_widen(out + done, (const uint16_stored *)in + done, count - done);
}

static void float16_narrow(void *out, const float *in, size_t count) {
    size_t done = __builtin_cpu_supports("f16c") ? float16_narrow_f16c(out, in, count) : 0;
    float16_any_cpu_narrow((uint16_stored *)out + done, in + done, count - done);
}
#endif

/* --- complex ------------------------------------------------------------------------------------------------- */

typedef struct {
    float32_stored re, im;
} complex64;
typedef struct {
    float64_stored re, im;
} complex128;

/* A sum whose second term has its sign flipped, since GCC 12 fuses alternating - and + even when told not to. */
SYMCOMM_INLINE float negative_of_float32(float value) { return float_of(bits_of(value) ^ 1u << 31); }
SYMCOMM_INLINE double negative_of_float64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits ^= 1ull << 63;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define COMPLEX_KERNELS(T, REAL)               \
    KERNEL(T##_product, T, T, int, integer, x, \
           ((T){a.re * b.re + negative_of_##REAL(a.im * b.im), a.re * b.im + a.im * b.re}), a)

COMPLEX_KERNELS(complex64, float32)
COMPLEX_KERNELS(complex128, float64)

/* --- the table ----------------------------------------------------------------------------------------------- */

#define INTEGER_TYPE(T, U, SIZE)                                                                  \
    {#T, SIZE, 0, 1, NULL, NULL,                                                                  \
     {[RED_SUM] = {U##_sum, 1}, [RED_AVG] = {T##_avg, 1}, [RED_PRODUCT] = {U##_product, 1},       \
      [RED_MIN] = {T##_min, 1}, [RED_MAX] = {T##_max, 1}, [RED_PREMUL_SUM] = {U##_premul_sum, 1}, \
      [RED_BAND] = {bytes_and, SIZE}, [RED_BOR] = {bytes_or, SIZE}, [RED_BXOR] = {bytes_xor, SIZE}}}

#define FLOAT_OPS(T)                                                                             \
    {[RED_SUM] = {T##_sum, 1}, [RED_AVG] = {T##_avg, 1}, [RED_PRODUCT] = {T##_product, 1},       \
     [RED_MIN] = {T##_min, 1}, [RED_MAX] = {T##_max, 1}, [RED_PREMUL_SUM] = {T##_premul_sum, 1}, \
     [RED_MEAN] = {T##_mean, 1}}

#define COMPLEX_OPS(T, REAL)                                                                     \
    {[RED_SUM] = {REAL##_sum, 2}, [RED_AVG] = {REAL##_avg, 2}, [RED_PRODUCT] = {T##_product, 1}, \
     [RED_PREMUL_SUM] = {REAL##_premul_sum, 2}, [RED_MEAN] = {REAL##_mean, 2}}

#define FLOAT8_TYPE(T) {#T, 1, 1, 0, T##_widen, T##_narrow, FLOAT_OPS(float32)}

const struct reduce_type symcomm_reduce_types[DT_COUNT] = {
    [DT_UINT8] = INTEGER_TYPE(uint8, uint8, 1),
    [DT_INT8] = INTEGER_TYPE(int8, uint8, 1),
    [DT_UINT16] = INTEGER_TYPE(uint16, uint16, 2),
    [DT_INT16] = INTEGER_TYPE(int16, uint16, 2),
    [DT_UINT32] = INTEGER_TYPE(uint32, uint32, 4),
    [DT_INT32] = INTEGER_TYPE(int32, uint32, 4),
    [DT_UINT64] = INTEGER_TYPE(uint64, uint64, 8),
    [DT_INT64] = INTEGER_TYPE(int64, uint64, 8),
    [DT_BOOL] = {"bool", 1, 0, 1, NULL, NULL,
                 {[RED_SUM] = {bool_any, 1}, [RED_AVG] = {bool_any, 1}, [RED_PRODUCT] = {bool_all, 1},
                  [RED_MIN] = {bool_all, 1}, [RED_MAX] = {bool_any, 1}, [RED_PREMUL_SUM] = {bool_premul_sum, 1},
                  [RED_BAND] = {bool_all, 1}, [RED_BOR] = {bool_any, 1}, [RED_BXOR] = {bool_odd, 1}}},
    [DT_FLOAT16] = {"float16", 2, 1, FLOAT16_LANES, float16_widen, float16_narrow, FLOAT16_OPS},
    [DT_BFLOAT16] = {"bfloat16", 2, 1, 1, NULL, NULL, FLOAT_OPS(bfloat16)},
    [DT_FLOAT32] = {"float32", 4, 1, 1, NULL, NULL, FLOAT_OPS(float32)},
    [DT_FLOAT64] = {"float64", 8, 1, 1, NULL, NULL, FLOAT_OPS(float64)},
    [DT_COMPLEX64] = {"complex64", 8, 1, 1, NULL, NULL, COMPLEX_OPS(complex64, float32)},
    [DT_COMPLEX128] = {"complex128", 16, 1, 1, NULL, NULL, COMPLEX_OPS(complex128, float64)},
    [DT_FLOAT8_E4M3FN] = FLOAT8_TYPE(float8_e4m3fn),
    [DT_FLOAT8_E5M2] = FLOAT8_TYPE(float8_e5m2),
    [DT_FLOAT8_E4M3FNUZ] = FLOAT8_TYPE(float8_e4m3fnuz),
    [DT_FLOAT8_E5M2FNUZ] = FLOAT8_TYPE(float8_e5m2fnuz),
};

const char *const symcomm_reduce_op_names[RED_COUNT] = {
    [RED_SUM] = "SUM", [RED_AVG] = "AVG",   [RED_PRODUCT] = "PRODUCT", [RED_MIN] = "MIN",
    [RED_MAX] = "MAX", [RED_BAND] = "BAND", [RED_BOR] = "BOR",         [RED_BXOR] = "BXOR",
    [RED_PREMUL_SUM] = "PREMUL_SUM",
};
