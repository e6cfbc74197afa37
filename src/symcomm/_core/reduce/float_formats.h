/* 16-bit and 8-bit floats to and from float32, a vector at a time.
 *
 * Every encoder rounds to nearest, ties to even, and agrees with torch's `.to(dtype)` on all values; the payload
 * of a NaN is not specified. The CPU must be in its default mode, rounding to nearest. */
#pragma once

#include "reduce/vectors.h"

/* Formats that are accumulated in float32. */
#define SMALL_FORMAT(T, SIZE)          \
    typedef float32_vector T##_vector; \
    typedef float32_quad T##_quad;     \
    enum { T##_size = SIZE, T##_unit = SIZE * VECTOR_BYTES };

/* --- bfloat16: the upper half of a float32 ------------------------------------------------------------------- */

SMALL_FORMAT(bfloat16, 2)
SMALL_FORMAT(bfloat16_exact, 2)

#if defined(SYMCOMM_SET_BF16)
SYMCOMM_INLINE float32_quad bfloat16_load(const char *from) {
    uint16x8_t low = (uint16x8_t)words_at(from, 0), high = (uint16x8_t)words_at(from, 1);
    return (float32_quad){(floats)vshll_n_u16(vget_low_u16(low), 16), (floats)vshll_high_n_u16(low, 16),
                          (floats)vshll_n_u16(vget_low_u16(high), 16), (floats)vshll_high_n_u16(high, 16)};
}
/* The CPU's own conversion: to nearest, ties to even, subnormals kept, a NaN made quiet. */
SYMCOMM_INLINE words bfloat16_encode(floats first, floats second) {
    words both;
    __asm__("bfcvtn %0.4h, %1.4s" : "=w"(both) : "w"(first));
    __asm__("bfcvtn2 %0.8h, %1.4s" : "+w"(both) : "w"(second));
    return both;
}
SYMCOMM_INLINE words bfloat16_cut(floats first, floats second) {
    return (words)vuzp2q_u16((uint16x8_t)first, (uint16x8_t)second);
}
#else
/* A word of two elements has the first in its lower half. Taking the even and the odd ones needs no shuffle. */
SYMCOMM_INLINE float32_quad bfloat16_load(const char *from) {
    words low = words_at(from, 0), high = words_at(from, 1);
    return (float32_quad){(floats)(low << 16), (floats)(low & 0xffff0000), (floats)(high << 16),
                          (floats)(high & 0xffff0000)};
}
/* Rounds in 16-bit halves, of which a vector holds twice as many: up if the lower half is more than half of the last
 * place, or exactly half of an odd one. A NaN stays one: its lower half is 0, whether it comes from a source, from
 * arithmetic or from the factor (symcomm_reduce() sees to that), so nothing is added to its upper half. */
SYMCOMM_INLINE words bfloat16_encode(floats even, floats odd) {
    halves upper = upper_halves((words)even, (words)odd), lower = lower_halves((words)even, (words)odd);
    return (words)(upper + (subtract_saturating(lower, ~upper & 1) >> 15));
}
SYMCOMM_INLINE words bfloat16_cut(floats even, floats odd) { return (words)upper_halves((words)even, (words)odd); }
#endif

SYMCOMM_INLINE void bfloat16_store(char *to, float32_quad q) {
    put_words(to, 0, bfloat16_encode(q.v0, q.v1));
    put_words(to, 1, bfloat16_encode(q.v2, q.v3));
}

/* For results that are elements of the sources, and need no rounding. */
SYMCOMM_INLINE float32_quad bfloat16_exact_load(const char *from) { return bfloat16_load(from); }
SYMCOMM_INLINE void bfloat16_exact_store(char *to, float32_quad q) {
    put_words(to, 0, bfloat16_cut(q.v0, q.v1));
    put_words(to, 1, bfloat16_cut(q.v2, q.v3));
}

/* --- every other small format: sign, exponent, mantissa ------------------------------------------------------ */

/* A code without its sign is a "magnitude"; magnitudes sort like the values they stand for. */
struct small_float {
    int sign_shift;    /* where the sign sits: 7 or 15 */
    int mantissa;      /* bits of the mantissa */
    int bias;          /* of the exponent */
    int32_t overflow;  /* magnitude that values too large become; only NaNs lie above */
    int32_t nan;       /* magnitude that NaN becomes */
    int has_infinity;  /* then it is `overflow` */
    int unsigned_zero; /* "uz": the code of negative zero is the only NaN, and overflow becomes it too */
};

/* E4M3FN has no infinity, and saturates: what torch 2.13 does (earlier ones made it NaN). */
#define FORMAT_float16 ((struct small_float){15, 10, 15, 0x7c00, 0x7e00, 1, 0})
#define FORMAT_float8_e4m3fn ((struct small_float){7, 3, 7, 0x7e, 0x7f, 0, 0})
#define FORMAT_float8_e5m2 ((struct small_float){7, 2, 15, 0x7c, 0x7f, 1, 0})
#define FORMAT_float8_e4m3fnuz ((struct small_float){7, 3, 8, 0x80, 0x80, 0, 1})
#define FORMAT_float8_e5m2fnuz ((struct small_float){7, 2, 16, 0x80, 0x80, 0, 1})

enum { FLOAT32_INFINITY = 0x7f800000, FLOAT32_NAN = 0x7fc00000 };

SYMCOMM_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `format` is a constant at every call, so all of its fields fold away. */
SYMCOMM_INLINE floats small_float_decode(words code, const struct small_float format) {
    const int shift = 23 - format.mantissa;
    const uint32_t sign_bit = 1u << format.sign_shift;
    ints magnitude = (ints)(code & (sign_bit - 1));
    ints normal = (magnitude << shift) + ((127 - format.bias) << 23);
    /* Subnormals are a whole number of the smallest step. */
    const float step = float_of((uint32_t)(127 + 1 - format.bias - format.mantissa) << 23);
    ints subnormal = (ints)(__builtin_convertvector(magnitude, floats) * step);
    words bits = (words)pick_ints((ints)(magnitude >= 1 << format.mantissa), normal, subnormal);
    /* An exponent of ones means infinity if the mantissa has no bits, else NaN. */
    if (format.has_infinity) bits |= (words)(magnitude >= format.overflow) & FLOAT32_INFINITY;
    else if (format.unsigned_zero) bits |= (words)(code == sign_bit) & FLOAT32_NAN;
    else bits |= (words)(magnitude > format.overflow) & FLOAT32_NAN;
    return (floats)(bits | (code & sign_bit) << (31 - format.sign_shift));
}

SYMCOMM_INLINE words small_float_encode(floats value, const struct small_float format) {
    const int shift = 23 - format.mantissa;
    const ints overflow = format.overflow + (ints){0}, nan = format.nan + (ints){0};
    words bits = (words)value, sign = bits >> 31 << format.sign_shift, absolute = bits & 0x7fffffff;
    words odd = absolute >> shift & 1;
    ints normal = (ints)(((absolute + odd + ((1u << (shift - 1)) - 1)) >> shift) -
                         ((uint32_t)(127 - format.bias) << format.mantissa));
    /* Added to this, a subnormal's last place is the float32's last place, so that the addition itself rounds. */
    const uint32_t aligner = (uint32_t)(127 + 1 - format.bias - format.mantissa + 23) << 23;
    ints subnormal = (ints)((floats)absolute + float_of(aligner)) - (int32_t)aligner;
    const int32_t smallest_normal = (127 + 1 - format.bias) << 23;
    ints magnitude = pick_ints((ints)((ints)absolute < smallest_normal), subnormal, normal);
    magnitude = pick_ints((ints)(magnitude > format.overflow), overflow, magnitude);
    magnitude = pick_ints((ints)((ints)absolute > FLOAT32_INFINITY), nan, magnitude);
    if (format.unsigned_zero) sign &= (words)(magnitude != 0);
    return (words)magnitude | sign;
}

/* --- float16 ------------------------------------------------------------------------------------------------- */

SMALL_FORMAT(float16, 2)

#if defined(__aarch64__) /* every CPU converts four at a time */
SYMCOMM_INLINE float32_quad float16_load(const char *from) {
    float16x8_t low = (float16x8_t)words_at(from, 0), high = (float16x8_t)words_at(from, 1);
    return (float32_quad){(floats)vcvt_f32_f16(vget_low_f16(low)), (floats)vcvt_high_f32_f16(low),
                          (floats)vcvt_f32_f16(vget_low_f16(high)), (floats)vcvt_high_f32_f16(high)};
}
SYMCOMM_INLINE void float16_store(char *to, float32_quad q) {
    put_words(to, 0, (words)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)q.v0), (float32x4_t)q.v1));
    put_words(to, 1, (words)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)q.v2), (float32x4_t)q.v3));
}

#elif defined(SYMCOMM_SET_WIDE) || defined(SYMCOMM_SET_AVX2)
SYMCOMM_INLINE floats float16_load_vector(const char *from, int i) {
#if defined(SYMCOMM_SET_WIDE)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i * VECTOR_BYTES / 2)));
#else
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i * VECTOR_BYTES / 2)));
#endif
}
SYMCOMM_INLINE void float16_store_vector(char *to, int i, floats value) {
#if defined(SYMCOMM_SET_WIDE)
    _mm256_storeu_si256((void *)(to + i * VECTOR_BYTES / 2), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#else
    _mm_storeu_si128((void *)(to + i * VECTOR_BYTES / 2), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#endif
}
SYMCOMM_INLINE float32_quad float16_load(const char *from) {
    return (float32_quad){float16_load_vector(from, 0), float16_load_vector(from, 1), float16_load_vector(from, 2),
                          float16_load_vector(from, 3)};
}
SYMCOMM_INLINE void float16_store(char *to, float32_quad q) {
    float16_store_vector(to, 0, q.v0), float16_store_vector(to, 1, q.v1);
    float16_store_vector(to, 2, q.v2), float16_store_vector(to, 3, q.v3);
}

#else
#define FLOAT16_STYLE SHORT
SYMCOMM_INLINE float32_quad float16_load(const char *from) {
    words low = words_at(from, 0), high = words_at(from, 1);
    return (float32_quad){
        small_float_decode(low & 0xffff, FORMAT_float16), small_float_decode(low >> 16, FORMAT_float16),
        small_float_decode(high & 0xffff, FORMAT_float16), small_float_decode(high >> 16, FORMAT_float16)};
}
SYMCOMM_CALLED void float16_store(char *to, float32_quad q) {
    put_words(to, 0, small_float_encode(q.v0, FORMAT_float16) | small_float_encode(q.v1, FORMAT_float16) << 16);
    put_words(to, 1, small_float_encode(q.v2, FORMAT_float16) | small_float_encode(q.v3, FORMAT_float16) << 16);
}
#endif
#if !defined(FLOAT16_STYLE)
#define FLOAT16_STYLE PADDED
#endif

/* --- float8 -------------------------------------------------------------------------------------------------- */

/* Four elements a word. Stores are functions: kernels use them often, and they are too long for a call to matter. */
#define FLOAT8_FORMAT(T)                                                                                               \
    SMALL_FORMAT(T, 1)                                                                                                 \
    SYMCOMM_INLINE float32_quad T##_load(const char *from) {                                                           \
        words w = words_at(from, 0);                                                                                   \
        return (float32_quad){small_float_decode(w & 0xff, FORMAT_##T), small_float_decode(w >> 8 & 0xff, FORMAT_##T), \
                              small_float_decode(w >> 16 & 0xff, FORMAT_##T),                                          \
                              small_float_decode(w >> 24, FORMAT_##T)};                                                \
    }                                                                                                                  \
    SYMCOMM_CALLED void T##_store(char *to, float32_quad q) {                                                          \
        put_words(to, 0,                                                                                               \
                  small_float_encode(q.v0, FORMAT_##T) | small_float_encode(q.v1, FORMAT_##T) << 8 |                   \
                      small_float_encode(q.v2, FORMAT_##T) << 16 | small_float_encode(q.v3, FORMAT_##T) << 24);        \
    }

FLOAT8_FORMAT(float8_e4m3fn)
FLOAT8_FORMAT(float8_e5m2)
FLOAT8_FORMAT(float8_e4m3fnuz)
FLOAT8_FORMAT(float8_e5m2fnuz)
