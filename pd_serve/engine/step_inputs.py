"""A batch as tensors: built once per step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Rows of decode entries, which come first."""
    token_ids: Tensor
    """[num_rows] int64"""
    positions: Tensor
    """[num_rows] int64, absolute in each token's sequence"""
    kv_rows: Tensor
    """[2 * num_rows] int64: where each token's keys, then its values go: a row of the slab seen as [num_blocks * 2 * block_size, …]"""
    sampled_rows: Tensor
    """[num_sampled] int64: the last row of each entry that is sampled"""
    spans: tuple[QuerySpan, ...]
    """One per entry, in row order."""
    sampled_entries: tuple[int, ...]
    """Index in the batch of the entry that each sampled row belongs to."""


def build_step_inputs(entries: Sequence[BatchEntry], block_size: int, device: torch.device) -> StepInputs:
    """Rows: decode entries by growing context (so that equal lengths lie together for attention), then prefill chunks."""
    order = sorted(range(len(entries)), key=lambda index: _row_order(entries[index]))
    spans: list[QuerySpan] = []
    sampled_rows: list[int] = []
    sampled_entries: list[int] = []
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    for index in order:
        entry = entries[index]
        end = entry.start + len(entry.token_ids)
        assert entry.phase is Phase.PREFILL or len(entry.token_ids) == 1, "a decode entry computes one token"
        assert len(entry.block_table) * block_size >= end, "the block table is too short for the entry's last token"
        spans.append(QuerySpan(entry.phase, len(token_ids), entry.start, len(entry.token_ids), entry.block_table))
        token_ids.extend(entry.token_ids)
        positions.extend(range(entry.start, end))
        blocks.extend(entry.block_table[position // block_size] for position in range(entry.start, end))
        if entry.sample is not None:
            sampled_rows.append(len(token_ids) - 1)
            sampled_entries.append(index)
    num_tokens = len(token_ids)
    num_decode_rows = sum(span.phase is Phase.DECODE for span in spans)
    if num_tokens == 1:
        num_decode_rows *= 2
        token_ids, positions, blocks = token_ids * 2, positions * 2, blocks * 2
    position = np.array(positions, dtype=np.int64)
    key_rows = np.array(blocks, dtype=np.int64) * (2 * block_size) + position % block_size
    kv_rows = np.stack((key_rows, key_rows + block_size), axis=1).reshape(-1)
    return StepInputs(
        num_tokens=num_tokens,
        num_decode_rows=num_decode_rows,
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device, non_blocking=True),
        positions=torch.from_numpy(position).to(device, non_blocking=True),
        kv_rows=torch.from_numpy(kv_rows).to(device, non_blocking=True),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64).to(device, non_blocking=True),
        spans=tuple(spans),
        sampled_entries=tuple(sampled_entries),
    )


def _row_order(entry: BatchEntry) -> tuple[bool, int]:
    is_prefill = entry.phase is Phase.PREFILL
    return is_prefill, 0 if is_prefill else entry.start
