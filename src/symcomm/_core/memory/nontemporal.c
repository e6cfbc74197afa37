#include "memory/nontemporal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "module/module.h"
#include "reduce/reduce.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LINE 64
#define PAGE 4096
#define PAGES 4        /* copied side by side */
#define RUN (4 * LINE) /* of each in turn */
#define USUAL_CACHE ((long)32 << 20)
/* At most, since a virtual machine sees its host's whole cache, but has only a part of it. */
#define MOST_CACHE ((long)96 << 20)

typedef void copy_function(char *dst, const char *src, size_t lines);

static copy_function *copy_lines;     /* with the widest stores; NULL: no such stores pay here */
static uint64_t nt_from = UINT64_MAX; /* the size from which they pay */

static uint64_t last_cache(void) {
    long bytes = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    if (bytes <= 0) bytes = USUAL_CACHE;
    return (uint64_t)(bytes < MOST_CACHE ? bytes : MOST_CACHE);
}

#if defined(__x86_64__)
/* Non-temporal stores are weakly ordered: hence the fences. Lines written by narrower stores, of 16 bytes, often reach
 * memory in parts: a broadcast of 64 MiB to one rank took 10 % longer. Four pages side by side keep more of memory
 * busy: 5 to 8 % less time on 2 cores; on 16, no difference that shows. */
__attribute__((target("avx512f"))) static void copy_lines_avx512(char *dst, const char *src, size_t lines) {
    for (; lines >= PAGES * PAGE / LINE; lines -= PAGES * PAGE / LINE, dst += PAGES * PAGE, src += PAGES * PAGE)
        for (size_t run = 0; run < PAGE; run += RUN)
            for (size_t page = run; page < PAGES * PAGE; page += PAGE)
                for (size_t at = page; at < page + RUN; at += LINE)
                    _mm512_stream_si512((void *)(dst + at), _mm512_loadu_si512((const void *)(src + at)));
    for (; lines; lines--, dst += LINE, src += LINE)
        _mm512_stream_si512((void *)dst, _mm512_loadu_si512((const void *)src));
    _mm_sfence();
}

__attribute__((target("avx"))) static void copy_lines_avx2(char *dst, const char *src, size_t lines) {
    for (; lines; lines--, dst += LINE, src += LINE) {
        __m256i a = _mm256_loadu_si256((const void *)src), b = _mm256_loadu_si256((const void *)(src + 32));
        _mm256_stream_si256((void *)dst, a);
        _mm256_stream_si256((void *)(dst + 32), b);
    }
    _mm_sfence();
}

static copy_function *widest(void) {
    const char *set = symcomm_kernel_set();
    return !strcmp(set, "avx512") ? copy_lines_avx512 : !strcmp(set, "avx2") ? copy_lines_avx2 : NULL;
}
#else
static copy_function *widest(void) { return NULL; } /* Arm cores recognise long runs of stores by themselves */
#endif

int symcomm_add_nontemporal(PyObject *module) {
    (void)module;
    const char *wanted = getenv("SYMCOMM_STREAM_BYTES");
    copy_lines = widest();
    if (copy_lines) nt_from = last_cache();
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

void nt_copy(void *dst, const void *src, size_t n, bool nontemporal) {
    size_t before = (size_t)(-(uintptr_t)dst & (LINE - 1));
    if (!nontemporal || !copy_lines || n < before + LINE) {
        memcpy(dst, src, n);
        return;
    }
    size_t lines = (n - before) / LINE, done = before + lines * LINE;
    memcpy(dst, src, before);
    copy_lines((char *)dst + before, (const char *)src + before, lines);
    memcpy((char *)dst + done, (const char *)src + done, n - done);
}
