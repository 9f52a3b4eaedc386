"""Philox4x32-10, a counter-based random generator: the same (seed, position) gives the same number on every worker, in every batch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); constants and known answers from Random123. No torch.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
WORD = 0xFFFFFFFF
NUM_BITS = 52

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four random 32-bit words of a 128-bit counter under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & WORD, (product0 >> 32) ^ c3 ^ k1, product0 & WORD
        k0 = (k0 + KEY_INCREMENTS[0]) & WORD
        k1 = (k1 + KEY_INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Number in [0, 1) on a grid of 2**-52, so that its product with a positive double x stays below x. Seeds count modulo 2**64."""
    high, low, _, _ = philox4x32((position & WORD, (position >> 32) & WORD, 0, 0), (seed & WORD, (seed >> 32) & WORD))
    return ((high << 32 | low) >> (64 - NUM_BITS)) / (1 << NUM_BITS)
