/* Moves bytes that another process may change or read meanwhile: each aligned word whole, in any order. */
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline int shared_is_word(const char *at, size_t left) { return left >= 8 && ((uintptr_t)at & 7) == 0; }

/* Loads; later loads do not see older values. */
static inline void shared_load(void *to, const void *from, size_t n) {
    char *out = to;
    for (const char *at = from, *end = at + n; at < end;) {
        if (shared_is_word(at, (size_t)(end - at))) {
            uint64_t word = atomic_load_explicit((const _Atomic uint64_t *)(const void *)at, memory_order_relaxed);
            memcpy(out, &word, 8);
            at += 8, out += 8;
        } else {
            *out++ = atomic_load_explicit((const _Atomic char *)at++, memory_order_relaxed);
        }
    }
    atomic_thread_fence(memory_order_acquire);
}

/* Stores; others see earlier stores first. */
static inline void shared_store(void *to, const void *from, size_t n) {
    const char *in = from;
    atomic_thread_fence(memory_order_release);
    for (char *at = to, *end = at + n; at < end;) {
        if (shared_is_word(at, (size_t)(end - at))) {
            uint64_t word;
            memcpy(&word, in, 8);
            atomic_store_explicit((_Atomic uint64_t *)(void *)at, word, memory_order_relaxed);
            at += 8, in += 8;
        } else {
            atomic_store_explicit((_Atomic char *)at++, *in++, memory_order_relaxed);
        }
    }
}
