/* Vectors as wide as the instruction set's registers, and kernels made of them.
 *
 * Included by one file per instruction set, which defines SYMCOMM_SET_AVX512, _AVX2, _FP16 or _BF16 where it is not the
 * baseline. The vector extensions of GCC and Clang do the arithmetic, intrinsics what these cannot express. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce/kernels.h"

#if defined(SYMCOMM_SET_AVX512)
#define VECTOR_BYTES 64
#elif defined(SYMCOMM_SET_AVX2)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define SYMCOMM_INLINE static inline __attribute__((always_inline, unused))
#define SYMCOMM_CALLED static __attribute__((noinline, unused))
#define VECTOR __attribute__((vector_size(VECTOR_BYTES)))

typedef float floats VECTOR;
typedef double doubles VECTOR;
typedef uint32_t words VECTOR;
typedef uint16_t halves VECTOR;
typedef int32_t ints VECTOR;

/* How many bytes of each source a pass takes. The accumulators stay in the L1 cache at either size. With small blocks
 * the prefetcher sees each source as a stream, unless there are too many. Sum of float32 out of memory on a Neoverse
 * N1: 8 sources run at 17 GB/s in blocks of 1 KiB and 12 in 4 KiB, 16 sources at 9 and 13. */
enum { SMALL_BLOCK = 1024, LARGE_BLOCK = 4096, MANY_SOURCES = 9 };

/* --- what compilers do not see in the arithmetic ------------------------------------------------------------- */

/* Bits of `yes` where the mask has ones, of `no` elsewhere. */
SYMCOMM_INLINE ints pick_ints(ints mask, ints yes, ints no) {
#if defined(__aarch64__)
    return (ints)vbslq_u32((uint32x4_t)mask, (uint32x4_t)yes, (uint32x4_t)no);
#elif defined(SYMCOMM_SET_AVX2)
    return (ints)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
#else
    return (mask & yes) | (~mask & no);
#endif
}

/* The smaller or larger of two values; `a` if they are equal (0.0 and -0.0); NaN if either is one. */
#if defined(__aarch64__) /* its own minimum is right except for zeros */
#define ORDER_VECTORS(V, SUFFIX)                                                  \
    SYMCOMM_INLINE V lesser_##V(V a, V b) {                                       \
        return (V)pick_ints((ints)(a == b), (ints)a, (ints)vminq_##SUFFIX(a, b)); \
    }                                                                             \
    SYMCOMM_INLINE V greater_##V(V a, V b) { return (V)pick_ints((ints)(a == b), (ints)a, (ints)vmaxq_##SUFFIX(a, b)); }
#else
#define ORDER_VECTORS(V, SUFFIX)                                                                                 \
    SYMCOMM_INLINE V lesser_##V(V a, V b) { return (V)pick_ints((ints)((b < a) | (b != b)), (ints)b, (ints)a); } \
    SYMCOMM_INLINE V greater_##V(V a, V b) { return (V)pick_ints((ints)((b > a) | (b != b)), (ints)b, (ints)a); }
#endif
ORDER_VECTORS(floats, f32)
ORDER_VECTORS(doubles, f64)
SYMCOMM_INLINE float lesser_float(float a, float b) { return b < a || b != b ? b : a; }
SYMCOMM_INLINE float greater_float(float a, float b) { return b > a || b != b ? b : a; }
SYMCOMM_INLINE double lesser_double(double a, double b) { return b < a || b != b ? b : a; }
SYMCOMM_INLINE double greater_double(double a, double b) { return b > a || b != b ? b : a; }

/* The same words for vectors and for one element. */
#define FOR_TYPE(NAME, A) \
    _Generic((A), floats: NAME##_floats, doubles: NAME##_doubles, float: NAME##_float, double: NAME##_double)
#define LESSER(A, B) FOR_TYPE(lesser, A)(A, B)
#define GREATER(A, B) FOR_TYPE(greater, A)(A, B)

/* a - b, or 0 where that would be negative. */
SYMCOMM_INLINE halves subtract_saturating(halves a, halves b) {
#if defined(__aarch64__)
    return (halves)vqsubq_u16((uint16x8_t)a, (uint16x8_t)b);
#elif defined(SYMCOMM_SET_AVX512)
    return (halves)_mm512_subs_epu16((__m512i)a, (__m512i)b);
#elif defined(SYMCOMM_SET_AVX2)
    return (halves)_mm256_subs_epu16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (halves)_mm_subs_epu16((__m128i)a, (__m128i)b);
#else
    return (halves)(a > b) & (a - b);
#endif
}

/* The upper, or lower, halves of all words: those of `even` at even places, of `odd` at odd ones. */
SYMCOMM_INLINE halves upper_halves(words even, words odd) {
#if defined(__aarch64__)
    return (halves)vtrn2q_u16((uint16x8_t)even, (uint16x8_t)odd);
#elif defined(SYMCOMM_SET_AVX2)
    return (halves)_mm256_blend_epi16((__m256i)(even >> 16), (__m256i)odd, 0xaa);
#else
    return (halves)((even >> 16) | (odd & 0xffff0000));
#endif
}
SYMCOMM_INLINE halves lower_halves(words even, words odd) {
#if defined(__aarch64__)
    return (halves)vtrn1q_u16((uint16x8_t)even, (uint16x8_t)odd);
#elif defined(SYMCOMM_SET_AVX2)
    return (halves)_mm256_blend_epi16((__m256i)even, (__m256i)(odd << 16), 0xaa);
#else
    return (halves)((even & 0xffff) | (odd << 16));
#endif
}

/* --- elements in memory: at any address ---------------------------------------------------------------------- */

SYMCOMM_INLINE words words_at(const char *from, int i) {
    words value;
    memcpy(&value, from + i * VECTOR_BYTES, sizeof value);
    return value;
}
SYMCOMM_INLINE void put_words(char *to, int i, words value) { memcpy(to + i * VECTOR_BYTES, &value, sizeof value); }

/* A format T has: T_vector, the type of accumulators; T_quad, four of them; T_unit, how many bytes of elements fill
 * four; T_load and T_store, which take such a unit from memory and put it there. */
typedef float float32_element;
typedef double float64_element;
typedef floats float32_vector;
typedef doubles float64_vector;
typedef struct {
    floats v0, v1, v2, v3;
} float32_quad;
typedef struct {
    doubles v0, v1, v2, v3;
} float64_quad;
enum {
    float32_size = 4,
    float32_unit = 4 * VECTOR_BYTES,
    float64_size = 8,
    float64_unit = 4 * VECTOR_BYTES,
};

#define PLAIN_FORMAT(T)                                                                                                \
    SYMCOMM_INLINE T##_quad T##_load(const char *from) {                                                               \
        return (T##_quad){(T##_vector)words_at(from, 0), (T##_vector)words_at(from, 1), (T##_vector)words_at(from, 2), \
                          (T##_vector)words_at(from, 3)};                                                              \
    }                                                                                                                  \
    SYMCOMM_INLINE void T##_store(char *to, T##_quad q) {                                                              \
        put_words(to, 0, (words)q.v0), put_words(to, 1, (words)q.v1);                                                  \
        put_words(to, 2, (words)q.v2), put_words(to, 3, (words)q.v3);                                                  \
    }
PLAIN_FORMAT(float32)
PLAIN_FORMAT(float64)
SYMCOMM_INLINE float float32_one_at(const char *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}
SYMCOMM_INLINE double float64_one_at(const char *from) {
    double value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* --- kernels ------------------------------------------------------------------------------------------------- */

/* Sources are combined as a tree: its left side is the largest power of two below their number, its right side the
 * rest. So every aligned power of two of them is a subtree. They come by fours. A sum waits, the widest first, until as
 * many sources stand to its right: the i-th four completes as many waiting sums as i has ones at its end. */
enum { LEVELS = 8 }; /* the most sums that wait, for 1024 sources */
#define COMPLETED(FOUR) __builtin_ctz(~(unsigned)(FOUR))

/* Combines n > 0 sources into a, of type A. READ: source i. */
#define TREE(A, a, n, READ, FOLD)                                                             \
    A a;                                                                                      \
    {                                                                                         \
        int i = 0;                                                                            \
        a = READ;                                                                             \
        if (n <= 3) /* their tree is a row */                                                 \
            for (i = 1; i < n; i++) a = FOLD(a, READ);                                        \
        else {                                                                                \
            A waiting[LEVELS], b;                                                             \
            int depth = 0;                                                                    \
            for (;;) {                                                                        \
                i++, a = FOLD(a, READ);                                                       \
                i++, b = READ;                                                                \
                i++, b = FOLD(b, READ);                                                       \
                i++, a = FOLD(a, b);                                                          \
                if (i == n) break;                                                            \
                for (int m = COMPLETED(i / 4 - 1); m > 0; m--) a = FOLD(waiting[--depth], a); \
                waiting[depth++] = a;                                                         \
                a = READ;                                                                     \
                if (i + 4 > n) {                                                              \
                    for (i++; i < n; i++) a = FOLD(a, READ);                                  \
                    break;                                                                    \
                }                                                                             \
            }                                                                                 \
            while (depth > 0) a = FOLD(waiting[--depth], a);                                  \
        }                                                                                     \
    }

/* Less than a unit, vector by vector, then one by one: for formats that need no conversion. */
#define FEW_ONE_BY_ONE(NAME, T, K, IN, FOLD, OUT)                                                 \
    SYMCOMM_INLINE T##_element NAME##_in_one(T##_element x, K k) {                                \
        (void)k;                                                                                  \
        return IN;                                                                                \
    }                                                                                             \
    SYMCOMM_INLINE T##_element NAME##_fold_one(T##_element a, T##_element b) { return FOLD; }     \
    SYMCOMM_INLINE T##_element NAME##_out_one(T##_element a, K k) {                               \
        (void)k;                                                                                  \
        return OUT;                                                                               \
    }                                                                                             \
    SYMCOMM_INLINE void NAME##_few(char *out, const char *const *s, int n, size_t count, K k) {   \
        const size_t bytes = count * sizeof(T##_element);                                         \
        size_t at = 0;                                                                            \
        for (; at + VECTOR_BYTES <= bytes; at += VECTOR_BYTES) {                                  \
            TREE(T##_vector, a, n, NAME##_in((T##_vector)words_at(s[i] + at, 0), k), NAME##_fold) \
            put_words(out + at, 0, (words)NAME##_out(a, k));                                      \
        }                                                                                         \
        for (; at < bytes; at += sizeof(T##_element)) {                                           \
            TREE(T##_element, a, n, NAME##_in_one(T##_one_at(s[i] + at), k), NAME##_fold_one)     \
            a = NAME##_out_one(a, k);                                                             \
            memcpy(out + at, &a, sizeof a);                                                       \
        }                                                                                         \
    }

/* Copies a few bytes without a call of memcpy(). */
SYMCOMM_INLINE void copy_few(char *to, const char *from, size_t bytes) {
    size_t at = 0;
    for (; at + 16 <= bytes; at += 16) memcpy(to + at, from + at, 16);
    if (bytes & 8) memcpy(to + at, from + at, 8), at += 8;
    if (bytes & 4) memcpy(to + at, from + at, 4), at += 4;
    if (bytes & 2) memcpy(to + at, from + at, 2), at += 2;
    if (bytes & 1) to[at] = from[at];
}

/* Less than a unit, filled up with zeros to a whole one: for formats that are converted many at a time. */
#define FEW_PADDED(NAME, T, K, IN, FOLD, OUT)                                                   \
    SYMCOMM_INLINE void NAME##_few(char *out, const char *const *s, int n, size_t count, K k) { \
        char unit[T##_unit] = {0};                                                              \
        const size_t bytes = count * T##_size;                                                  \
        TREE(T##_quad, a, n, (copy_few(unit, s[i], bytes), NAME##_first(unit, k)), NAME##_join) \
        NAME##_last(unit, a, k);                                                                \
        copy_few(out, unit, bytes);                                                             \
    }

/* More than four sources, in passes over blocks, by fours. */
#define PASSES(NAME, T, K)                                                                                 \
    SYMCOMM_INLINE T##_quad NAME##_four(const char *p, const char *q, const char *r, const char *t, K k) { \
        return NAME##_join(NAME##_next(NAME##_first(p, k), q, k), NAME##_next(NAME##_first(r, k), t, k));  \
    }                                                                                                      \
    static void NAME##_passes(char *out, const char *const *s, int n, size_t end, K k) {                   \
        const size_t block = n < MANY_SOURCES ? SMALL_BLOCK : LARGE_BLOCK;                                 \
        T##_quad waiting[LEVELS][LARGE_BLOCK / T##_unit];                                                  \
        for (size_t start = 0; start < end; start += block) {                                              \
            const size_t stop = end - start < block ? end : start + block;                                 \
            int i = 0, depth = 0;                                                                          \
            for (; i + 4 < n; i += 4) {                                                                    \
                const char *p = s[i], *q = s[i + 1], *r = s[i + 2], *t = s[i + 3];                         \
                const int low = depth - COMPLETED(i / 4);                                                  \
                T##_quad *to = waiting[low];                                                               \
                if (low == depth)                                                                          \
                    for (size_t at = start; at < stop; at += T##_unit)                                     \
                        *to++ = NAME##_four(p + at, q + at, r + at, t + at, k);                            \
                else                                                                                       \
                    for (size_t at = start, u = 0; at < stop; at += T##_unit, u++) {                       \
                        T##_quad a = NAME##_four(p + at, q + at, r + at, t + at, k);                       \
                        for (int j = depth; j > low;) a = NAME##_join(waiting[--j][u], a);                 \
                        to[u] = a;                                                                         \
                    }                                                                                      \
                depth = low + 1;                                                                           \
            }                                                                                              \
            const int rest = n - i;                                                                        \
            const char *p = s[i], *q = s[n - 1], *r = s[n - 2], *t = s[n - (rest < 3 ? 1 : 3)];            \
            const T##_quad *before = waiting[depth - 1];                                                   \
            for (size_t at = start, u = 0; at < stop; at += T##_unit, u++) {                               \
                T##_quad a;                                                                                \
                if (rest == 4) a = NAME##_four(p + at, t + at, r + at, q + at, k);                         \
                else {                                                                                     \
                    a = NAME##_first(p + at, k);                                                           \
                    if (rest == 3) a = NAME##_next(a, r + at, k);                                          \
                    if (rest > 1) a = NAME##_next(a, q + at, k);                                           \
                }                                                                                          \
                a = NAME##_join(before[u], a);                                                             \
                for (int j = depth - 1; j > 0;) a = NAME##_join(waiting[--j][u], a);                       \
                NAME##_last(out + at, a, k);                                                               \
            }                                                                                              \
        }                                                                                                  \
    }

/* A kernel over elements of format T with a scalar k of type K. Its three expressions, on vectors of accumulators:
 *   IN    what source element x brings to the accumulation
 *   FOLD  accumulator a combined with the next source's b
 *   OUT   what is stored for the final accumulator a
 * The last unit overlaps the one before it if the count is no multiple of a unit. It is computed first, since dst may
 * be one of the sources. FEW handles counts below one unit. */
#define VECTOR_KERNEL(NAME, T, K, SCALAR, FEW, IN, FOLD, OUT)                                                          \
    SYMCOMM_INLINE T##_vector NAME##_in(T##_vector x, K k) {                                                           \
        (void)k;                                                                                                       \
        return IN;                                                                                                     \
    }                                                                                                                  \
    SYMCOMM_INLINE T##_vector NAME##_fold(T##_vector a, T##_vector b) { return FOLD; }                                 \
    SYMCOMM_INLINE T##_vector NAME##_out(T##_vector a, K k) {                                                          \
        (void)k;                                                                                                       \
        return OUT;                                                                                                    \
    }                                                                                                                  \
    SYMCOMM_INLINE T##_quad NAME##_first(const char *from, K k) {                                                      \
        T##_quad q = T##_load(from);                                                                                   \
        return (T##_quad){NAME##_in(q.v0, k), NAME##_in(q.v1, k), NAME##_in(q.v2, k), NAME##_in(q.v3, k)};             \
    }                                                                                                                  \
    SYMCOMM_INLINE T##_quad NAME##_join(T##_quad a, T##_quad b) {                                                      \
        return (T##_quad){NAME##_fold(a.v0, b.v0), NAME##_fold(a.v1, b.v1), NAME##_fold(a.v2, b.v2),                   \
                          NAME##_fold(a.v3, b.v3)};                                                                    \
    }                                                                                                                  \
    SYMCOMM_INLINE T##_quad NAME##_next(T##_quad a, const char *from, K k) {                                           \
        return NAME##_join(a, NAME##_first(from, k));                                                                  \
    }                                                                                                                  \
    SYMCOMM_INLINE void NAME##_last(char *to, T##_quad a, K k) {                                                       \
        T##_store(to, (T##_quad){NAME##_out(a.v0, k), NAME##_out(a.v1, k), NAME##_out(a.v2, k), NAME##_out(a.v3, k)}); \
    }                                                                                                                  \
    FEW(NAME, T, K, IN, FOLD, OUT)                                                                                     \
    PASSES(NAME, T, K)                                                                                                 \
    static void NAME(void *dst, const void *const *sources, int n, size_t count, struct reduce_scalar scalar) {        \
        const K k = (K)(scalar.SCALAR);                                                                                \
        const char *const *s = (const char *const *)sources;                                                           \
        if (count < T##_unit / T##_size) {                                                                             \
            NAME##_few(dst, s, n, count, k);                                                                           \
            return;                                                                                                    \
        }                                                                                                              \
        char *out = dst, last_unit[T##_unit];                                                                          \
        const size_t bytes = count * T##_size, rest = bytes % T##_unit, end = bytes - rest, last = bytes - T##_unit;   \
        if (rest) {                                                                                                    \
            TREE(T##_quad, a, n, NAME##_first(s[i] + last, k), NAME##_join)                                            \
            NAME##_last(last_unit, a, k);                                                                              \
        }                                                                                                              \
        const char *p = s[0], *q = s[n > 1], *r = s[n > 2 ? 2 : 0], *t = s[n > 3 ? 3 : 0];                             \
        if (n == 1)                                                                                                    \
            for (size_t at = 0; at < end; at += T##_unit) NAME##_last(out + at, NAME##_first(p + at, k), k);           \
        else if (n == 2)                                                                                               \
            for (size_t at = 0; at < end; at += T##_unit)                                                              \
                NAME##_last(out + at, NAME##_next(NAME##_first(p + at, k), q + at, k), k);                             \
        else if (n == 3)                                                                                               \
            for (size_t at = 0; at < end; at += T##_unit)                                                              \
                NAME##_last(out + at, NAME##_next(NAME##_next(NAME##_first(p + at, k), q + at, k), r + at, k), k);     \
        else if (n == 4)                                                                                               \
            for (size_t at = 0; at < end; at += T##_unit)                                                              \
                NAME##_last(out + at, NAME##_four(p + at, q + at, r + at, t + at, k), k);                              \
        else NAME##_passes(out, s, n, end, k);                                                                         \
        if (rest) memcpy(out + last, last_unit, T##_unit);                                                             \
    }
