#pragma once

#include <cstdint>

// How the pool's elements lie; counts and strides in elements.
struct Geometry {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t block_stride;
    int64_t plane_stride;
    int64_t token_stride;
    int64_t head_stride;
    float scale;
};
