/* Sleeping on a word of memory, which other processes may have mapped too, and pausing between looks at one. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while the word is `seen`, for `ns` at most. Below 0, with errno: the word was not `seen` (EAGAIN), the time is
 * up, or a signal came (EINTR). */
long futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns);
void futex_wake(_Atomic uint32_t *word, int n);

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}
