/* Vectors as wide as the instruction set's registers, and kernels made of them.
 *
 * Included by one file per instruction set, which defines SYMCOMM_SET_AVX2, _AVX512 (and _AVX2 or _WIDE), _FP16 or
 * _BF16 where it is not the baseline. The vector extensions of GCC and Clang do the arithmetic, intrinsics what these
 * cannot express. */
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

#if defined(SYMCOMM_SET_WIDE)
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
typedef uint64_t eights VECTOR;
typedef uint32_t words VECTOR;
typedef uint16_t halves VECTOR;
typedef int32_t ints VECTOR;

/* --- what compilers do not see in the arithmetic ------------------------------------------------------------- */

/* Bits of `yes` where the mask has ones, of `no` elsewhere. */
SYMCOMM_INLINE ints pick_ints(ints mask, ints yes, ints no) {
#if defined(__aarch64__)
    return (ints)vbslq_u32((uint32x4_t)mask, (uint32x4_t)yes, (uint32x4_t)no);
#elif defined(SYMCOMM_SET_AVX2) && !defined(SYMCOMM_SET_AVX512)
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

#define FOR_TYPE(NAME, A) _Generic((A), floats: NAME##_floats, doubles: NAME##_doubles)
#define LESSER(A, B) FOR_TYPE(lesser, A)(A, B)
#define GREATER(A, B) FOR_TYPE(greater, A)(A, B)

/* a - b, or 0 where that would be negative. */
SYMCOMM_INLINE halves subtract_saturating(halves a, halves b) {
#if defined(__aarch64__)
    return (halves)vqsubq_u16((uint16x8_t)a, (uint16x8_t)b);
#elif defined(SYMCOMM_SET_WIDE)
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

/* The first bytes of a vector, at least one; the others are zeros. */
#if defined(SYMCOMM_SET_WIDE)
#define FIRST_BYTES(BYTES) (~0ull >> (64 - (BYTES)))
SYMCOMM_INLINE words few_words_at(const char *from, size_t bytes) {
    return (words)_mm512_maskz_loadu_epi8(FIRST_BYTES(bytes), from);
}
SYMCOMM_INLINE void put_few_words(char *to, words value, size_t bytes) {
    _mm512_mask_storeu_epi8(to, FIRST_BYTES(bytes), (__m512i)value);
}
#elif defined(SYMCOMM_SET_AVX512)
#define FIRST_BYTES(BYTES) (~0u >> (32 - (BYTES)))
SYMCOMM_INLINE words few_words_at(const char *from, size_t bytes) {
    return (words)_mm256_maskz_loadu_epi8(FIRST_BYTES(bytes), from);
}
SYMCOMM_INLINE void put_few_words(char *to, words value, size_t bytes) {
    _mm256_mask_storeu_epi8(to, FIRST_BYTES(bytes), (__m256i)value);
}
#else
SYMCOMM_INLINE uint64_t few_bytes_at(const char *from, size_t bytes) { /* 1 to 8 */
    uint64_t eight;
    uint32_t first, last;
    uint16_t two;
    if (bytes == 8) return memcpy(&eight, from, 8), eight;
    if (bytes >= 4) { /* both may have the same bytes */
        memcpy(&first, from, 4), memcpy(&last, from + bytes - 4, 4);
        return first | (uint64_t)last << 8 * (bytes - 4);
    }
    if (bytes == 1) return (unsigned char)*from;
    memcpy(&two, from, 2);
    return two | (uint64_t)(unsigned char)from[bytes - 1] << 8 * (bytes - 1);
}
SYMCOMM_INLINE void put_few_bytes(char *to, uint64_t value, size_t bytes) {
    const uint64_t last = value >> 8 * (bytes < 4 ? bytes - 1 : bytes - 4);
    if (bytes == 8) memcpy(to, &value, 8);
    else if (bytes >= 4) memcpy(to, &value, 4), memcpy(to + bytes - 4, &last, 4);
    else {
        if (bytes > 1) memcpy(to, &value, 2);
        to[bytes - 1] = (char)last;
    }
}
typedef uint64_t two_eights __attribute__((vector_size(16)));
SYMCOMM_INLINE two_eights sixteen_at(const char *from, size_t bytes) { /* 1 to 16 */
    if (bytes <= 8) return (two_eights){few_bytes_at(from, bytes)};
    return (two_eights){few_bytes_at(from, 8), few_bytes_at(from + 8, bytes - 8)};
}
SYMCOMM_INLINE void put_sixteen(char *to, two_eights value, size_t bytes) {
    put_few_bytes(to, value[0], bytes < 8 ? bytes : 8);
    if (bytes > 8) put_few_bytes(to + 8, value[1], bytes - 8);
}
#if VECTOR_BYTES == 16
SYMCOMM_INLINE words few_words_at(const char *from, size_t bytes) { return (words)sixteen_at(from, bytes); }
SYMCOMM_INLINE void put_few_words(char *to, words value, size_t bytes) { put_sixteen(to, (two_eights)value, bytes); }
#else
/* Masks are of four bytes; other numbers of bytes take longer. */
SYMCOMM_INLINE __m256i first_words(size_t bytes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)bytes), (__m256i)(ints){0, 4, 8, 12, 16, 20, 24, 28});
}
SYMCOMM_CALLED words odd_words_at(const char *from, size_t bytes) {
    const two_eights low = sixteen_at(from, bytes < 16 ? bytes : 16), none = {0};
    const two_eights high = bytes > 16 ? sixteen_at(from + 16, bytes - 16) : none;
    return (words)(eights){low[0], low[1], high[0], high[1]};
}
SYMCOMM_CALLED void put_odd_words(char *to, words value, size_t bytes) {
    const eights v = (eights)value;
    put_sixteen(to, (two_eights){v[0], v[1]}, bytes < 16 ? bytes : 16);
    if (bytes > 16) put_sixteen(to + 16, (two_eights){v[2], v[3]}, bytes - 16);
}
SYMCOMM_INLINE words few_words_at(const char *from, size_t bytes) {
    if (bytes % 4) return odd_words_at(from, bytes);
    return (words)_mm256_maskload_epi32((const int *)from, first_words(bytes));
}
SYMCOMM_INLINE void put_few_words(char *to, words value, size_t bytes) {
    if (bytes % 4) put_odd_words(to, value, bytes);
    else _mm256_maskstore_epi32((int *)to, first_words(bytes), (__m256i)value);
}
#endif
#endif

SYMCOMM_INLINE void fill_unit(char *unit, const char *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += VECTOR_BYTES)
        put_words(unit + at, 0, few_words_at(from + at, bytes - at < VECTOR_BYTES ? bytes - at : VECTOR_BYTES));
}
SYMCOMM_INLINE void put_few(char *to, const char *unit, size_t bytes) {
    for (size_t at = 0; at < bytes; at += VECTOR_BYTES)
        put_few_words(to + at, words_at(unit + at, 0), bytes - at < VECTOR_BYTES ? bytes - at : VECTOR_BYTES);
}

/* A format T has: T_vector, the type of accumulators; T_quad, four of them; T_unit, how many bytes of elements fill
 * four; T_load and T_store, which take such a unit from memory and put it there. */
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

/* Complex numbers: real and imaginary parts in turns. */
typedef floats complex64_vector;
typedef doubles complex128_vector;
typedef float32_quad complex64_quad;
typedef float64_quad complex128_quad;
enum {
    complex64_size = 8,
    complex64_unit = 4 * VECTOR_BYTES,
    complex128_size = 16,
    complex128_unit = 4 * VECTOR_BYTES,
};
PLAIN_FORMAT(complex64)
PLAIN_FORMAT(complex128)

/* Lanes A and B of each pair. */
#define TWO_PAIRS(A, B) A, B, A + 2, B + 2
#define FOUR_PAIRS(A, B) TWO_PAIRS(A, B), TWO_PAIRS(A + 4, B + 4)
#if VECTOR_BYTES == 32
#define PAIRS_OF_8(A, B) TWO_PAIRS(A, B)
#define PAIRS_OF_4(A, B) FOUR_PAIRS(A, B)
#else
#define PAIRS_OF_8(A, B) A, B
#define PAIRS_OF_4(A, B) TWO_PAIRS(A, B)
#endif
#if defined(__clang__)
#define PICK(V, INDEX, PAIRS) __builtin_shufflevector(V, V, PAIRS)
#else
#define PICK(V, INDEX, PAIRS) __builtin_shuffle(V, (INDEX){PAIRS})
#endif

/* (ac - bd, ad + bc). We subtract by adding with the sign flipped, since GCC 12 fuses alternating - and + even when
 * told not to. */
#define COMPLEX_TIMES(NAME, V, U, PAIRS, BITS)                                          \
    SYMCOMM_INLINE V NAME##_times(V a, V b) {                                           \
        const U signs = (((U){PAIRS(0, 1)} & 1) - 1) << (BITS - 1); /* of real parts */ \
        V second = PICK(a, U, PAIRS(1, 1)) * PICK(b, U, PAIRS(1, 0));                   \
        return PICK(a, U, PAIRS(0, 0)) * b + (V)((U)second ^ signs);                    \
    }
COMPLEX_TIMES(complex64, floats, words, PAIRS_OF_4, 32)
COMPLEX_TIMES(complex128, doubles, eights, PAIRS_OF_8, 64)

/* --- kernels ------------------------------------------------------------------------------------------------- */

/* Sources are combined as a tree: its left side is the largest power of two below their number, its right side the
 * rest. So every aligned power of two of them is a subtree. They come in groups of four, or eight. A sum waits, the
 * widest first, until as many sources stand to its right: group i completes as many waiting sums as i has ones at its
 * end. */
enum { LEVELS = 8 }; /* the most sums that wait, for 1024 sources */
#define COMPLETED(NUMBER) __builtin_ctz(~(unsigned)(NUMBER))

/* Combines m sources, four at most, into a, of type A. READ(source, ...): what one brings. */
#define UP_TO_FOUR(A, a, s, m, FOLD, READ, ...)           \
    A a = READ((s)[0], __VA_ARGS__);                      \
    if ((m) > 1) a = FOLD(a, READ((s)[1], __VA_ARGS__));  \
    if ((m) == 3) a = FOLD(a, READ((s)[2], __VA_ARGS__)); \
    if ((m) > 3) a = FOLD(a, FOLD(READ((s)[2], __VA_ARGS__), READ((s)[3], __VA_ARGS__)));

/* The same for any number n > 0. */
#define TREE(A, a, s, n, FOLD, READ, ...)                                          \
    UP_TO_FOUR(A, a, s, n, FOLD, READ, __VA_ARGS__)                                \
    if (n > 4) {                                                                   \
        A waiting[LEVELS];                                                         \
        for (int i = 4, depth = 0; i < n; i += 4) {                                \
            UP_TO_FOUR(A, b, s + i, n - i, FOLD, READ, __VA_ARGS__)                \
            const int completed = i + 4 < n ? COMPLETED(i / 4) : depth + 1;        \
            if (completed == 0) {                                                  \
                waiting[depth++] = a;                                              \
                a = b;                                                             \
            } else {                                                               \
                a = FOLD(a, b);                                                    \
                for (int c = 1; c < completed; c++) a = FOLD(waiting[--depth], a); \
            }                                                                      \
        }                                                                          \
    }

/* How sources of format T, with a scalar k of type K, are combined. Two expressions, on vectors of accumulators:
 *   IN    what source element x brings to the accumulation
 *   FOLD  accumulator a combined with the next source's b */
#define VECTOR_FOLD(NAME, T, K, IN, FOLD)                                                                  \
    SYMCOMM_INLINE T##_vector NAME##_in(T##_vector x, K k) {                                               \
        (void)k;                                                                                           \
        return IN;                                                                                         \
    }                                                                                                      \
    SYMCOMM_INLINE T##_vector NAME##_fold(T##_vector a, T##_vector b) { return FOLD; }                     \
    SYMCOMM_INLINE T##_quad NAME##_join(T##_quad a, T##_quad b) {                                          \
        return (T##_quad){NAME##_fold(a.v0, b.v0), NAME##_fold(a.v1, b.v1), NAME##_fold(a.v2, b.v2),       \
                          NAME##_fold(a.v3, b.v3)};                                                        \
    }                                                                                                      \
    SYMCOMM_INLINE T##_quad NAME##_at(const char *from, size_t at, K k) {                                  \
        T##_quad q = T##_load(from + at);                                                                  \
        return (T##_quad){NAME##_in(q.v0, k), NAME##_in(q.v1, k), NAME##_in(q.v2, k), NAME##_in(q.v3, k)}; \
    }

/* A kernel of FOLDED's: what it stores is OUT of the final accumulator a. */
#define VECTOR_OUT(NAME, T, K, OUT)                                                                                    \
    SYMCOMM_INLINE T##_vector NAME##_out(T##_vector a, K k) {                                                          \
        (void)k;                                                                                                       \
        return OUT;                                                                                                    \
    }                                                                                                                  \
    SYMCOMM_INLINE void NAME##_last(char *to, T##_quad a, K k) {                                                       \
        T##_store(to, (T##_quad){NAME##_out(a.v0, k), NAME##_out(a.v1, k), NAME##_out(a.v2, k), NAME##_out(a.v3, k)}); \
    }

/* Folds and kernels come in three styles. PLAIN: for formats that need no conversion. Less than a unit is combined
 * vector by vector. */
#define PLAIN_FOLDS(NAME, T, K)                                                             \
    SYMCOMM_INLINE T##_vector NAME##_few_at(const char *from, size_t at, size_t few, K k) { \
        return NAME##_in((T##_vector)few_words_at(from + at, few), k);                      \
    }                                                                                       \
    BLOCK_FOLDS(NAME, T, K)
#define PLAIN_KERNEL(NAME, FOLDED, T, K, OUT)                                                                       \
    VECTOR_OUT(NAME, T, K, OUT)                                                                                     \
    EACH_FEW(NAME##_few, NAME, T, K, UP_TO_FOUR(T##_vector, a, s, n, FOLDED##_fold, FOLDED##_few_at, at, few, k))   \
    EACH_FEW(NAME##_few_of_many, NAME, T, K, TREE(T##_vector, a, s, n, FOLDED##_fold, FOLDED##_few_at, at, few, k)) \
    BLOCK_KERNEL(NAME, FOLDED, T, K)
#define EACH_FEW(FUNCTION, NAME, T, K, MAKE_A)                                                \
    SYMCOMM_CALLED void FUNCTION(char *out, const char *const *s, int n, size_t bytes, K k) { \
        for (size_t at = 0; at < bytes; at += VECTOR_BYTES) {                                 \
            const size_t few = bytes - at < VECTOR_BYTES ? bytes - at : VECTOR_BYTES;         \
            MAKE_A                                                                            \
            put_few_words(out + at, (words)NAME##_out(a, k), few);                            \
        }                                                                                     \
    }

/* PADDED: for formats that are converted many at a time. Less than a unit is filled up with zeros to a whole one. */
#define PADDED_TREE(NAME, T, K)                                                               \
    SYMCOMM_CALLED T##_quad NAME##_few_at(const char *from, char *unit, size_t bytes, K k) {  \
        fill_unit(unit, from, bytes);                                                         \
        return NAME##_at(unit, 0, k);                                                         \
    }                                                                                         \
    SYMCOMM_CALLED T##_quad NAME##_few_tree(const char *const *s, int n, size_t bytes, K k) { \
        char unit[T##_unit] = {0};                                                            \
        TREE(T##_quad, a, s, n, NAME##_join, NAME##_few_at, unit, bytes, k)                   \
        return a;                                                                             \
    }
#define PADDED_FOLDS(NAME, T, K) PADDED_TREE(NAME, T, K) BLOCK_FOLDS(NAME, T, K)
#define PADDED_KERNEL(NAME, FOLDED, T, K, OUT)                                                          \
    VECTOR_OUT(NAME, T, K, OUT)                                                                         \
    SYMCOMM_CALLED void NAME##_few_of_many(char *out, const char *const *s, int n, size_t bytes, K k) { \
        char unit[T##_unit];                                                                            \
        NAME##_last(unit, FOLDED##_few_tree(s, n, bytes, k), k);                                        \
        put_few(out, unit, bytes);                                                                      \
    }                                                                                                   \
    SYMCOMM_INLINE void NAME##_few(char *out, const char *const *s, int n, size_t bytes, K k) {         \
        NAME##_few_of_many(out, s, n, bytes, k);                                                        \
    }                                                                                                   \
    BLOCK_KERNEL(NAME, FOLDED, T, K)

/* Loops over whole units, of up to eight sources at a time. With more, sums wait for a block, which fits in the L1
 * cache. */
enum { BLOCK = 4096 };
#define NTH(s, m, j) (s)[(m) > j ? j : 0]
#define EIGHT_OF(f, s, m)                                                             \
    const char *const f[8] = {NTH(s, m, 0), NTH(s, m, 1), NTH(s, m, 2), NTH(s, m, 3), \
                              NTH(s, m, 4), NTH(s, m, 5), NTH(s, m, 6), NTH(s, m, 7)};
#define BLOCK_FOLDS(NAME, T, K)                                                                                 \
    SYMCOMM_INLINE T##_quad NAME##_up_to_eight(const char *const *s, int m, size_t at, K k) {                   \
        UP_TO_FOUR(T##_quad, a, s, m, NAME##_join, NAME##_at, at, k)                                            \
        if (m <= 4) return a;                                                                                   \
        UP_TO_FOUR(T##_quad, b, s + 4, m - 4, NAME##_join, NAME##_at, at, k)                                    \
        return NAME##_join(a, b);                                                                               \
    }                                                                                                           \
    /* Eight sources, and the sums that they complete. */                                                       \
    SYMCOMM_CALLED void NAME##_eight(T##_quad(*waiting)[BLOCK / T##_unit], int completed, const char *const *s, \
                                     size_t start, size_t stop, K k) {                                          \
        EIGHT_OF(f, s, 8)                                                                                       \
        for (size_t at = start, u = 0; at < stop; at += T##_unit, u++) {                                        \
            T##_quad a = NAME##_up_to_eight(f, 8, at, k);                                                       \
            for (int j = completed; j > 0;) a = NAME##_join(waiting[--j][u], a);                                \
            waiting[0][u] = a;                                                                                  \
        }                                                                                                       \
    }

/* The last unit overlaps the one before it if the count is no multiple of a unit. It is computed first, since dst may
 * be one of the sources. */
#define BLOCK_KERNEL(NAME, FOLDED, T, K)                                                                        \
    SYMCOMM_INLINE T##_quad NAME##_up_to_four(const char *const *s, int n, size_t at, K k) {                    \
        UP_TO_FOUR(T##_quad, a, s, n, FOLDED##_join, FOLDED##_at, at, k)                                        \
        return a;                                                                                               \
    }                                                                                                           \
    SYMCOMM_CALLED void NAME##_of_few(char *out, const char *const *s, int n, size_t bytes, K k) {              \
        const size_t rest = bytes % T##_unit, end = bytes - rest, last = bytes - T##_unit;                      \
        char last_unit[T##_unit];                                                                               \
        const char *const f[4] = {NTH(s, n, 0), NTH(s, n, 1), NTH(s, n, 2), NTH(s, n, 3)};                      \
        if (rest) NAME##_last(last_unit, NAME##_up_to_four(f, n, last, k), k);                                  \
        if (n == 1) EACH_UNIT(T) NAME##_last(out + at, NAME##_up_to_four(f, 1, at, k), k);                      \
        if (n == 2) EACH_UNIT(T) NAME##_last(out + at, NAME##_up_to_four(f, 2, at, k), k);                      \
        if (n == 3) EACH_UNIT(T) NAME##_last(out + at, NAME##_up_to_four(f, 3, at, k), k);                      \
        if (n == 4) EACH_UNIT(T) NAME##_last(out + at, NAME##_up_to_four(f, 4, at, k), k);                      \
        if (rest) memcpy(out + last, last_unit, T##_unit);                                                      \
    }                                                                                                           \
    SYMCOMM_CALLED void NAME##_of_many(char *out, const char *const *s, int n, size_t bytes, K k) {             \
        const size_t rest = bytes % T##_unit, end = bytes - rest, last = bytes - T##_unit;                      \
        char last_unit[T##_unit], *to = last_unit;                                                              \
        T##_quad waiting[LEVELS][BLOCK / T##_unit];                                                             \
        for (int whole = rest == 0; whole < 2; whole++) {                                                       \
            if (whole) to = out;                                                                                \
            const size_t finish = whole ? end : bytes;                                                          \
            for (size_t start = whole ? 0 : last, stop; start < finish; start = stop) {                         \
                stop = n <= 8 || finish - start < BLOCK ? finish : start + BLOCK;                               \
                int i = 0, depth = 0;                                                                           \
                for (; i + 8 < n; i += 8) {                                                                     \
                    depth -= COMPLETED(i / 8);                                                                  \
                    FOLDED##_eight(waiting + depth++, COMPLETED(i / 8), s + i, start, stop, k);                 \
                }                                                                                               \
                EIGHT_OF(f, s + i, n - i)                                                                       \
                for (size_t at = start, u = 0; at < stop; at += T##_unit, u++, to += T##_unit) {                \
                    T##_quad a = FOLDED##_up_to_eight(f, n - i, at, k);                                         \
                    for (int j = depth; j > 0;) a = FOLDED##_join(waiting[--j][u], a);                          \
                    NAME##_last(to, a, k);                                                                      \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
        if (rest) memcpy(out + last, last_unit, T##_unit);                                                      \
    }                                                                                                           \
    /* Each case is a function, since the frame of the largest would cost a small one more than its work. */    \
    static void NAME(void *dst, const void *const *sources, int n, size_t count, struct reduce_scalar scalar) { \
        const char *const *s = (const char *const *)sources;                                                    \
        const size_t bytes = count * T##_size;                                                                  \
        const K k = (K)(scalar.real);                                                                           \
        if (bytes >= T##_unit) (n > 4 ? NAME##_of_many : NAME##_of_few)(dst, s, n, bytes, k);                   \
        else if (bytes) (n > 4 ? NAME##_few_of_many : NAME##_few)(dst, s, n, bytes, k);                         \
    }
#define EACH_UNIT(T) for (size_t at = 0; at < end; at += T##_unit)

/* SHORT: for formats whose conversion takes longer than all else. One loop takes any number of sources, one by one. */
#define SHORT_FOLDS(NAME, T, K)                                                                              \
    SYMCOMM_CALLED T##_quad NAME##_tree(const char *const *s, int n, size_t at, size_t bytes, K k) {         \
        char unit[T##_unit] = {0};                                                                           \
        T##_quad waiting[LEVELS + 2];                                                                        \
        for (int i = 0, depth = 0;; i++, depth++) {                                                          \
            const char *from = s[i] + at;                                                                    \
            if (bytes < T##_unit) fill_unit(unit, from, bytes), from = unit;                                 \
            T##_quad a = NAME##_at(from, 0, k);                                                              \
            for (int c = i + 1 < n ? COMPLETED(i) : depth; c > 0; c--) a = NAME##_join(waiting[--depth], a); \
            if (i + 1 == n) return a;                                                                        \
            waiting[depth] = a;                                                                              \
        }                                                                                                    \
    }
#define SHORT_KERNEL(NAME, FOLDED, T, K, OUT)                                                                     \
    VECTOR_OUT(NAME, T, K, OUT)                                                                                   \
    static void NAME(void *dst, const void *const *sources, int n, size_t count, struct reduce_scalar scalar) {   \
        const K k = (K)(scalar.real);                                                                             \
        const size_t bytes = count * T##_size;                                                                    \
        char *out = dst, unit[T##_unit];                                                                          \
        for (size_t at = 0; at < bytes; at += T##_unit) {                                                         \
            const int whole = bytes - at >= T##_unit;                                                             \
            NAME##_last(whole ? out + at : unit,                                                                  \
                        FOLDED##_tree((const char *const *)sources, n, at, whole ? T##_unit : bytes - at, k), k); \
            if (!whole) put_few(out + at, unit, bytes - at);                                                      \
        }                                                                                                         \
    }
