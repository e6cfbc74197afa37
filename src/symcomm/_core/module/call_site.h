/* Where the program made a call: the innermost frame that is neither ours nor torch's, found without Python's help at
 * places that were there before. */
#pragma once

#include <stdbool.h>

#include "module/module.h"

#define KNOWN_SITES 128 /* of one object; places that fall on the same one take turns */

struct known_site {
    PyObject *code, *site;
    long at; /* the instruction */
    uint32_t number;
};

struct call_sites {
    PyObject *number_of; /* ((file, line)) -> number in the flight recorder */
    struct known_site *known;
};

/* The site as (file, line), a new reference, and its number. False with an exception set. */
bool call_sites_find(struct call_sites *s, PyObject **site, uint32_t *number);
void call_sites_clear(struct call_sites *s);
