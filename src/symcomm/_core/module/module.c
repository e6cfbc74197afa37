/* The Python module `symcomm._core._native`: a list of parts, each in a file of its own. */
#include "module/module.h"

int symcomm_add_constants(PyObject *module, const struct constant *list) {
    for (; list->name; list++)
        if (PyModule_AddIntConstant(module, list->name, list->value) < 0) return -1;
    return 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "symcomm._core._native", "Symcomm's C core.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    symcomm_start_clock();
    int (*const parts[])(PyObject *) = {
        symcomm_add_reduce,         symcomm_add_nontemporal, symcomm_add_pack,     symcomm_add_mapping,
        symcomm_add_life,           symcomm_add_tensor,      symcomm_add_cores,    symcomm_add_gil,
        symcomm_add_group,          symcomm_add_records,     symcomm_add_exec,     symcomm_add_report,
        symcomm_add_dispatch_cache, symcomm_add_options,     symcomm_add_p2p,      symcomm_add_signals,
        symcomm_add_window,         symcomm_add_stream_ops,  symcomm_add_prepared, symcomm_add_store,
        symcomm_add_gil_watchdog,
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (parts[i](module) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
    return module;
}
