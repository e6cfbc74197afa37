/* 16-bit and 8-bit floats to and from float32, in arithmetic that compilers turn into vector instructions.
 *
 * Every encoder rounds to nearest, ties to even, and agrees with torch's `.to(dtype)` on all values; the payload
 * of a NaN is not specified. Rounding to nearest must be the CPU's mode, as it is unless somebody changed it. */
#ifndef SYMCOMM_FLOAT_FORMATS_H
#define SYMCOMM_FLOAT_FORMATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SYMCOMM_INLINE static inline __attribute__((always_inline))

SYMCOMM_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

SYMCOMM_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* --- bfloat16: the upper half of a float32 ------------------------------------------------------------------- */

SYMCOMM_INLINE float bfloat16_decode(uint16_t code) { return float_of((uint32_t)code << 16); }

/* In 16-bit halves, of which a vector holds twice as many. The upper half of a NaN must be one too: arithmetic sets the
 * topmost bit of its mantissa, and one that comes straight from a bfloat16 has nothing in its lower half. Adding one
 * keeps it a NaN, unless it would carry into the sign. */
SYMCOMM_INLINE uint16_t bfloat16_encode(float value) {
    uint16_t upper = (uint16_t)(bits_of(value) >> 16), lower = (uint16_t)bits_of(value);
    uint16_t tie_goes_to_even = lower | (upper & 1);
    uint16_t up = (tie_goes_to_even > 0x8000) & ((upper | 0x8000) != 0xffff);
    return (uint16_t)(upper + up);
}

/* --- every other small format: sign, exponent, mantissa ------------------------------------------------------ */

/* A code without its sign is a "magnitude"; magnitudes sort like the values they stand for. */
struct small_float {
    int sign_shift;    /* where the sign sits: 7 or 15 */
    int mantissa;      /* bits of the mantissa */
    int bias;          /* of the exponent */
    uint32_t overflow; /* magnitude that values too large become; only NaNs lie above */
    uint32_t nan;      /* magnitude that NaN becomes */
    int has_infinity;  /* then it is `overflow` */
    int unsigned_zero; /* "uz": the code of negative zero is the only NaN, and overflow becomes it too */
};

/* E4M3FN has no infinity, and saturates: what torch 2.13 does (earlier ones made it NaN). */
#define FORMAT_FLOAT16 ((struct small_float){15, 10, 15, 0x7c00, 0x7e00, 1, 0})
#define FORMAT_E4M3FN ((struct small_float){7, 3, 7, 0x7e, 0x7f, 0, 0})
#define FORMAT_E5M2 ((struct small_float){7, 2, 15, 0x7c, 0x7f, 1, 0})
#define FORMAT_E4M3FNUZ ((struct small_float){7, 3, 8, 0x80, 0x80, 0, 1})
#define FORMAT_E5M2FNUZ ((struct small_float){7, 2, 16, 0x80, 0x80, 0, 1})

#define FLOAT32_INFINITY 0x7f800000u
#define FLOAT32_NAN 0x7fc00000u

/* `format` is a constant at every call, so all of its fields fold away. */
SYMCOMM_INLINE float small_float_decode(uint32_t code, const struct small_float format) {
    const int shift = 23 - format.mantissa;
    const uint32_t sign_bit = 1u << format.sign_shift;
    uint32_t magnitude = code & (sign_bit - 1);
    uint32_t normal = (magnitude << shift) + ((uint32_t)(127 - format.bias) << 23);
    /* Subnormals are a whole number of the smallest step. */
    const float step = float_of((uint32_t)(127 + 1 - format.bias - format.mantissa) << 23);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * step);
    uint32_t bits = magnitude >> format.mantissa ? normal : subnormal;
    if (format.has_infinity) bits = magnitude == format.overflow ? FLOAT32_INFINITY : bits;
    if (format.unsigned_zero) bits = code == sign_bit ? FLOAT32_NAN : bits;
    else bits = magnitude > format.overflow ? FLOAT32_NAN : bits;
    return float_of(bits | (code & sign_bit) << (31 - format.sign_shift));
}

SYMCOMM_INLINE uint32_t small_float_encode(float value, const struct small_float format) {
    const int shift = 23 - format.mantissa;
    uint32_t bits = bits_of(value), sign = bits >> 31 << format.sign_shift, absolute = bits & 0x7fffffff;
    uint32_t odd = absolute >> shift & 1;
    uint32_t normal =
        ((absolute + odd + (1u << (shift - 1)) - 1) >> shift) - ((uint32_t)(127 - format.bias) << format.mantissa);
    /* Added to this, a subnormal's last place is the float32's, so that the addition itself rounds. */
    const uint32_t aligner = (uint32_t)(127 + 1 - format.bias - format.mantissa + 23) << 23;
    uint32_t subnormal = bits_of(float_of(absolute) + float_of(aligner)) - aligner;
    const uint32_t smallest_normal = (uint32_t)(127 + 1 - format.bias) << 23;
    uint32_t magnitude = absolute < smallest_normal ? subnormal : normal;
    magnitude = magnitude > format.overflow ? format.overflow : magnitude;
    magnitude = absolute > FLOAT32_INFINITY ? format.nan : magnitude;
    if (format.unsigned_zero) sign = magnitude == 0 ? 0 : sign;
    return magnitude | sign;
}

#define SMALL_FLOAT(NAME, CODE, FORMAT)                                                                   \
    SYMCOMM_INLINE float NAME##_decode(CODE code) { return small_float_decode(code, FORMAT); }            \
    SYMCOMM_INLINE CODE NAME##_encode(float value) { return (CODE)small_float_encode(value, FORMAT); }

SMALL_FLOAT(float16, uint16_t, FORMAT_FLOAT16)
SMALL_FLOAT(float8_e4m3fn, uint8_t, FORMAT_E4M3FN)
SMALL_FLOAT(float8_e5m2, uint8_t, FORMAT_E5M2)
SMALL_FLOAT(float8_e4m3fnuz, uint8_t, FORMAT_E4M3FNUZ)
SMALL_FLOAT(float8_e5m2fnuz, uint8_t, FORMAT_E5M2FNUZ)

#endif
