"""What `bench transfer` writes: the byte ranges of every case, decided here from numbers alone. Pure.

Two kinds of case. *Runs*: a pool cut into units, written in runs of consecutive units; each run is one write, and the runs lie in random
order, another one on each side. *KV*: what a prompt's blocks are in a model's layout, planned as the prefill machine plans it
(kv/transfer.py), on block pools in a given state.

A case is written over and over, and each pass takes other bytes than the pass before, until the pool has been gone through: what is
measured comes from memory, or from wherever a pool of that size stays, not from a buffer that is always in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.kv.transfer import coalesce, plan_ranges

Ops = NDArray[np.int64]
"""[n, 3]: offset in the writer's pool, offset in the target's pool, bytes."""


class PoolState(Enum):
    """Of a block pool before the prompt's blocks are taken from it."""

    FRESH = "fresh"
    """Empty: the blocks are one run."""
    HALF = "half"
    """Every other block is held, at random on each side."""
    ISOLATED = "isolated"
    """Every second block is held: no free block has a free neighbour, the worst a free list can be."""


class RunsCase(msgspec.Struct, frozen=True, tag="runs"):
    unit_nbytes: int
    run_length: int
    """Units in a row."""
    pass_nbytes: int
    pool_nbytes: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{size_text(self.run_nbytes)} (runs of {self.run_length})"

    @property
    def run_nbytes(self) -> int:
        """Bytes of one write."""
        return self.unit_nbytes * self.run_length


class KVCase(msgspec.Struct, frozen=True, tag="kv"):
    layout: KVLayout
    num_tokens: int
    state: PoolState
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.num_tokens} tokens, {self.state.value}"


Case = RunsCase | KVCase


def plan_passes(case: Case) -> list[list[Ops]]:
    """[pass][batch]: batches as the prefill worker issues them, one per layer of KV, one for a pass of runs."""
    return [[ops] for ops in _plan_runs(case)] if isinstance(case, RunsCase) else _plan_kv(case)


def num_bytes(batches: Sequence[Ops]) -> int:
    return int(sum(int(ops[:, 2].sum()) for ops in batches))


def layout_of(text: str, num_blocks: int) -> KVLayout:
    """`<layers>x<KV heads>x<head dim>x<block size>`, bfloat16, such as `30x3x64x16`. Raises ValueError."""
    fields = text.lower().split("x")
    if len(fields) != 4 or not all(field.isdigit() and int(field) > 0 for field in fields):
        raise ValueError(f"layout {text!r}: expected <layers>x<KV heads>x<head dim>x<block size>, such as 30x3x64x16")
    layers, heads, head_dim, block_size = map(int, fields)
    return KVLayout(layers, heads, head_dim, block_size, num_blocks, KVDtype.BFLOAT16)


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _plan_runs(case: RunsCase) -> list[Ops]:
    per_pass, num_runs = case.pass_nbytes // case.run_nbytes, case.pool_nbytes // case.run_nbytes
    num_passes = num_runs // per_pass if per_pass else 0
    if num_passes == 0:
        raise ValueError(f"runs of {case.run_nbytes} bytes, passes of {case.pass_nbytes}: too long for a pool of {case.pool_nbytes} bytes")
    random = np.random.default_rng(case.seed)
    orders = [random.permutation(num_runs)[: per_pass * num_passes].reshape(num_passes, per_pass) for _ in range(2)]
    within = np.arange(case.run_length, dtype=np.int64) * case.unit_nbytes
    passes: list[Ops] = []
    for index in range(num_passes):
        local, remote = ((order[index][:, None] * case.run_nbytes + within).ravel() for order in orders)
        passes.append(coalesce(np.stack((local, remote, np.full_like(local, case.unit_nbytes)), axis=1)))
    return passes


def _plan_kv(case: KVCase) -> list[list[Ops]]:
    layout, random = case.layout, np.random.default_rng(case.seed)
    count = layout.num_blocks_for(case.num_tokens)
    pools = [_pool_in(case.state, layout, random) for _ in range(2)]
    passes: list[list[Ops]] = []
    while all(pool.num_allocatable >= count for pool in pools):
        source, target = (pool.allocate(count) for pool in pools)
        ranges = plan_ranges(layout, source, target, 0, case.num_tokens)
        stride = np.array([layout.layer_nbytes, layout.layer_nbytes, 0], np.int64)
        passes.append([ranges + layer * stride for layer in range(layout.num_layers)])
    if not passes:
        raise ValueError(f"{count} blocks do not fit into a pool of {layout.num_blocks} blocks that is {case.state.value}")
    return passes


def _pool_in(state: PoolState, layout: KVLayout, random: np.random.Generator) -> BlockPool:
    """Of the free blocks of a pool that is not fresh, the order in which they came back is random."""
    pool = BlockPool(layout.num_blocks, layout.block_size, prefix_cache=False)
    if state is PoolState.FRESH:
        return pool
    blocks = pool.allocate(layout.num_blocks)
    free = blocks[::2] if state is PoolState.ISOLATED else random.permutation(blocks)[: layout.num_blocks // 2].tolist()
    for block in random.permutation(free).tolist():
        pool.release([block])
    return pool
