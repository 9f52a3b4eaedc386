"""The KV that decode holds after a push is, byte for byte in every (layer, block), what prefill computed, and what decode would have.

Two engines over two ucx transports in one process: real pools, real threads, block tables that share no order.
"""

from __future__ import annotations

import json
import queue
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config, EngineConfig, KVConfig, ModelConfig
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.runner import ModelRunner
from pd_serve.errors import TransportUnavailableError
from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.kv.layout import KVLayout
from pd_serve.kv.transfer import plan_ranges, write_ranges
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import PeerJoined, WriteWindow
from pd_serve.transport.registry import transport_factory
from tests.accuracy.driver import GREEDY
from tests.transport_nodes import peer_id, settings_for
from workers.events import AddPeer, FlushThenNotify, NoticeArrived, OpenWindow, PushPlan, TransportReported, WindowOpened
from workers.transport_commands import AllocatePool, BeginStep, LayerReady, StepEnded, TransportOutput
from workers.transport_thread import TransportThread

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 133)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
UNTOUCHED = 0x5A
"""What every byte of decode's pool is before."""


@dataclass(frozen=True)
class Prompt:
    number: int
    token_ids: tuple[int, ...]
    source: tuple[int, ...]
    """Blocks on prefill."""
    target: tuple[int, ...]
    """Blocks on decode."""
    own: tuple[int, ...]
    """Blocks on decode in which it computes the same prompt itself."""


class Rank:
    """An engine on this thread, over the pool of a transport on its own."""

    def __init__(self, name: str, folder: Path, dtype: str, num_blocks: int) -> None:
        config = Config(
            model=ModelConfig.model_validate({"dtype": dtype, "load_format": "random"}),
            kv=KVConfig(block_size=BLOCK, num_blocks=num_blocks),
            engine=EngineConfig(device="cpu"),
        )
        plan = plan_engine(folder, config)
        self.peer = peer_id(name)
        self.outputs: queue.Queue[TransportOutput] = queue.Queue()
        self.thread = TransportThread(transport_factory("ucx"), settings_for(self.peer, "shm"), self.outputs.put)
        self.ready = self.thread.start(AllocatePool(plan.layout.pool_nbytes), 10.0)
        assert self.ready.region.buffer is not None
        self.runner: ModelRunner[Any] = load_runner(plan, self.ready.region.buffer, MonotonicClock())
        torch.frombuffer(self.ready.region.buffer, dtype=torch.uint8)[: plan.layout.pool_nbytes] = UNTOUCHED

    @property
    def layout(self) -> KVLayout:
        return self.runner.cache.layout

    def expect(self, kind: type[TransportOutput]) -> Any:
        """The next output of that kind; what comes before it is passed over."""
        while not isinstance(output := self.outputs.get(timeout=10.0), kind):
            pass
        return output

    def block(self, layer: int, block: int, num_tokens: int) -> Tensor:
        """Bytes of its first tokens' keys and values."""
        halves = self.runner.cache.layer(layer).slab[block, :, :num_tokens]
        return halves.contiguous().view(torch.uint8)


@pytest.fixture(params=["float32", "bfloat16"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    yield from joined_ranks(tmp_path, CONFIG, request.param)


def joined_ranks(folder: Path, config: dict[str, Any], dtype: str) -> Iterator[tuple[Rank, Rank]]:
    """A prefill and a decode rank that have joined, of the model that `config` describes."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        prefill, decode = Rank("prefill", folder, dtype, 40), Rank("decode", folder, dtype, 64)
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    for rank, other in ((prefill, decode), (decode, prefill)):
        rank.thread.submit(AddPeer(other.peer, (other.ready.metadata,)))
    for rank in (prefill, decode):
        assert isinstance(rank.expect(TransportReported).event, PeerJoined)
    yield prefill, decode
    for rank in (prefill, decode):
        assert rank.thread.stop(5.0)


def scrambled_prompts(source_blocks: int, target_blocks: int) -> list[Prompt]:
    rng = random.Random(5)
    source, target = rng.sample(range(source_blocks), source_blocks), rng.sample(range(target_blocks), target_blocks)
    prompts = []
    for number, length in enumerate(LENGTHS, 1):
        count = -(-length // BLOCK)
        token_ids = tuple(rng.randrange(3, 256) for _ in range(length))
        prompts.append(Prompt(number, token_ids, tuple(source[:count]), tuple(target[:count]), tuple(target[count : 2 * count])))
        del source[:count], target[: 2 * count]
    return prompts


def entry(prompt: Prompt, blocks: tuple[int, ...], start: int, end: int) -> BatchEntry:
    length = len(prompt.token_ids)
    sample = SampleSpec(GREEDY, length, 0) if end == length else None
    return BatchEntry(AttemptId(prompt.number), Phase.PREFILL, prompt.token_ids[start:end], start, blocks, sample)


def push_in_chunks(prefill: Rank, decode: Rank, prompts: Sequence[Prompt], chunk: int) -> None:
    """All prompts side by side, a chunk of each per step, every layer pushed as soon as it is written."""
    layout = prefill.layout
    leases = {prompt.number: Lease(LeaseId(prompt.number), Epoch(9), decode.peer) for prompt in prompts}
    for prompt in prompts:
        starts, ends = write_ranges(decode.layout, prompt.target, 0, len(prompt.token_ids))
        decode.thread.submit(OpenWindow(WriteWindow(LeaseId(prompt.number), Epoch(9), prefill.peer, starts, ends)))
        decode.expect(WindowOpened)
    for step, start in enumerate(range(0, max(LENGTHS), chunk), 1):
        active = [prompt for prompt in prompts if start < len(prompt.token_ids)]
        spans = [(prompt, start, min(start + chunk, len(prompt.token_ids))) for prompt in active]
        plans = tuple(
            PushPlan(
                attempt_id=AttemptId(prompt.number),
                lease=leases[prompt.number],
                ranges=plan_ranges(layout, prompt.source, prompt.target, begin, end),
                local_layer_stride=layout.layer_nbytes,
                remote_layer_stride=decode.layout.layer_nbytes,
                num_layers=layout.num_layers,
                chunk_index=step - 1,
            )
            for prompt, begin, end in spans
        )
        prefill.thread.submit(BeginStep(step, plans))
        entries = tuple(entry(prompt, prompt.source, begin, end) for prompt, begin, end in spans)
        batch = Batch(step, entries, has_push=True)
        prefill.runner.execute(batch, lambda layer, step=step: prefill.thread.submit(LayerReady(step, layer, time.monotonic())))
        prefill.thread.submit(StepEnded(step))
    for prompt in prompts:
        length = len(prompt.token_ids)
        nbytes = length * layout.bytes_per_token
        record = Completed(
            LeaseId(prompt.number), Epoch(9), AttemptId(prompt.number), 0, 1, 3, None, length, layout.num_layers, nbytes, 0, 0.0
        )
        prefill.thread.submit(FlushThenNotify(decode.peer, prompt.number, record, time.monotonic()))
        arrived = decode.expect(NoticeArrived)
        assert arrived.notice.nbytes == nbytes


def different_blocks(prompts: Sequence[Prompt], one: Rank, other: Rank, tables: tuple[str, str]) -> list[tuple[int, int, int]]:
    """(prompt, layer, logical block) of each block that is not the same, byte for byte, on both."""
    different = []
    for prompt in prompts:
        blocks = zip(getattr(prompt, tables[0]), getattr(prompt, tables[1]), strict=True)
        for index, (left, right) in enumerate(blocks):
            num_tokens = min(BLOCK, len(prompt.token_ids) - index * BLOCK)
            for layer in range(one.layout.num_layers):
                if not torch.equal(one.block(layer, left, num_tokens), other.block(layer, right, num_tokens)):
                    different.append((prompt.number, layer, index))
    return different


@pytest.mark.parametrize("chunk", [7, 64])
def test_every_block_of_every_layer_arrives_as_it_was_computed(ranks: tuple[Rank, Rank], chunk: int) -> None:
    prefill, decode = ranks
    prompts = scrambled_prompts(prefill.layout.num_blocks, decode.layout.num_blocks)
    push_in_chunks(prefill, decode, prompts, chunk)
    assert different_blocks(prompts, prefill, decode, ("source", "target")) == []
    written = {block for prompt in prompts for block in prompt.target}
    for layer in range(decode.layout.num_layers):
        for block in range(decode.layout.num_blocks):
            if block not in written:
                assert bool((decode.block(layer, block, BLOCK) == UNTOUCHED).all()), f"block {block} of layer {layer} is nobody's"
    for prompt in prompts:
        used = len(prompt.token_ids) % BLOCK
        if used:
            rest = decode.runner.cache.layer(0).slab[prompt.target[-1], :, used:].contiguous().view(torch.uint8)
            assert bool((rest == UNTOUCHED).all()), "written beyond the prompt"

    # The same prompts, each whole and alone, computed where they decode.
    for prompt in prompts:
        decode.runner.execute(Batch(1, (entry(prompt, prompt.own, 0, len(prompt.token_ids)),)))
    assert different_blocks(prompts, decode, decode, ("own", "target")) == []

    # A checker never seen failing is not trusted.
    last = prompts[-1]
    decode.runner.cache.layer(2).slab[last.target[3], 1, 5, 0, 0] += 1
    assert different_blocks(prompts, prefill, decode, ("source", "target")) == [(last.number, 2, 3)]
