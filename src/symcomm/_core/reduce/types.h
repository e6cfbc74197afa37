/* Element types and reduce operations; the numbers are those of symcomm/types.py. */
#ifndef SYMCOMM_TYPES_H
#define SYMCOMM_TYPES_H

enum symcomm_dtype {
    DT_UINT8,
    DT_INT8,
    DT_UINT16,
    DT_INT16,
    DT_UINT32,
    DT_INT32,
    DT_UINT64,
    DT_INT64,
    DT_BOOL,
    DT_FLOAT16,
    DT_BFLOAT16,
    DT_FLOAT32,
    DT_FLOAT64,
    DT_COMPLEX64,
    DT_COMPLEX128,
    DT_FLOAT8_E4M3FN,
    DT_FLOAT8_E5M2,
    DT_FLOAT8_E4M3FNUZ,
    DT_FLOAT8_E5M2FNUZ,
    DT_COUNT
};

static const unsigned char symcomm_itemsize[DT_COUNT]
    __attribute__((unused)) = {1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1};

enum symcomm_redop {
    RED_SUM,
    RED_AVG,
    RED_PRODUCT,
    RED_MIN,
    RED_MAX,
    RED_BAND,
    RED_BOR,
    RED_BXOR,
    RED_PREMUL_SUM,
    RED_COUNT
};

#endif
