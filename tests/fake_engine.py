"""A runner whose tokens are a function of the KV it finds in the pool: KV that was not moved, or moved wrongly, gives other tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pd_serve.engine.batch import Batch, BatchEntry, SampledToken, SampleSpec, StepResult
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.sampling import TokenLogprobs

VOCAB_SIZE = 100
NUM_LAYERS = 3


def small_layout(num_blocks: int = 32, block_size: int = 4) -> KVLayout:
    return KVLayout(NUM_LAYERS, 1, 4, block_size, num_blocks, KVDtype.FLOAT32)


def _code(token_id: int, position: int, layer: int) -> int:
    return (token_id * 31 + position * 17 + layer * 7 + 1) % 251


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed attempt generates."""
    ids = list(prompt)
    for _ in range(count):
        codes = [_code(token, position, layer) for position, token in enumerate(ids) for layer in range(NUM_LAYERS)]
        ids.append(sum(codes) % VOCAB_SIZE)
    return ids[len(prompt) :]


def expected_logprobs(last_token: int, token_id: int) -> TokenLogprobs:
    """Of the token that follows `last_token`."""
    return TokenLogprobs(-float(last_token * VOCAB_SIZE + token_id))


class FakeRunner:
    """Implements the Runner protocol over a pool of bytes. `gate`, where given, is waited for before each layer."""

    def __init__(self, layout: KVLayout, buffer: memoryview, gate: threading.Event | None = None) -> None:
        self._layout = layout
        shape = (layout.num_layers, layout.num_blocks, 2, layout.block_size, layout.token_nbytes)
        self.slots: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, count=layout.pool_nbytes).reshape(shape)
        self.gate = gate
        self.fail_next = 0

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None) -> StepResult:
        started_at = time.monotonic()
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("planted")
        for layer in range(self._layout.num_layers):
            if self.gate is not None:
                assert self.gate.wait(10), "the gate was never opened"
            for entry in batch.entries:
                self._write(entry, layer)
            if on_layer is not None:
                on_layer(layer)
        sampled = tuple(self._sampled(e, e.sample) for e in batch.entries if e.sample is not None)
        return StepResult(batch.step_id, sampled, started_at, time.monotonic())

    def _write(self, entry: BatchEntry, layer: int) -> None:
        for position, token in enumerate(entry.token_ids, start=entry.start):
            block, offset = divmod(position, self._layout.block_size)
            self.slots[layer, entry.block_table[block], :, offset] = _code(token, position, layer)

    def _sampled(self, entry: BatchEntry, sample: SampleSpec) -> SampledToken:
        token_id = self._sample(entry)
        logprobs = None if sample.params.num_logprobs < 0 else expected_logprobs(entry.token_ids[-1], token_id)
        return SampledToken(entry.attempt_id, token_id, logprobs)

    def _sample(self, entry: BatchEntry) -> int:
        total = 0
        for position in range(entry.start + len(entry.token_ids)):
            block, offset = divmod(position, self._layout.block_size)
            slot = self.slots[:, entry.block_table[block], :, offset]
            for layer in range(self._layout.num_layers):
                values = np.unique(slot[layer])
                total += int(values[0]) if len(values) == 1 else 1_000_003
        return total % VOCAB_SIZE
