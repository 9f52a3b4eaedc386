// Attention of decoding sequences over the paged pool, each block read where it lies.
//
// A pair of sequence and KV head is computed by one thread, in an order that depends on the sequence's length alone: results depend neither
// on what else is in the step nor on the number of threads. Probabilities stay in float32, so it is more exact than torch's attention.

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "operators.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int NUM_PARTS = HEAD_DIM / LANES;  // vectors of one head; HEAD_DIM is given to the compiler
constexpr int AHEAD = 64;                    // keys that are asked for before they are read
constexpr int MAX_GROUP = 4;                 // query heads that share one pass over the values
static_assert(HEAD_DIM % LANES == 0, "a head is whole vectors");

inline float sum_of(Floats value) {
    float sum = value[0];
    for (int lane = 1; lane < LANES; ++lane) sum += value[lane];
    return sum;
}
inline float largest_of(Floats value) {
    float largest = value[0];
    for (int lane = 1; lane < LANES; ++lane) largest = value[lane] > largest ? value[lane] : largest;
    return largest;
}

// Adds up each of 16 vectors: lane i of the result is the sum of the lanes of rows[i].
inline Floats sums_of(Floats* rows) {
#define PAIR(count, low, high)                                                                         \
    for (int i = 0; i < count; ++i)                                                                    \
        rows[i] = __builtin_shufflevector(rows[i], rows[i + count], low) + __builtin_shufflevector(rows[i], rows[i + count], high);
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
    PAIR(8, LOW8, HIGH8)
    PAIR(4, LOW4, HIGH4)
    PAIR(2, LOW2, HIGH2)
    PAIR(1, LOW1, HIGH1)
#undef PAIR
    return rows[0];
}

// Walks the positions of one sequence: where in the pool each token lies.
struct Walk {
    const Geometry& geometry;
    const int32_t* table;
    int64_t block, offset;

    Walk(const Geometry& geometry, const int32_t* table, int64_t position)
        : geometry(geometry), table(table), block(position / geometry.block_size), offset(position % geometry.block_size) {}
    int64_t next() {
        const int64_t at = table[block] * geometry.block_stride + offset * geometry.token_stride;
        if (++offset == geometry.block_size) {
            offset = 0;
            ++block;
        }
        return at;
    }
};

// A head of a query, for products with keys that are still to be summed over their lanes.
template <typename T>
struct Query {
    Floats parts[NUM_PARTS];

    void set(const T* head) {
        for (int part = 0; part < NUM_PARTS; ++part) parts[part] = load(head + part * LANES);
    }
    Floats times(const T* key) const {
        Floats product = parts[0] * load(key);
        for (int part = 1; part < NUM_PARTS; ++part) product += parts[part] * load(key + part * LANES);
        return product;
    }
};

#if defined(__AVX512BF16__) && HEAD_DIM % 32 == 0
template <>
struct Query<BFloat16> {
    __m512i pairs[NUM_PARTS / 2];

    void set(const BFloat16* head) {
        for (int i = 0; i < NUM_PARTS / 2; ++i) pairs[i] = _mm512_loadu_si512(head + i * 2 * LANES);
    }
    Floats times(const BFloat16* key) const {
        __m512 product = _mm512_setzero_ps();
        for (int i = 0; i < NUM_PARTS / 2; ++i)
            product = _mm512_dpbf16_ps(product, (__m512bh)pairs[i], (__m512bh)_mm512_loadu_si512(key + i * 2 * LANES));
        return (Floats)product;
    }
};
#endif

template <typename T>
inline void ask_for(const T* head) {
    for (int at = 0; at < HEAD_DIM * static_cast<int>(sizeof(T)); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(head) + at);
}

// One sequence, GROUP query heads of one KV head. Keys are taken 16 at a time from position `first` on; then the probabilities, in float32;
// then the values, one by one.
template <typename T, int GROUP>
void attend_group(const Geometry& geometry, const int32_t* table, int64_t first, int64_t length, const T* queries, const T* keys,
                  const T* values, T* out, float* scores) {
    const int64_t count = length - first, padded = (count + LANES - 1) / LANES * LANES;
    Query<T> query[GROUP];
    for (int g = 0; g < GROUP; ++g) query[g].set(queries + g * HEAD_DIM);
    Walk walk(geometry, table, first), ahead(geometry, table, first), behind(geometry, table, first);
    int64_t asked = 0;
    for (int64_t base = 0; base < count; base += LANES) {
        for (; asked < count && asked < base + AHEAD; ++asked) ask_for(keys + ahead.next());
        const T* key[LANES];
        for (int lane = 0; lane < LANES; ++lane) key[lane] = base + lane < count ? keys + walk.next() : key[0];
        // The values are read when the last key has been.
        for (int64_t i = base; i < count && i < base + LANES; ++i) ask_for(values + behind.next());
        for (int g = 0; g < GROUP; ++g) {
            Floats products[LANES];
            for (int lane = 0; lane < LANES; ++lane) products[lane] = query[g].times(key[lane]);
            Floats score = sums_of(products) * geometry.scale;
            if (base + LANES > count)
                for (int lane = static_cast<int>(count - base); lane < LANES; ++lane) score[lane] = -INFINITY;
            store(scores + g * padded + base, score);
        }
    }
    float inverse[GROUP];
    for (int g = 0; g < GROUP; ++g) {
        float* own = scores + g * padded;
        Floats most = load(own);
        for (int64_t i = LANES; i < padded; i += LANES) {
            const Floats score = load(own + i);
            most = score > most ? score : most;
        }
        const float largest = largest_of(most);
        Floats total = {};
        for (int64_t i = 0; i < padded; i += LANES) {
            const Floats probability = exponential(load(own + i) - largest);
            store(own + i, probability);
            total += probability;
        }
        inverse[g] = 1.0f / sum_of(total);
    }
    Floats sum[GROUP][NUM_PARTS] = {};
    Walk again(geometry, table, first);
    for (int64_t i = 0; i < count; ++i) {
        const T* value = values + again.next();
        Floats parts[NUM_PARTS];
        for (int part = 0; part < NUM_PARTS; ++part) parts[part] = load(value + part * LANES);
        for (int g = 0; g < GROUP; ++g) {
            const float probability = scores[g * padded + i];
            for (int part = 0; part < NUM_PARTS; ++part) sum[g][part] += probability * parts[part];
        }
    }
    for (int g = 0; g < GROUP; ++g)
        for (int part = 0; part < NUM_PARTS; ++part) store(out + g * HEAD_DIM + part * LANES, sum[g][part] * inverse[g]);
}

template <typename T>
void attend(const Geometry& geometry, const Sequences& sequences, const T* queries, int64_t query_stride, const T* slab, T* out,
            int64_t window) {
    const int64_t group = geometry.num_heads / geometry.num_kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(sequences.num_threads) if (sequences.num_threads > 1)
    for (int64_t index = 0; index < sequences.count; ++index) {
        for (int64_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
            const int64_t length = sequences.lengths[index];
            const int64_t first = window && length > window ? length - window : 0;
            const int32_t* table = sequences.tables + index * sequences.table_stride;
            const T* keys = slab + kv_head * geometry.head_stride;
            const T* values = keys + geometry.plane_stride;
            float* scores = sequences.scores + omp_get_thread_num() * sequences.scores_stride;
            for (int64_t done = 0; done < group; done += MAX_GROUP) {
                const int64_t head = kv_head * group + done;
                const T* query = queries + index * query_stride + head * HEAD_DIM;
                T* to = out + (index * geometry.num_heads + head) * HEAD_DIM;
                switch (group - done) {
                    case 1: attend_group<T, 1>(geometry, table, first, length, query, keys, values, to, scores); break;
                    case 2: attend_group<T, 2>(geometry, table, first, length, query, keys, values, to, scores); break;
                    case 3: attend_group<T, 3>(geometry, table, first, length, query, keys, values, to, scores); break;
                    default: attend_group<T, MAX_GROUP>(geometry, table, first, length, query, keys, values, to, scores);
                }
            }
        }
    }
}

}  // namespace

extern "C" {

#define OPERATORS(T, NAME)                                                                                                            \
    void pd_attend_##NAME(const Geometry* geometry, const Sequences* sequences, const T* queries, int64_t query_stride,               \
                          const T* slab, T* out, int64_t window) {                                                                    \
        attend(*geometry, *sequences, queries, query_stride, slab, out, window);                                                                    \
    }

OPERATORS(BFloat16, bfloat16)
OPERATORS(float, float32)

}  // extern "C"
