// Copies of ranges into memory that this processor is not going to read: stores go past its caches.
//
// An ordinary store reads the line that it is about to overwrite, so a copy into memory that is in no cache moves every byte three times.
// A store past the caches moves it twice. And a core's prefetcher follows a stream of reads no further than its page, so PAGES pages are
// copied side by side, whichever ranges they belong to.

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
typedef __m512i Vector;
#define LOAD(from) _mm512_loadu_si512((const void *)(from))
#define STORE(to, value) _mm512_stream_si512((void *)(to), value)
#elif defined(__AVX__)
typedef __m256i Vector;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, value) _mm256_stream_si256((__m256i *)(to), value)
#elif defined(__x86_64__)
typedef __m128i Vector;
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define STORE(to, value) _mm_stream_si128((__m128i *)(to), value)
#endif

enum { LINE = 64, STEP = 128, PAGE = 4096, PAGES = 4, SHORT = 512 };  // bytes, but PAGES; shorter ranges are copied by memcpy

typedef struct {
    int64_t source, target, nbytes;  // offsets
} Range;

#if defined(LOAD)

static inline __attribute__((always_inline)) void copy_lines(char *to, const char *from, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += (int64_t)sizeof(Vector)) STORE(to + at, LOAD(from + at));
}

static void copy_pages(char *const *to, const char *const *from) {
    for (int64_t at = 0; at < PAGE; at += STEP)
        for (int page = 0; page < PAGES; ++page) copy_lines(to[page] + at, from[page] + at, STEP);
}

// Copies `count` ranges. What was stored is visible to others before anything that is stored after it.
void pd_copy_ranges(char *target, const char *source, const Range *ranges, int64_t count) {
    char *to_pages[PAGES];
    const char *from_pages[PAGES];
    int num_pages = 0;
    for (int64_t index = 0; index < count; ++index) {
        char *to = target + ranges[index].target;
        const char *from = source + ranges[index].source;
        int64_t nbytes = ranges[index].nbytes;
        if (nbytes < SHORT) {
            memcpy(to, from, nbytes);
            continue;
        }
        const int64_t head = -(intptr_t)to & (LINE - 1);
        memcpy(to, from, head);
        to += head, from += head, nbytes -= head;
        for (; nbytes >= PAGE; to += PAGE, from += PAGE, nbytes -= PAGE) {
            to_pages[num_pages] = to;
            from_pages[num_pages] = from;
            if (++num_pages == PAGES) {
                copy_pages(to_pages, from_pages);
                num_pages = 0;
            }
        }
        const int64_t lines = nbytes & ~(int64_t)(LINE - 1);
        copy_lines(to, from, lines);
        memcpy(to + lines, from + lines, nbytes - lines);
    }
    for (int page = 0; page < num_pages; ++page) copy_lines(to_pages[page], from_pages[page], PAGE);
    _mm_sfence();
}

#else

void pd_copy_ranges(char *target, const char *source, const Range *ranges, int64_t count) {
    for (int64_t index = 0; index < count; ++index)
        memcpy(target + ranges[index].target, source + ranges[index].source, ranges[index].nbytes);
    __sync_synchronize();
}

#endif
