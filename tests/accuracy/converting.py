"""Two engines over two transports in one process whose KV pools may differ: real pools, real transport threads, real packing."""

from __future__ import annotations

import json
import queue
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config, EngineConfig, KVConfig, ModelConfig
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.engine.fp8 import dequantize_into, quantize
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.runner import ModelRunner
from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.digest import TokenSpan
from pd_serve.kv.layout import KVLayout
from pd_serve.kv.transfer import plan_ranges, write_ranges
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import PeerJoined, WriteWindow
from pd_serve.transport.registry import transport_factory
from tests.accuracy.driver import GREEDY
from tests.transport_nodes import peer_id, settings_for
from workers.events import (
    AddPeer,
    FlushDone,
    FlushThenNotify,
    NoticeArrived,
    OpenWindow,
    PushNow,
    PushPlan,
    TransportReported,
    WindowOpened,
)
from workers.prefill.packer import TorchPacker
from workers.transport_commands import AllocatePool, BeginStep, LayerReady, SamplesObserved, StepEnded, TransportOutput, UsePacker
from workers.transport_thread import TransportThread

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
EPOCH = Epoch(9)


@dataclass(frozen=True)
class Sizes:
    model: Mapping[str, object] = field(default_factory=lambda: CONFIG)
    pool_tokens: int = 4096
    slot_nbytes: int = 4096
    num_slots: int = 6
    verify: bool = True


SMALL = Sizes()


@dataclass(frozen=True)
class Kind:
    """What a worker's pool is like."""

    block_size: int = 16
    dtype: str = "float32"
    order: str = "token_major"
    kv_dtype: str = "auto"

    @property
    def stored(self) -> str:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    def __str__(self) -> str:
        return f"{self.block_size}-{self.dtype}-{self.stored}-{self.order}"


@dataclass(frozen=True)
class Prompt:
    number: int
    token_ids: tuple[int, ...]
    num_cached: int
    """Tokens that decode has from an earlier prompt: nothing of them is sent."""
    num_known: int
    """Tokens that prefill has: sent all layers at once."""
    source: tuple[int, ...]
    target: tuple[int, ...]
    own: tuple[int, ...]
    """On decode, for the reference."""


class Rank:
    """An engine on this thread, over the pool of a transport on its own."""

    def __init__(self, name: str, folder: Path, kind: Kind, lanes: str, sizes: Sizes) -> None:
        (folder / "config.json").write_text(json.dumps(sizes.model))
        num_blocks = sizes.pool_tokens // kind.block_size
        config = Config(
            model=ModelConfig.model_validate({"dtype": kind.dtype, "load_format": "random"}),
            kv=KVConfig.model_validate(
                {"block_size": kind.block_size, "num_blocks": num_blocks, "dtype": kind.kv_dtype, "order": kind.order}
            ),
            engine=EngineConfig(device="cpu"),
        )
        plan = plan_engine(folder, config)
        pool_nbytes, staging_nbytes = plan.layout.pool_nbytes, sizes.num_slots * sizes.slot_nbytes
        self.peer = peer_id(name)
        self.outputs: queue.Queue[TransportOutput] = queue.Queue()
        self.thread = TransportThread(
            transport_factory("ucx"), settings_for(self.peer, lanes), self.outputs.put, verify=plan.layout if sizes.verify else None
        )
        self.ready = self.thread.start(AllocatePool(pool_nbytes + staging_nbytes), 10.0)
        assert self.ready.region.buffer is not None
        self.runner: ModelRunner[Any] = load_runner(plan, self.ready.region.buffer, MonotonicClock())
        packer = TorchPacker(self.runner.cache, self.runner.cache.region)
        self.thread.submit(UsePacker(packer, pool_nbytes, staging_nbytes, sizes.slot_nbytes))
        # A NaN in every type: whatever is read without having been written shows.
        self.runner.cache.region[:pool_nbytes] = 0xFF
        self.samples: dict[str, float] = {}

    @property
    def layout(self) -> KVLayout:
        return self.runner.cache.layout

    def expect(self, kind: type[TransportOutput]) -> Any:
        """The next output of that kind; what comes before it is passed over, but for samples."""
        while True:
            output = self.outputs.get(timeout=20.0)
            if isinstance(output, SamplesObserved):
                for sample in output.samples:
                    self.samples[sample.metric] = self.samples.get(sample.metric, 0.0) + sample.value
            if isinstance(output, kind):
                return output

    def read(self, layer: int, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """[num_planes, num_tokens, num_kv_heads, head_dim] as stored, float32."""
        return self.runner.cache.read(layer, self._rows(blocks, start, end)).float()

    def write(self, layer: int, blocks: Sequence[int], start: int, values: Tensor) -> None:
        """`values` as read() gives them, stored from token `start` on: converted once."""
        cache = self.runner.cache
        heads = values.transpose(0, 1).flatten(1, 2)
        if not self.layout.dtype.has_scales:
            heads = heads.to(getattr(torch, self.layout.dtype.value))
        cache.write(layer, self._rows(blocks, start, start + values.shape[1]), heads)

    def as_stored(self, values: Tensor) -> Tensor:
        """What reading gives of float32 `values` that are stored here."""
        if not self.layout.dtype.has_scales:
            return values.to(getattr(torch, self.layout.dtype.value)).float()
        out = torch.empty(values.shape)
        dequantize_into(*quantize(values), out)
        return out

    def _rows(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        size = self.layout.block_size
        return self.runner.cache.rows(torch.tensor([blocks[at // size] * size + at % size for at in range(start, end)]))

    def step(self, token_ids: Sequence[int], start: int, blocks: tuple[int, ...], phase: Phase, num_outputs: int = 0) -> int:
        """Compute tokens from `start` on; the token that follows them."""
        position = start + len(token_ids)
        entry = BatchEntry(AttemptId(1), phase, tuple(token_ids), start, blocks, SampleSpec(GREEDY, position, num_outputs))
        return self.runner.execute(Batch(1, (entry,))).sampled[0].token_id

    def decode(self, num_prompt: int, first: int, blocks: tuple[int, ...], num_tokens: int) -> list[int]:
        """Greedy tokens after the first, with the prompt's KV in `blocks`."""
        tokens = [first]
        while len(tokens) < num_tokens:
            at = num_prompt + len(tokens) - 1
            tokens.append(self.step(tokens[-1:], at, blocks, Phase.DECODE, len(tokens)))
        return tokens


class Pair:
    def __init__(self, folder: Path, prefill: Kind, decode: Kind, lanes: str = "shm", sizes: Sizes = SMALL) -> None:
        """Raises TransportUnavailableError."""
        self.kinds = prefill, decode
        self.damaged: list[int] = []
        """Prompts whose digest was not that of what arrived."""
        self._slot_nbytes = sizes.slot_nbytes
        self.prefill, self.target = (Rank(name, folder, kind, lanes, sizes) for name, kind in (("prefill", prefill), ("decode", decode)))
        for rank, other in ((self.prefill, self.target), (self.target, self.prefill)):
            rank.thread.submit(AddPeer(other.peer, (other.ready.metadata,)))
        for rank in (self.prefill, self.target):
            assert isinstance(rank.expect(TransportReported).event, PeerJoined)

    def close(self) -> None:
        for rank in (self.prefill, self.target):
            assert rank.thread.stop(5.0)

    @property
    def is_exact(self) -> bool:
        """Engine and pool store the same values on both: decode must do what prefill itself would."""
        return (self.kinds[0].dtype, self.kinds[0].stored) == (self.kinds[1].dtype, self.kinds[1].stored)

    @property
    def is_converting(self) -> bool:
        return not self.prefill.layout.is_same_as(self.target.layout)

    def prompts(self, lengths: Sequence[int], num_outputs: int, shared: int) -> list[Prompt]:
        """One of each length, and one more that shares its first `shared` tokens, as far as blocks are full, with the longest, on both."""
        rng = random.Random(5)
        source, target = (rng.sample(range(rank.layout.num_blocks), rank.layout.num_blocks) for rank in (self.prefill, self.target))

        def take(free: list[int], rank: Rank, length: int, kept: tuple[int, ...] = ()) -> tuple[int, ...]:
            count = rank.layout.num_blocks_for(length + num_outputs) - len(kept)
            taken = tuple(free[:count])
            del free[:count]
            assert len(taken) == count
            return kept + taken

        prompts: list[Prompt] = []
        for number, length in enumerate(lengths, 1):
            token_ids = tuple(rng.randrange(3, 256) for _ in range(length))
            tables = take(source, self.prefill, length), take(target, self.target, length), take(target, self.target, length)
            prompts.append(Prompt(number, token_ids, 0, 0, *tables))
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        token_ids = longest.token_ids[:shared] + tuple(rng.randrange(3, 256) for _ in range(37))
        num_known, num_cached = (shared // rank.layout.block_size * rank.layout.block_size for rank in (self.prefill, self.target))
        kept = longest.source[: num_known // self.prefill.layout.block_size], longest.target[: num_cached // self.target.layout.block_size]
        length = len(token_ids)
        tables = (
            take(source, self.prefill, length, kept[0]),
            take(target, self.target, length, kept[1]),
            take(target, self.target, length),
        )
        return [*prompts, Prompt(len(prompts) + 1, token_ids, num_cached, num_known, *tables)]

    def push(self, prompts: Sequence[Prompt], chunk: int) -> dict[int, int]:
        """All prompts side by side, a chunk of each per step, every layer pushed as soon as it is written; {number: first token}."""
        firsts: dict[int, int] = {}
        for prompt in prompts:
            starts, ends = write_ranges(self.target.layout, prompt.target, prompt.num_cached, len(prompt.token_ids))
            window = WriteWindow(LeaseId(prompt.number), EPOCH, self.prefill.peer, starts, ends)
            self.target.thread.submit(OpenWindow(window, TokenSpan(prompt.target, prompt.num_cached, len(prompt.token_ids))))
            self.target.expect(WindowOpened)
            if prompt.num_known > prompt.num_cached:
                self.prefill.thread.submit(PushNow(self.plan(prompt, prompt.num_cached, prompt.num_known, 0)))
        done = {prompt.number: prompt.num_known for prompt in prompts}
        for step in range(1, 1000):
            spans = [(prompt, done[prompt.number], min(done[prompt.number] + chunk, len(prompt.token_ids))) for prompt in prompts]
            spans = [span for span in spans if span[1] < span[2]]
            if not spans:
                break
            plans = [self.plan(prompt, max(start, prompt.num_cached), end, step) for prompt, start, end in spans]
            self.prefill.thread.submit(BeginStep(step, tuple(plan for plan in plans if plan.nbytes)))
            batch = Batch(step, tuple(_entry(*span) for span in spans), has_push=True)
            result = self.prefill.runner.execute(
                batch, lambda layer, step=step: self.prefill.thread.submit(LayerReady(step, layer, time.monotonic()))
            )
            self.prefill.thread.submit(StepEnded(step))
            firsts |= {int(sampled.attempt_id): sampled.token_id for sampled in result.sampled}
            done |= {prompt.number: end for prompt, _, end in spans}
        for prompt in prompts:
            self._complete(prompt, firsts[prompt.number])
        return firsts

    def plan(self, prompt: Prompt, start: int, end: int, chunk: int) -> PushPlan:
        src, dst = self.prefill.layout, self.target.layout
        lease = Lease(LeaseId(prompt.number), EPOCH, self.target.peer)
        ranges, packings = np.empty((0, 3), np.int64), ()
        if start < end and self.is_converting:
            heads = HeadSlice(0, 0, src.num_kv_heads)
            packings = tuple(plan_packings(src, dst, heads, prompt.source, prompt.target, start, end, self._slot_nbytes))
        elif start < end:
            ranges = plan_ranges(src, prompt.source, prompt.target, start, end)
        return PushPlan(
            AttemptId(prompt.number),
            lease,
            ranges,
            src.layer_nbytes,
            dst.layer_nbytes,
            src.num_layers,
            chunk,
            packings,
            span=TokenSpan(prompt.source, start, end),
        )

    def _complete(self, prompt: Prompt, first: int) -> None:
        layout, length = self.target.layout, len(prompt.token_ids)
        nbytes = (length - prompt.num_cached) * layout.bytes_per_token
        record = Completed(
            LeaseId(prompt.number), EPOCH, AttemptId(prompt.number), 0, 1, first, None, length, layout.num_layers, nbytes, 0, 0.0
        )
        self.prefill.thread.submit(FlushThenNotify(self.target.peer, prompt.number, record, time.monotonic()))
        assert self.prefill.expect(FlushDone).ok
        arrived = self.target.expect(NoticeArrived)
        assert arrived.notice.lease_id == prompt.number
        if arrived.damage:
            self.damaged.append(prompt.number)


def _entry(prompt: Prompt, start: int, end: int) -> BatchEntry:
    length = len(prompt.token_ids)
    sample = SampleSpec(GREEDY, length, 0) if end == length else None
    return BatchEntry(AttemptId(prompt.number), Phase.PREFILL, prompt.token_ids[start:end], start, prompt.source, sample)
