#include "common.h"

int symcomm_add_store_server(PyObject *module) {
    (void)module;
    return 0;
}
