// The operators of the other files, as Python and decode.cpp call them.

#pragma once

#include <cstdint>

#include "geometry.h"
#include "vectors.h"

// What is done with a product before it is rounded: silu(product), product * other, product + other.
enum Fusion : int64_t { NONE, SILU, TIMES, PLUS };

extern "C" {

// A step's decoding sequences.
struct Sequences {
    int64_t count;
    int64_t table_stride;
    const int32_t* tables;  // [count, table_stride]
    const int32_t* lengths;  // [count]: keys that the query sees, without a window
    float* scores;  // [num_threads, scores_stride], of at least MAX_GROUP * length rounded up to LANES
    int64_t scores_stride;
    int64_t num_threads;
};

void pd_linear(const BFloat16* x, const BFloat16* weight, const BFloat16* bias, const BFloat16* other, BFloat16* out, int64_t num_rows,
               int64_t num_inputs, int64_t num_outputs, int64_t fusion, int64_t num_threads);
void pd_norm_bfloat16(const BFloat16* x, const float* weight, BFloat16* out, int64_t num_rows, int64_t num_inner, int64_t row_stride,
                      int64_t size, double floor, int64_t num_threads);
void pd_rotate_and_write_bfloat16(const Geometry* geometry, BFloat16* heads, const BFloat16* cosine, const BFloat16* signed_sine,
                                  const int64_t* positions, const int64_t* slots, BFloat16* slab, int64_t num_rows, int64_t num_threads);
void pd_attend_bfloat16(const Geometry* geometry, const Sequences* sequences, const BFloat16* queries, int64_t query_stride,
                        const BFloat16* slab, BFloat16* out, int64_t window);

}  // extern "C"
