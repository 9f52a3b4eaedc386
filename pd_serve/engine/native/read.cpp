// How fast memory can be read: what a step is measured against.

#include <cstdint>

#include "vectors.h"

extern "C" {

// All bits of `from` [count] or-ed, a multiple of 64 words; fetched 1 KiB ahead.
uint32_t pd_read(const uint32_t* from, int64_t count) {
    Words words[4] = {};
    for (int64_t i = 0; i < count; i += 4 * LANES) {
        for (int part = 0; part < 4; ++part) {
            __builtin_prefetch(from + i + part * LANES + 256);
            Words next;
            std::memcpy(&next, from + i + part * LANES, sizeof next);
            words[part] |= next;
        }
    }
    const Words all = words[0] | words[1] | words[2] | words[3];
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; ++lane) bits |= all[lane];
    return bits;
}

}  // extern "C"
