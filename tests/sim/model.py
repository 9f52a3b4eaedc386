"""The fake model: KV and tokens that are functions of the exact prefix, so that one foreign byte anywhere is seen.

Each token's keys and values of a layer are one 32-bit word each (two float16 dims of one head); the pool is a uint32 array
[num_layers, num_blocks, 2, block_size].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import FinishReason
from pd_serve.protocol.sampling import SamplingParams

VOCAB_SIZE = 50
EOS = 0
WORD_NBYTES = 4
_MASK = (1 << 64) - 1


def make_layout(num_layers: int, block_size: int, num_blocks: int) -> KVLayout:
    return KVLayout(num_layers=num_layers, num_kv_heads=1, head_dim=2, block_size=block_size, num_blocks=num_blocks, dtype=KVDtype.FLOAT16)


@lru_cache(maxsize=4096)
def digests(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """A 64-bit digest of every non-empty prefix."""
    state, out = 0x9E3779B97F4A7C15, []
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & _MASK
        state ^= state >> 29
        out.append(state)
    return tuple(out)


@lru_cache(maxsize=512)
def kv_words(tokens: tuple[int, ...], num_layers: int) -> NDArray[np.uint32]:
    """[num_layers, 2, num_tokens]: keys and values of every position."""
    prefix = np.array(digests(tokens), dtype=np.uint64)
    salts = np.arange(1, 2 * num_layers + 1, dtype=np.uint64).reshape(num_layers, 2, 1) * np.uint64(0xBF58476D1CE4E5B9)
    words: NDArray[np.uint32] = (((prefix ^ salts) * np.uint64(0x94D049BB133111EB)) >> np.uint64(32)).astype(np.uint32)
    return words


def next_token(tokens: tuple[int, ...], is_eos_masked: bool = False) -> int:
    token = digests(tokens)[-1] % VOCAB_SIZE
    return 1 if token == EOS and is_eos_masked else token


def chosen_logprob(tokens: tuple[int, ...]) -> float:
    """Of the token after `tokens`: another fact of the exact prefix that has to arrive with its token."""
    return -float(digests(tokens)[-1] % 1009)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client must get."""

    tokens: tuple[int, ...]
    finish: FinishReason


def oracle(prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
    tokens = list(prompt)
    while True:
        num_output = len(tokens) - len(prompt)
        token = next_token(tuple(tokens), num_output < sampling.min_tokens)
        tokens.append(token)
        stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if stops and num_output >= sampling.min_tokens:
            return Answer(tuple(tokens[len(prompt) :]), FinishReason.STOP)
        if num_output + 1 == sampling.max_tokens:
            return Answer(tuple(tokens[len(prompt) :]), FinishReason.LENGTH)
