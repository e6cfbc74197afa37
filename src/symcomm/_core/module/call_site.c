#include "module/call_site.h"

#include <stdlib.h>

#define KNOWN_CODES 512

struct known_code {
    PyObject *code; /* kept, so that no other gets its address */
    bool is_inner;
};

static struct known_code codes[KNOWN_CODES]; /* interpreter lock, as all here */
static PyObject *is_inner_callable;          /* (file name) -> whether calls in it are made for somebody else */
static PyObject *name_back, *name_instruction, *name_file;

static size_t spread(const void *address, long more) {
    uint64_t h = ((uint64_t)(uintptr_t)address >> 4 ^ (uint64_t)more << 20) * 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 40);
}

/* 1, 0, or -1 with an exception set. */
static int is_inner(PyObject *code) {
    struct known_code *known = &codes[spread(code, 0) % KNOWN_CODES];
    if (known->code == code) return known->is_inner;
    PyObject *file = PyObject_GetAttr(code, name_file);
    PyObject *answer = file ? PyObject_CallFunctionObjArgs(is_inner_callable, file, NULL) : NULL;
    Py_XDECREF(file);
    if (answer == NULL) return -1;
    PyObject *before = known->code;
    known->code = Py_NewRef(code), known->is_inner = answer == Py_True;
    Py_DECREF(answer);
    Py_XDECREF(before);
    return known->is_inner;
}

/* The same as call_sites_find(), at a place that is not known yet. */
static bool add_site(struct call_sites *s, PyObject *file, int line, PyObject **site, uint32_t *number) {
    *site = file ? Py_BuildValue("Ni", file, line) : NULL;
    PyObject *found = *site ? PyObject_CallFunctionObjArgs(s->number_of, *site, NULL) : NULL;
    if (found) *number = (uint32_t)PyLong_AsUnsignedLong(found);
    Py_XDECREF(found);
    if (!PyErr_Occurred()) return true;
    Py_CLEAR(*site);
    return false;
}

static void keep_site(struct known_site *slot, PyObject *code, long at, PyObject *site, uint32_t number) {
    struct known_site before = *slot;
    *slot = (struct known_site){Py_NewRef(code), Py_NewRef(site), at, number};
    Py_XDECREF(before.code);
    Py_XDECREF(before.site);
}

static bool find_in(struct call_sites *s, PyObject *frame, PyObject *code, PyObject **site, uint32_t *number) {
    PyObject *instruction = PyObject_GetAttr(frame, name_instruction);
    if (instruction == NULL) return false;
    long at = PyLong_AsLong(instruction);
    Py_DECREF(instruction);
    if (s->known == NULL && (s->known = calloc(KNOWN_SITES, sizeof *s->known)) == NULL) return PyErr_NoMemory() != NULL;
    struct known_site *slot = &s->known[spread(code, at) % KNOWN_SITES];
    if (slot->code == code && slot->at == at) {
        *site = Py_NewRef(slot->site), *number = slot->number;
        return true;
    }
    PyObject *file = PyObject_GetAttr(code, name_file);
    if (!add_site(s, file, PyFrame_GetLineNumber((PyFrameObject *)frame), site, number)) return false;
    keep_site(slot, code, at, *site, *number);
    return true;
}

bool call_sites_find(struct call_sites *s, PyObject **site, uint32_t *number) {
    PyObject *frame = Py_XNewRef((PyObject *)PyEval_GetFrame());
    while (frame && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame), *outer = NULL;
        int inner = is_inner(code);
        bool found = inner == 0 && find_in(s, frame, code, site, number);
        if (inner == 1) outer = PyObject_GetAttr(frame, name_back);
        Py_DECREF(code);
        Py_DECREF(frame);
        if (outer == NULL) return found;
        frame = outer;
    }
    Py_XDECREF(frame);
    return add_site(s, PyUnicode_FromString("?"), 0, site, number);
}

void call_sites_clear(struct call_sites *s) {
    struct known_site *known = s->known;
    s->known = NULL;
    for (int i = 0; known && i < KNOWN_SITES; i++) {
        Py_XDECREF(known[i].code);
        Py_XDECREF(known[i].site);
    }
    free(known);
    Py_CLEAR(s->number_of);
}

static PyObject *use_inner_files(PyObject *Py_UNUSED(self), PyObject *callable) {
    replace_kept(&is_inner_callable, callable);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    METHOD(use_inner_files, METH_O, "(callable): asked for a file whether calls in it are made for somebody else."),
    {NULL, NULL, 0, NULL},
};

int symcomm_add_call_site(PyObject *module) {
    name_back = PyUnicode_InternFromString("f_back");
    name_instruction = PyUnicode_InternFromString("f_lasti");
    name_file = PyUnicode_InternFromString("co_filename");
    if (name_back == NULL || name_instruction == NULL || name_file == NULL) return -1;
    return symcomm_add_part(module, functions, NULL);
}
