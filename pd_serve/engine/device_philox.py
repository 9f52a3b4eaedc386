"""philox.py's numbers as tensors, for many rows at once: the same bits on every device.

Words of 32 bits lie in int64. A product of two of them may pass its sign, but keeps its 64 bits; shifts are followed by a mask, which
makes them logical ones.
"""

from __future__ import annotations

from torch import Tensor

from pd_serve.engine.philox import KEY_INCREMENTS, MULTIPLIERS, NUM_BITS, NUM_ROUNDS, WORD


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """philox.uniform of each pair: `seeds` and `positions` [num_rows] int64 (seeds modulo 2**64), to [num_rows] float64."""
    c0, c1 = positions & WORD, _high(positions)
    c2, c3 = positions.new_zeros(positions.shape), positions.new_zeros(positions.shape)
    k0, k1 = seeds & WORD, _high(seeds)
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(product1) ^ c1 ^ k0, product1 & WORD, _high(product0) ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & WORD, (k1 + KEY_INCREMENTS[1]) & WORD
    # The upper 52 of the 64 bits c0, c1.
    return ((c0 << (NUM_BITS - 32)) | (c1 >> (64 - NUM_BITS))).double() / (1 << NUM_BITS)


def _high(words: Tensor) -> Tensor:
    return (words >> 32) & WORD
