"""Philox4x32-10, a counter-based random generator: the same (seed, position) gives the same number on every worker, in every batch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); constants and known answers from Random123. No torch.
"""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF
_NUM_BITS = 52

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four random 32-bit words of a 128-bit counter under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _WORD, (product0 >> 32) ^ c3 ^ k1, product0 & _WORD
        k0 = (k0 + _KEY_INCREMENTS[0]) & _WORD
        k1 = (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Number in [0, 1) on a grid of 2**-52, so that its product with a positive double x stays below x. Seeds count modulo 2**64."""
    high, low, _, _ = philox4x32((position & _WORD, (position >> 32) & _WORD, 0, 0), (seed & _WORD, (seed >> 32) & _WORD))
    return ((high << 32 | low) >> (64 - _NUM_BITS)) / (1 << _NUM_BITS)
