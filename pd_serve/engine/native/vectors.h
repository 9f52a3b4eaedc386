// Sixteen numbers at a time, in float32 whatever their type in memory. The compiler makes of it what the processor has.

#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
    uint16_t bits;
};

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <typename T>
inline T narrow(float value);
template <>
inline float narrow<float>(float value) {
    return value;
}
// To the nearest, ties to even; a NaN stays one.
template <>
inline BFloat16 narrow<BFloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return BFloat16{static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline Floats load(const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    return (Floats)words;
}
inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
inline void store(BFloat16* to, Floats value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words narrowed = (bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded;
    const Halves halves = __builtin_convertvector(narrowed, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline Floats all(float value) { return Floats{} + value; }

// e^x: x = n ln 2 + r, e^r by its Taylor series to the seventh power (|r| <= ln 2 / 2: within one unit in the last place). Below -87 it is 0.
inline Floats exponential(Floats x) {
    const Floats bounded = x > 88.0f ? all(88.0f) : x;
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (bounded * 1.44269504f + magic) - magic;
    const Floats r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats series = all(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    const Ints exponent = (__builtin_convertvector(x < -87.0f ? Floats{} : n, Ints) + 127) << 23;
    const Floats power = series * (Floats)exponent;
    return x < -87.0f ? Floats{} : power;
}

}  // namespace
