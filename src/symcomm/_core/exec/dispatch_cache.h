/* Plans of calls that were made before, so that the next call of the kind needs no Python. */
#pragma once

#include "group/group.h"

/* With the interpreter lock held: the cache holds references to plans. */
void dispatch_cache_drop(struct group *g);
