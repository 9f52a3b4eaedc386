// A matrix product of few rows by bfloat16 weights, read where oneDNN has packed them: [outputs / 32][inputs / 2][32][2], so panels of 32
// outputs whose inputs lie pair by pair. As fast as the weights can be read.
//
// A row's result is the same however many rows there are: every output adds up its inputs in their order, in float32.

#include <omp.h>

#include <cstdint>
#include <cstring>

#include "operators.h"

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int PANEL = 32;      // outputs
constexpr int MAX_ROWS = 32;   // of one pass over the weights
constexpr int AHEAD = 16;      // cache lines that are asked for before they are read

struct Product {
    const BFloat16* x;  // [num_rows, num_inputs]
    const BFloat16* weight;
    const BFloat16* bias;   // [num_outputs] or null
    const BFloat16* other;  // [num_rows, num_outputs] or null
    BFloat16* out;          // [num_rows, num_outputs]
    int64_t num_rows, num_inputs, num_outputs;
    int64_t fusion;
};

// Rounds a row's 32 sums, with what is fused: x / (1 + e^-x), or times, or plus the row of `other`.
inline void write_row(const Product& product, const float* sums, int64_t row, int64_t panel) {
    const int64_t column = panel * PANEL, at = row * product.num_outputs + column;
    for (int i = 0; i < PANEL; i += LANES) {
        Floats value = load(sums + i);
        if (product.bias) value += load(product.bias + column + i);
        if (product.fusion == SILU) value = value / (1.0f + exponential(-value));
        if (product.fusion == TIMES) value *= load(product.other + at + i);
        if (product.fusion == PLUS) value += load(product.other + at + i);
        store(product.out + at + i, value);
    }
}

#if defined(__AMX_BF16__)

constexpr int TILE_ROWS = 16;
constexpr int64_t STEP = 32;  // inputs of one tile

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_nbytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of (rows 0.., outputs 0..15), (.., 16..31), (rows 16.., ..), (.., ..); 4, 5: rows of x; 6, 7: weights.
inline void configure(int64_t num_rows) {
    TileConfig config;
    const uint8_t first = static_cast<uint8_t>(num_rows < TILE_ROWS ? num_rows : TILE_ROWS), second = static_cast<uint8_t>(num_rows - first);
    const uint8_t rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = rows[i];
        config.row_nbytes[i] = rows[i] ? 64 : 0;
    }
    _tile_loadconfig(&config);
}

template <bool IS_LONG>
inline void panel_product(const Product& product, int64_t first_row, int64_t num_rows, int64_t panel) {
    const int64_t k = product.num_inputs, stride = k * 2;
    const BFloat16* weight = product.weight + panel * PANEL * k;
    const BFloat16 *x = product.x + first_row * k, *x2 = x + TILE_ROWS * k;
    _tile_zero(0);
    _tile_zero(1);
    if (IS_LONG) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < k; i += STEP) {
        const BFloat16* part = weight + i * PANEL;
        for (int line = 0; line < 32; ++line) _mm_prefetch(reinterpret_cast<const char*>(part) + (AHEAD + line) * 64, _MM_HINT_T0);
        _tile_loadd(4, x + i, stride);
        _tile_loadd(6, part, 128);
        _tile_loadd(7, part + PANEL, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (IS_LONG) {
            _tile_loadd(5, x2 + i, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    alignas(64) float sums[MAX_ROWS * PANEL];
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (IS_LONG) {
        _tile_stored(2, sums + TILE_ROWS * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE_ROWS * PANEL + 16, PANEL * 4);
    }
    for (int64_t row = 0; row < num_rows; ++row) write_row(product, sums + row * PANEL, first_row + row, panel);
}

inline void panels(const Product& product, int64_t first_row, int64_t num_rows, int64_t first_panel, int64_t past_panel) {
    configure(num_rows);
    for (int64_t panel = first_panel; panel < past_panel; ++panel) {
        if (num_rows > TILE_ROWS)
            panel_product<true>(product, first_row, num_rows, panel);
        else
            panel_product<false>(product, first_row, num_rows, panel);
    }
    _tile_release();
}

bool prepare() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

constexpr int64_t STEP = 2;

// sum + the products of 16 outputs' pair of weights with a pair of inputs
inline Floats add_pair(Floats sum, Words weights, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)(Words{} + pair));
#else
    sum += (Floats)(weights << 16) * widen(BFloat16{static_cast<uint16_t>(pair)});
    return sum + (Floats)(weights & 0xffff0000u) * widen(BFloat16{static_cast<uint16_t>(pair >> 16)});
#endif
}

template <int ROWS>
inline void panel_product(const Product& product, int64_t first_row, int64_t panel) {
    const int64_t k = product.num_inputs;
    const char* weight = reinterpret_cast<const char*>(product.weight + panel * PANEL * k);
    const BFloat16* x = product.x + first_row * k;
    Floats sums[ROWS][2] = {};
    for (int64_t i = 0; i < k; i += STEP, weight += 128) {
        __builtin_prefetch(weight + AHEAD * 64);
        __builtin_prefetch(weight + AHEAD * 64 + 64);
        Words low, high;
        std::memcpy(&low, weight, sizeof low);
        std::memcpy(&high, weight + 64, sizeof high);
        for (int row = 0; row < ROWS; ++row) {
            uint32_t pair;
            std::memcpy(&pair, x + row * k + i, sizeof pair);
            sums[row][0] = add_pair(sums[row][0], low, pair);
            sums[row][1] = add_pair(sums[row][1], high, pair);
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        float parts[PANEL];
        std::memcpy(parts, sums[row], sizeof parts);
        write_row(product, parts, first_row + row, panel);
    }
}

inline void panels(const Product& product, int64_t first_row, int64_t num_rows, int64_t first_panel, int64_t past_panel) {
    for (int64_t panel = first_panel; panel < past_panel; ++panel) {
        int64_t row = 0;
        for (; row + 8 <= num_rows; row += 8) panel_product<8>(product, first_row + row, panel);
        for (; row + 4 <= num_rows; row += 4) panel_product<4>(product, first_row + row, panel);
        for (; row + 2 <= num_rows; row += 2) panel_product<2>(product, first_row + row, panel);
        for (; row < num_rows; ++row) panel_product<1>(product, first_row + row, panel);
    }
}

bool prepare() { return true; }

#endif

}  // namespace

extern "C" {

// Whether this process may use the instructions that the library was compiled for.
int32_t pd_prepare() { return prepare(); }

int64_t pd_input_step() { return STEP; }

void pd_linear(const BFloat16* x, const BFloat16* weight, const BFloat16* bias, const BFloat16* other, BFloat16* out, int64_t num_rows,
               int64_t num_inputs, int64_t num_outputs, int64_t fusion, int64_t num_threads) {
    const Product product{x, weight, bias, other, out, num_rows, num_inputs, num_outputs, fusion};
    const int64_t num_panels = num_outputs / PANEL, threads = num_threads < num_panels ? num_threads : num_panels;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < threads; ++part) {
        const int64_t first = num_panels * part / threads, past = num_panels * (part + 1) / threads;
        for (int64_t row = 0; row < num_rows; row += MAX_ROWS)
            panels(product, row, num_rows - row < MAX_ROWS ? num_rows - row : MAX_ROWS, first, past);
    }
}

}  // extern "C"
