"""Steps to be measured, as a scheduler would make them."""

from __future__ import annotations

import random

from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_SEED = 0
_FIRST_ID, _NUM_IDS = 5, 32
"""Token ids that every vocabulary has; which ones they are does not change the work."""


def decode_batch(batch: int, context: int, block_size: int) -> Batch:
    """One token each of `batch` sequences, whose blocks lie scattered; the token is the last of `context`."""
    count = -(-context // block_size)
    blocks = list(range(batch * count))
    random.Random(_SEED).shuffle(blocks)
    spec = SampleSpec(_GREEDY, context, 1)
    tables = [tuple(blocks[index * count : (index + 1) * count]) for index in range(batch)]
    entries = (
        BatchEntry(AttemptId(index), Phase.DECODE, (_FIRST_ID + index % _NUM_IDS,), context - 1, table, spec)
        for index, table in enumerate(tables)
    )
    return Batch(0, tuple(entries))


def prefill_batches(length: int, chunk: int, block_size: int) -> list[Batch]:
    """A prompt of `length` random tokens, `chunk` of them per step, the last one sampled."""
    rng = random.Random(_SEED)
    tokens = tuple(rng.randrange(_FIRST_ID, _FIRST_ID + _NUM_IDS) for _ in range(length))
    table = tuple(range(-(-length // block_size)))
    batches = []
    for start in range(0, length, chunk):
        part = tokens[start : start + chunk]
        spec = SampleSpec(_GREEDY, length, 0) if start + chunk >= length else None
        batches.append(Batch(0, (BatchEntry(AttemptId(0), Phase.PREFILL, part, start, table, spec),)))
    return batches
