#include "stream.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define HAS_STREAMING_STORES 1
#else
#define HAS_STREAMING_STORES 0 /* of those that we know, others notice long runs of stores by themselves */
#endif

#define LINE 64
#define USUAL_CACHE ((long)32 << 20)

/* From so many bytes on. */
static uint64_t pays_from = UINT64_MAX;

__attribute__((constructor)) static void find_cache(void) {
    const char *wanted = getenv("SYMCOMM_STREAM_BYTES");
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (wanted) pays_from = strtoull(wanted, NULL, 10);
    else if (HAS_STREAMING_STORES) pays_from = (uint64_t)(cache > 0 ? cache : USUAL_CACHE);
}

bool stream_pays(uint64_t nbytes) { return nbytes >= pays_from; }

#if HAS_STREAMING_STORES
static void stream_lines(char *dst, const char *src, size_t lines) {
    for (; lines; lines--, dst += LINE, src += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(dst + 32), c);
        _mm_stream_si128((__m128i *)(dst + 48), d);
    }
    _mm_sfence(); /* these stores alone would be seen in any order */
}
#else
static void stream_lines(char *dst, const char *src, size_t lines) { memcpy(dst, src, lines * LINE); }
#endif

void stream_copy(void *dst, const void *src, size_t n, bool streamed) {
    size_t before = (size_t)(-(uintptr_t)dst & (LINE - 1));
    if (!streamed || n < before + LINE) {
        memcpy(dst, src, n);
        return;
    }
    size_t lines = (n - before) / LINE, done = before + lines * LINE;
    memcpy(dst, src, before);
    stream_lines((char *)dst + before, (const char *)src + before, lines);
    memcpy((char *)dst + done, (const char *)src + done, n - done);
}
