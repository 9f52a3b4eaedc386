// What a layer does between its matrix products, for all rows of a step. Rounds where the torch operators in models/norm.py and
// models/rotary.py round, in their order, so that both give the same bits; a row's result is of that row alone.

// Products are rounded before they are added, but where it is written otherwise.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <omp.h>

#include <cmath>

#include "geometry.h"
#include "vectors.h"

namespace {

constexpr int HALF = HEAD_DIM / 2;  // HEAD_DIM is given to the compiler

// The norm of vectors [num_rows, num_inner, size], row_stride elements between rows; `weight` [num_inner, size]. `out` may be `x`.
template <typename T>
void normalize(const T* x, const float* weight, T* out, int64_t num_rows, int64_t num_inner, int64_t row_stride, int64_t size, double floor,
               int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t inner = 0; inner < num_inner; ++inner) {
            const int64_t at = row * row_stride + inner * size;
            const float* own_weight = weight + inner * size;
            const T* wide = x + at;
            constexpr int SUMS = 8;
            float squares[SUMS] = {};
            const int64_t whole = size / SUMS * SUMS;
            for (int64_t i = 0; i < whole; i += SUMS)
                for (int lane = 0; lane < SUMS; ++lane) squares[lane] += widen(wide[i + lane]) * widen(wide[i + lane]);
            float total = squares[0];
            for (int lane = 1; lane < SUMS; ++lane) total += squares[lane];
            for (int64_t i = whole; i < size; ++i) total += widen(wide[i]) * widen(wide[i]);
            const float norm = std::sqrt(total);
            const float length = static_cast<float>(std::sqrt(static_cast<double>(norm) * norm + floor));
            for (int64_t i = 0; i < size; ++i) out[at + i] = narrow<T>(widen(wide[i]) / length * own_weight[i]);
        }
    }
}

// heads [num_rows, num_heads + 2 num_kv_heads, HEAD_DIM]: turns queries and keys in place, then copies keys and values to their slots.
template <typename T>
void rotate_and_write(const Geometry& geometry, T* heads, const T* cosine, const T* signed_sine, const int64_t* positions, const int64_t* slots,
                      T* slab, int64_t num_rows, int64_t num_threads) {
    const int64_t num_rotated = geometry.num_heads + geometry.num_kv_heads;
    const int64_t width = (num_rotated + geometry.num_kv_heads) * HEAD_DIM;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < num_rows; ++row) {
        T* own = heads + row * width;
        const T* c = cosine + positions[row] * HEAD_DIM;
        const T* s = signed_sine + positions[row] * HEAD_DIM;
        for (int64_t head = 0; head < num_rotated; ++head) {
            T* x = own + head * HEAD_DIM;
            T turned[HEAD_DIM];
            int i = 0;
            // Products of 16-bit numbers are exact: nothing is lost by rounding them before the sum.
            if (sizeof(T) == 2) {
                for (; i + LANES <= HALF; i += LANES) {
                    const Floats a = load(x + i), b = load(x + i + HALF);
                    store(turned + i, a * load(c + i));
                    store(turned + i + HALF, b * load(c + i + HALF));
                    store(turned + i, load(turned + i) + b * load(s + i));
                    store(turned + i + HALF, load(turned + i + HALF) + a * load(s + i + HALF));
                }
            }
            for (; i < HALF; ++i) {
                const float a = widen(x[i]), b = widen(x[i + HALF]);
                turned[i] = narrow<T>(__builtin_fmaf(b, widen(s[i]), widen(narrow<T>(a * widen(c[i])))));
                turned[i + HALF] = narrow<T>(__builtin_fmaf(a, widen(s[i + HALF]), widen(narrow<T>(b * widen(c[i + HALF])))));
            }
            std::memcpy(x, turned, sizeof turned);
        }
        const int64_t block = slots[row] / geometry.block_size, offset = slots[row] % geometry.block_size;
        T* place = slab + block * geometry.block_stride + offset * geometry.token_stride;
        const T* from = own + geometry.num_heads * HEAD_DIM;
        for (int plane = 0; plane < 2; ++plane) {
            for (int64_t head = 0; head < geometry.num_kv_heads; ++head, from += HEAD_DIM)
                std::memcpy(place + plane * geometry.plane_stride + head * geometry.head_stride, from, HEAD_DIM * sizeof(T));
        }
    }
}

}  // namespace

extern "C" {

#define OPERATORS(T, NAME)                                                                                                              \
    void pd_norm_##NAME(const T* x, const float* weight, T* out, int64_t num_rows, int64_t num_inner, int64_t row_stride, int64_t size,   \
                        double floor, int64_t num_threads) {                                                                             \
        normalize(x, weight, out, num_rows, num_inner, row_stride, size, floor, num_threads);                                           \
    }                                                                                                                                   \
    void pd_rotate_and_write_##NAME(const Geometry* geometry, T* heads, const T* cosine, const T* signed_sine, const int64_t* positions, \
                                    const int64_t* slots, T* slab, int64_t num_rows, int64_t num_threads) {                             \
        rotate_and_write(*geometry, heads, cosine, signed_sine, positions, slots, slab, num_rows, num_threads);                         \
    }

OPERATORS(BFloat16, bfloat16)
OPERATORS(float, float32)

}  // extern "C"
