#include "common.h"

int symcomm_add_reduce(PyObject *module) {
    (void)module;
    return 0;
}
