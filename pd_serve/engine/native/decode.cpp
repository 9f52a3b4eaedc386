// All layers of a step that only decodes, as one call: what models/llama.py does by a call per operation, in its order, by the same operators,
// so that results have the same bits. The interpreter between the operations would find its code and data pushed out of the caches by the
// weights each time.

#include <cstdint>

#include "operators.h"

extern "C" {

// A weight as pd_linear takes it.
struct Weight {
    const BFloat16* packed;
    const BFloat16* bias;
    int64_t num_outputs;
    int64_t num_inputs;
};

struct DecoderLayer {
    const float* input_norm;
    const float* head_norm;  // [num_heads + num_kv_heads, head_dim] or null
    const float* mlp_norm;
    BFloat16* slab;
    int64_t window;
    Weight qkv, output, gate, up, down;
};

struct Decoder {
    const DecoderLayer* layers;
    int64_t num_layers;
    int64_t hidden_size;
    int64_t head_dim;
    double norm_floor;
    double head_norm_floor;
    const BFloat16* cosine;
    const BFloat16* signed_sine;
    int64_t num_threads;
    int64_t parallel_from;  // elements from which norms and rotations are shared out to the threads
};

// Rows of a step: `hidden` [num_rows, hidden_size] becomes the last layer's; `scratch` is of pd_decode_scratch elements.
struct Rows {
    int64_t count;
    const int64_t* positions;
    const int64_t* slots;
    BFloat16* hidden;
    BFloat16* scratch;
};

int64_t pd_decode_scratch(const Decoder* decoder, int64_t num_rows) {
    const DecoderLayer& layer = decoder->layers[0];
    return num_rows * (decoder->hidden_size + layer.qkv.num_outputs + layer.output.num_inputs + layer.gate.num_outputs);
}

void pd_decode(const Decoder* decoder, const Geometry* geometry, const Sequences* sequences, const Rows* rows) {
    const int64_t count = rows->count, hidden_size = decoder->hidden_size, head_dim = decoder->head_dim;
    const int64_t heads_width = decoder->layers[0].qkv.num_outputs, attended_width = decoder->layers[0].output.num_inputs;
    const int64_t num_rotated = geometry->num_heads + geometry->num_kv_heads;
    BFloat16 *hidden = rows->hidden, *normed = rows->scratch, *heads = normed + count * hidden_size;
    BFloat16 *attended = heads + count * heads_width, *inner = attended + count * attended_width;
    const auto threads_for = [&](int64_t elements) { return elements >= decoder->parallel_from ? decoder->num_threads : 1; };
    const auto linear = [&](const Weight& weight, const BFloat16* x, const BFloat16* other, BFloat16* out, int64_t fusion) {
        pd_linear(x, weight.packed, weight.bias, other, out, count, weight.num_inputs, weight.num_outputs, fusion, decoder->num_threads);
    };
    const auto norm = [&](const float* weight) {
        pd_norm_bfloat16(hidden, weight, normed, count, 1, hidden_size, hidden_size, decoder->norm_floor, threads_for(count * hidden_size));
    };
    for (int64_t index = 0; index < decoder->num_layers; ++index) {
        const DecoderLayer& layer = decoder->layers[index];
        norm(layer.input_norm);
        linear(layer.qkv, normed, nullptr, heads, NONE);
        if (layer.head_norm)
            pd_norm_bfloat16(heads, layer.head_norm, heads, count, num_rotated, heads_width, head_dim, decoder->head_norm_floor,
                             threads_for(count * num_rotated * head_dim));
        pd_rotate_and_write_bfloat16(geometry, heads, decoder->cosine, decoder->signed_sine, rows->positions, rows->slots, layer.slab, count,
                                     threads_for(count * heads_width));
        pd_attend_bfloat16(geometry, sequences, heads, heads_width, layer.slab, attended, layer.window);
        linear(layer.output, attended, hidden, hidden, PLUS);
        norm(layer.mlp_norm);
        linear(layer.gate, normed, nullptr, inner, SILU);
        linear(layer.up, normed, inner, inner, TIMES);
        linear(layer.down, inner, hidden, hidden, PLUS);
    }
}

}  // extern "C"
