/* Converts 8 and 16-bit floats to float32 and back, for partial sums that are completed elsewhere and rounded at the
 * end. */
#include "reduce/target.h"

#include "module/module.h"

#include "reduce/float_formats.h"

enum { LANES = VECTOR_BYTES / 4 }; /* of one vector of float32 */

typedef uint16_t row_of_2 __attribute__((vector_size(LANES * 2)));
typedef uint8_t row_of_1 __attribute__((vector_size(LANES)));

SYMCOMM_INLINE words bfloat16_rounded(floats value) {
    words bits = (words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    ints is_nan = (ints)((ints)(bits & 0x7fffffff) > FLOAT32_INFINITY);
    return (words)pick_ints(is_nan, (ints){0} + 0x7fc0, (ints)rounded);
}

/* Narrowing may be in place: it reads ahead of where it writes. The last vector is filled up with zeros. */
#define CONVERSIONS(T, SIZE, DECODE, ENCODE)                                    \
    static void T##_widen(char *to, const char *from, size_t count) {           \
        for (size_t i = 0; i < count; i += LANES) {                             \
            const size_t n = count - i < LANES ? count - i : LANES;             \
            row_of_##SIZE row = {0};                                            \
            if (n == LANES) memcpy(&row, from + i * SIZE, sizeof row);          \
            else memcpy(&row, from + i * SIZE, n * SIZE);                       \
            words code = __builtin_convertvector(row, words);                   \
            floats value = DECODE;                                              \
            if (n == LANES) memcpy(to + i * 4, &value, sizeof value);           \
            else memcpy(to + i * 4, &value, n * 4);                             \
        }                                                                       \
    }                                                                           \
    static void T##_narrow(char *to, const char *from, size_t count) {          \
        for (size_t i = 0; i < count; i += LANES) {                             \
            const size_t n = count - i < LANES ? count - i : LANES;             \
            floats value = {0};                                                 \
            if (n == LANES) memcpy(&value, from + i * 4, sizeof value);         \
            else memcpy(&value, from + i * 4, n * 4);                           \
            row_of_##SIZE row = __builtin_convertvector(ENCODE, row_of_##SIZE); \
            if (n == LANES) memcpy(to + i * SIZE, &row, sizeof row);            \
            else memcpy(to + i * SIZE, &row, n * SIZE);                         \
        }                                                                       \
    }
#define SMALL_CONVERSIONS(T, SIZE) \
    CONVERSIONS(T, SIZE, small_float_decode(code, FORMAT_##T), small_float_encode(value, FORMAT_##T))

CONVERSIONS(bfloat16, 2, (floats)(code << 16), bfloat16_rounded(value))
SMALL_CONVERSIONS(float16, 2)
SMALL_CONVERSIONS(float8_e4m3fn, 1)
SMALL_CONVERSIONS(float8_e5m2, 1)
SMALL_CONVERSIONS(float8_e4m3fnuz, 1)
SMALL_CONVERSIONS(float8_e5m2fnuz, 1)

typedef void conversion(char *to, const char *from, size_t count);
#define CONVERT(T) {T##_widen, T##_narrow}
static conversion *const conversions[DT_COUNT][2] = {
    [DT_BFLOAT16] = CONVERT(bfloat16),
    [DT_FLOAT16] = CONVERT(float16),
    [DT_FLOAT8_E4M3FN] = CONVERT(float8_e4m3fn),
    [DT_FLOAT8_E5M2] = CONVERT(float8_e5m2),
    [DT_FLOAT8_E4M3FNUZ] = CONVERT(float8_e4m3fnuz),
    [DT_FLOAT8_E5M2FNUZ] = CONVERT(float8_e5m2fnuz),
};

/* --- Python -------------------------------------------------------------------------------------------------- */

static PyObject *convert(PyObject *args, int which) {
    int dtype;
    unsigned long long to, from;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "iKKn", &dtype, &to, &from, &count)) return NULL;
    if (dtype < 0 || dtype >= DT_COUNT || conversions[dtype][which] == NULL)
        return PyErr_Format(PyExc_ValueError, "convert: dtype must be the number of a float of 8 or 16 bits, got %d.",
                            dtype);
    if (count < 0) return PyErr_Format(PyExc_ValueError, "convert: count must be 0 or more, got %zd.", count);
    Py_BEGIN_ALLOW_THREADS;
    conversions[dtype][which]((char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)count);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_widen(PyObject *Py_UNUSED(self), PyObject *args) { return convert(args, 0); }
static PyObject *py_narrow(PyObject *Py_UNUSED(self), PyObject *args) { return convert(args, 1); }

static PyMethodDef functions[] = {
    METHOD_AS(
        widen, py_widen, METH_VARARGS,
        "(dtype, to, from, count): `count` elements of a float of 8 or 16 bits, as float32. to and from are addresses."),
    METHOD_AS(narrow, py_narrow, METH_VARARGS,
              "(dtype, to, from, count): the inverse, rounded to nearest, ties to even; may be in place."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_convert(PyObject *module) { return PyModule_AddFunctions(module, functions); }
