/* Copies too large for the caches use non-temporal stores, if the CPU has them: an ordinary store first reads the line
 * that it replaces, a third of what a copy moves. Reductions use ordinary stores: with 16 ranks and 64 MiB,
 * non-temporal stores of results took 1.1 to 1.9 times as long. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether non-temporal stores pay if all ranks together write nbytes. */
bool nt_pays(uint64_t nbytes);

/* memcpy(), with non-temporal stores if `nontemporal`; they are visible before any store that follows. */
void nt_copy(void *dst, const void *src, size_t n, bool nontemporal);
