"""Logits are bit-identical whatever the chunk, the batch, the block order, the block size and the garbage in unused memory."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention import cpu
from pd_serve.engine.attention.base import QuerySpan
from pd_serve.engine.attention.gather import Gather
from pd_serve.engine.batch import BatchEntry, Phase, SampleSpec
from pd_serve.engine.kv_cache import KVLayer
from pd_serve.engine.native.build import find_compiler
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.ids import AttemptId
from tests.accuracy import driver
from tests.accuracy.driver import GREEDY, Way, generate, make_runner

NUM_TOKENS = 4
HAS_COMPILER = find_compiler() is not None
CPU_OPS = ["off", pytest.param("on", marks=pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler"))]
BASE = Way()
WAYS = {
    "chunks of 64": Way(chunk=64),
    "one at a time": Way(batch=1),
    "chunks of 7, three at a time, shuffled": Way(chunk=7, batch=3, block_seed=6),
}
# Lengths around the edges of tiles (64) and of the attention kernel's own key blocks (512).
LENGTHS = (1, 8, 64, 65, 257, 520)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's matrix shapes with random weights and few layers: kernels choose their ways by shape."""
    path = tmp_path_factory.mktemp("wide")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1024) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cpu_ops", CPU_OPS)
def test_logits_do_not_depend_on_the_way(cpu_ops: str, dtype: str, folder: Path, prompts: list[list[int]]) -> None:
    runner = make_runner(folder, dtype, load_format="random", cpu_ops=cpu_ops)
    _, expected = generate(runner, prompts, NUM_TOKENS, BASE)
    for name, way in WAYS.items():
        _, logits = generate(runner, prompts, NUM_TOKENS, way)
        different = [LENGTHS[i] for i in range(len(prompts)) if not torch.equal(logits[i], expected[i])]
        assert not different, f"{dtype}, {name}: prompts of {different} tokens differ"


@pytest.mark.parametrize("block_size", [1, 48, 256])
@pytest.mark.parametrize("cpu_ops", CPU_OPS)
def test_logits_do_not_depend_on_the_block_size(cpu_ops: str, block_size: int, folder: Path, prompts: list[list[int]]) -> None:
    _, expected = generate(make_runner(folder, "bfloat16", load_format="random", cpu_ops=cpu_ops), prompts, NUM_TOKENS, BASE)
    num_blocks = 3000 // block_size + 8
    runner = make_runner(folder, "bfloat16", block_size=block_size, num_blocks=num_blocks, load_format="random", cpu_ops=cpu_ops)
    _, logits = generate(runner, prompts, NUM_TOKENS, Way(chunk=100, batch=3, block_seed=9))
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompts_kv_is_the_same_bits_with_compiled_operators_and_without(dtype: str, folder: Path, prompts: list[list[int]]) -> None:
    """So that a prefill worker that has them serves a decode worker that has not, and the other way round."""
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    pools, logits = [], []
    for cpu_ops in ("off", "on"):
        runner = make_runner(folder, dtype, load_format="random", cpu_ops=cpu_ops)
        logits.append(generate(runner, prompts, 1, Way(chunk=100))[1])
        pools.append(runner.cache.region.clone())
    assert torch.equal(pools[0], pools[1])
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cpu_ops", CPU_OPS)
def test_demo_logits_do_not_depend_on_the_way(cpu_ops: str, dtype: str, demo_folder: Path) -> None:
    runner = make_runner(demo_folder, dtype, cpu_ops=cpu_ops)
    rng = random.Random(1)
    prompts = [[rng.randrange(49152) for _ in range(length)] for length in (5, 70)]
    tokens, expected = generate(runner, prompts, NUM_TOKENS, BASE)
    for way in (Way(chunk=7, block_seed=3), Way(chunk=64, batch=1)):
        other_tokens, logits = generate(runner, prompts, NUM_TOKENS, way)
        assert other_tokens == tokens
        assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True)), way


# The historic mistakes, planted one by one. A kernel whose result depends on the shapes it sees (as real ones do, on some machines) must
# leave the comparison above undisturbed, and must be caught by it once a mistake lets shapes depend on the batch or the chunk.


@pytest.fixture
def shape_sensitive_runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner[Any]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, **options)
        return out + 1e-3 * key.shape[2] + 1e-2 * query.shape[2]

    monkeypatch.setattr(cpu, "F", SimpleNamespace(scaled_dot_product_attention=attention))
    return make_runner(folder, "float32", load_format="random")


SHORT_LENGTHS = (1, 8, 65, 130)
OTHER_WAY = Way(chunk=7, batch=2)


def test_shapes_seen_by_kernels_depend_on_the_sequence_alone(shape_sensitive_runner: ModelRunner[Any]) -> None:
    assert _are_equal_both_ways(shape_sensitive_runner)


def test_padding_to_the_batch_maximum_is_caught(shape_sensitive_runner: ModelRunner[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cpu.CpuAttention.plan

    def plan_padded(self: cpu.CpuAttention, spans: Sequence[QuerySpan]) -> cpu.CpuPlan:
        longest = max(span.context_len for span in spans)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "_round_up", lambda value, multiple: -(-longest // multiple) * multiple)
            return plan(self, spans)

    tables = (tuple(range(8)), tuple(range(8, 16)))
    decode_only = [
        BatchEntry(AttemptId(index), Phase.DECODE, (5,), start, table, SampleSpec(GREEDY, start + 1, 0))
        for index, (start, table) in enumerate(zip((3, 100), tables, strict=True))
    ]
    alone = _logits(shape_sensitive_runner, decode_only[:1])
    assert torch.equal(_logits(shape_sensitive_runner, decode_only)[:1], alone)
    monkeypatch.setattr(cpu.CpuAttention, "plan", plan_padded)
    assert not torch.equal(_logits(shape_sensitive_runner, decode_only)[:1], alone)


def test_routing_by_query_count_is_caught(shape_sensitive_runner: ModelRunner[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def route_by_count(index: int, run: Any, chunk: int) -> BatchEntry:
        entry = original(index, run, chunk)
        return replace(entry, phase=Phase.DECODE) if len(entry.token_ids) == 1 else entry

    original = driver._entry
    monkeypatch.setattr(driver, "_entry", route_by_count)
    assert not _are_equal_both_ways(shape_sensitive_runner)


def test_garbage_that_is_not_blanked_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_without_blanking(self: Gather, layer: KVLayer) -> None:
        layer.gather(self.sources, self.target)

    monkeypatch.setattr(Gather, "run", run_without_blanking)
    runner = make_runner(folder, "float32", load_format="random")
    _, logits = generate(runner, [[5, 6, 7]], 2, BASE)
    assert logits[0].isnan().any()


def _are_equal_both_ways(runner: ModelRunner[Any]) -> bool:
    prompts = [list(range(1, length + 1)) for length in SHORT_LENGTHS]
    _, expected = generate(runner, prompts, NUM_TOKENS, BASE)
    _, logits = generate(runner, prompts, NUM_TOKENS, OTHER_WAY)
    return all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))


def _logits(runner: ModelRunner[Any], entries: Sequence[BatchEntry]) -> Tensor:
    with torch.inference_mode():
        return runner.forward(build_step_inputs(entries, runner.cache.layout.block_size, torch.device("cpu")))
