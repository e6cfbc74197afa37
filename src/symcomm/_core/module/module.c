/* The Python module `symcomm._core._native`: a list of parts, each in a file of its own. */
#include "module/module.h"

int symcomm_add_part(PyObject *module, PyMethodDef *methods, const struct constant *constants) {
    if (methods && PyModule_AddFunctions(module, methods) < 0) return -1;
    for (; constants && constants->name; constants++)
        if (PyModule_AddIntConstant(module, constants->name, constants->value) < 0) return -1;
    return 0;
}

#define SYMCOMM_ADD(NAME) symcomm_add_##NAME,
static int (*const parts[])(PyObject *) = {SYMCOMM_PARTS(SYMCOMM_ADD)};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "symcomm._core._native", "Symcomm's C core.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    symcomm_start_clock();
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (parts[i](module) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
    return module;
}
