"""A batch as tensors: built once per step, used by every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pd_serve.engine.attention.base import QuerySpan
from pd_serve.engine.batch import BatchEntry, Phase


@dataclass(frozen=True, slots=True)
class StepInputs:
    """num_rows = num_tokens, or 2 for a step of one token, which is computed as two equal rows (linear.py says why)."""

    num_tokens: int
    num_decode_rows: int
    """Rows of tokens in the decode phase, which come first."""
    token_ids: Tensor
    """[num_rows] int64"""
    positions: Tensor
    """[num_rows] int64, absolute in each token's sequence"""
    slots: Tensor
    """[num_rows] int64: where each token's KV goes: block * block_size + offset in it"""
    sampled_rows: Tensor
    """[num_sampled] int64: the last row of each entry that is sampled"""
    spans: tuple[QuerySpan, ...]
    """In row order: one per prefill entry and per token of a decode entry."""
    sampled_entries: tuple[int, ...]
    """Index in the batch of the entry that each sampled row belongs to."""

    def on(self, device: torch.device) -> StepInputs:
        """The same with its tensors there."""
        names = ("token_ids", "positions", "slots", "sampled_rows")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def build_step_inputs(entries: Sequence[BatchEntry], block_size: int, device: torch.device) -> StepInputs:
    """Rows: decode tokens by growing context (so that equal lengths lie together for attention), then prefill chunks.

    Several tokens of one decode entry are as many queries, each with its own context: all keys of a layer are written before attention.
    """
    spans: list[QuerySpan] = []
    sampled_rows: list[int] = []
    sampled_entries: list[int] = []
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    for index, first, count in sorted(_pieces(entries), key=lambda piece: _row_order(entries[piece[0]], piece[1])):
        entry = entries[index]
        start, end = entry.start + first, entry.start + first + count
        assert len(entry.block_table) * block_size >= end, "the block table is too short for the entry's last token"
        spans.append(QuerySpan(entry.phase, len(token_ids), start, count, entry.block_table))
        token_ids.extend(entry.token_ids[first : first + count])
        positions.extend(range(start, end))
        blocks.extend(entry.block_table[position // block_size] for position in range(start, end))
        if entry.sample is not None and first + count == len(entry.token_ids):
            sampled_rows.append(len(token_ids) - 1)
            sampled_entries.append(index)
    num_tokens = len(token_ids)
    num_decode_rows = sum(span.phase is Phase.DECODE for span in spans)
    if num_tokens == 1:
        num_decode_rows *= 2
        token_ids, positions, blocks = token_ids * 2, positions * 2, blocks * 2
    position = np.array(positions, dtype=np.int64)
    slots = np.array(blocks, dtype=np.int64) * block_size + position % block_size
    return StepInputs(
        num_tokens=num_tokens,
        num_decode_rows=num_decode_rows,
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device, non_blocking=True),
        positions=torch.from_numpy(position).to(device, non_blocking=True),
        slots=torch.from_numpy(slots).to(device, non_blocking=True),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64).to(device, non_blocking=True),
        spans=tuple(spans),
        sampled_entries=tuple(sampled_entries),
    )


def _pieces(entries: Sequence[BatchEntry]) -> Iterator[tuple[int, int, int]]:
    """What becomes a span each: (index of the entry, first token in it, number of tokens)."""
    for index, entry in enumerate(entries):
        if entry.phase is Phase.PREFILL:
            yield index, 0, len(entry.token_ids)
        else:
            yield from ((index, offset, 1) for offset in range(len(entry.token_ids)))


def _row_order(entry: BatchEntry, first: int) -> tuple[bool, int]:
    is_prefill = entry.phase is Phase.PREFILL
    return is_prefill, 0 if is_prefill else entry.start + first
