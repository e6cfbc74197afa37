#include "memory/nontemporal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "module/module.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#define HAS_STREAMING_STORES 1
#else
#define HAS_STREAMING_STORES 0 /* Arm cores recognise long runs of stores by themselves */
#endif

#define LINE 64
#define USUAL_CACHE ((long)32 << 20)

/* From so many bytes on. */
static uint64_t nt_from = UINT64_MAX;

static uint64_t last_cache(void) {
    long bytes = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return (uint64_t)(bytes > 0 ? bytes : USUAL_CACHE);
}

int symcomm_add_nontemporal(PyObject *module) {
    (void)module;
    const char *wanted = getenv("SYMCOMM_STREAM_BYTES");
    if (HAS_STREAMING_STORES) nt_from = last_cache();
    if (wanted == NULL || *wanted == 0) return 0;
    char *end;
    errno = 0;
    nt_from = strtoull(wanted, &end, 10);
    if (*wanted >= '0' && *wanted <= '9' && *end == 0 && errno == 0) return 0;
    PyErr_Format(PyExc_ValueError, "SYMCOMM_STREAM_BYTES must be a number of bytes such as 33554432, got '%s'.",
                 wanted);
    return -1;
}

bool nt_pays(uint64_t nbytes) { return nbytes >= nt_from; }

#if HAS_STREAMING_STORES
static void nt_copy_lines(char *dst, const char *src, size_t lines) {
    for (; lines; lines--, dst += LINE, src += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(dst + 32), c);
        _mm_stream_si128((__m128i *)(dst + 48), d);
    }
    _mm_sfence(); /* non-temporal stores are weakly ordered */
}
#else
static void nt_copy_lines(char *dst, const char *src, size_t lines) { memcpy(dst, src, lines * LINE); }
#endif

void nt_copy(void *dst, const void *src, size_t n, bool nontemporal) {
    size_t before = (size_t)(-(uintptr_t)dst & (LINE - 1));
    if (!nontemporal || n < before + LINE) {
        memcpy(dst, src, n);
        return;
    }
    size_t lines = (n - before) / LINE, done = before + lines * LINE;
    memcpy(dst, src, before);
    nt_copy_lines((char *)dst + before, (const char *)src + before, lines);
    memcpy((char *)dst + done, (const char *)src + done, n - done);
}
