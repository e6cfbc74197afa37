/* Element types and reduce operations; the numbers are those of symcomm/types.py. */
#pragma once

/* Every element type, with its bytes; and every operation. */
/* clang-format off */
#define SYMCOMM_DTYPES(TYPE)                                                                                      \
    TYPE(UINT8, 1) TYPE(INT8, 1) TYPE(UINT16, 2) TYPE(INT16, 2) TYPE(UINT32, 4) TYPE(INT32, 4) TYPE(UINT64, 8)    \
    TYPE(INT64, 8) TYPE(BOOL, 1) TYPE(FLOAT16, 2) TYPE(BFLOAT16, 2) TYPE(FLOAT32, 4) TYPE(FLOAT64, 8)             \
    TYPE(COMPLEX64, 8) TYPE(COMPLEX128, 16) TYPE(FLOAT8_E4M3FN, 1) TYPE(FLOAT8_E5M2, 1) TYPE(FLOAT8_E4M3FNUZ, 1)  \
    TYPE(FLOAT8_E5M2FNUZ, 1)
#define SYMCOMM_REDOPS(OP) \
    OP(SUM) OP(AVG) OP(PRODUCT) OP(MIN) OP(MAX) OP(BAND) OP(BOR) OP(BXOR) OP(PREMUL_SUM)
/* clang-format on */

#define SYMCOMM_NUMBER(NAME, SIZE) DT_##NAME,
enum symcomm_dtype { SYMCOMM_DTYPES(SYMCOMM_NUMBER) DT_COUNT };

#define SYMCOMM_SIZE(NAME, SIZE) [DT_##NAME] = SIZE,
static const unsigned char symcomm_itemsize[DT_COUNT] __attribute__((unused)) = {SYMCOMM_DTYPES(SYMCOMM_SIZE)};

#define SYMCOMM_REDOP(NAME) RED_##NAME,
enum symcomm_redop { SYMCOMM_REDOPS(SYMCOMM_REDOP) RED_COUNT };
