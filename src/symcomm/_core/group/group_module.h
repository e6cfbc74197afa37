/* The Python type of groups, and the tables of its methods. */
#pragma once

#include "module/arguments.h"

/* clang-format off */
#define GROUP_METHODS(TABLE) \
    TABLE(life) TABLE(records) TABLE(report) TABLE(refusal) TABLE(exec) TABLE(dispatch_cache) TABLE(p2p)
/* clang-format on */

#define GROUP_DECLARE_TABLE(NAME) extern PyMethodDef group_##NAME##_methods[];
GROUP_METHODS(GROUP_DECLARE_TABLE)
