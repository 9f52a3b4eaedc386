"""Captured decode steps compute what eager ones do; all but the capture itself, for which recorded_graph.py stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_serve.clock import VirtualClock
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.engine.dtypes import torch_dtype
from pd_serve.engine.families.registry import describe
from pd_serve.engine.graphs import GraphedDecode, GraphSettings, buckets_up_to, can_be_captured
from pd_serve.engine.kv_cache import open_kv_cache
from pd_serve.engine.models import registry
from pd_serve.engine.models.settings import BuildSettings
from pd_serve.engine.parallel import SingleRank
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.sampler import Sampler
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.engine.weights import RandomWeights
from pd_serve.errors import EngineError
from pd_serve.ids import AttemptId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.sampling import SamplingParams
from tests.accuracy.driver import Way, generate
from tests.unit.engine.attention.paged_kernel import varlen_on_cpu
from tests.unit.engine.model_folders import write_config
from tests.unit.engine.random_models import MODELS
from tests.unit.engine.recorded_graph import RecordingCapturer

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS, MAX_LEN, MAX_ROWS = 16, 24, 64, 8
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
FAMILIES = ("llama-biased", "qwen3", "gemma3")


@dataclass
class Engine:
    runner: ModelRunner[Any]
    capturer: RecordingCapturer
    graphs: GraphedDecode[Any] | None


@pytest.fixture(autouse=True)
def _paged_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "attention_for", varlen_on_cpu)


def make(folder: Path, *, has_graphs: bool, max_rows: int = MAX_ROWS, wrap: Any = None) -> Engine:
    info = describe(folder, has_weights=False)
    layout = KVLayout(info.num_layers, info.num_kv_heads, info.head_dim, BLOCK, NUM_BLOCKS, KVDtype.FLOAT32, 2)
    with torch.inference_mode():
        settings = BuildSettings(BLOCK, MAX_LEN, torch.float32, CPU, SingleRank())
        model, attention = registry.build_model(info, RandomWeights(3, torch.float32, CPU), settings)
    cache = open_kv_cache(layout, None, CPU, torch_dtype("float32"))
    runner = ModelRunner(model, attention, cache, Sampler(()), CPU, VirtualClock())
    capturer = RecordingCapturer()
    if not has_graphs:
        return Engine(runner, capturer, None)
    graph_settings = GraphSettings(max_rows, NUM_BLOCKS - 1, MAX_LEN, CPU)
    graphs = GraphedDecode(wrap(model) if wrap else model, attention, cache, capturer, graph_settings)  # type: ignore[arg-type]
    graphs.warm_up()
    runner.use_graphs(graphs)
    return Engine(runner, capturer, graphs)


def decode(attempt: int, token_ids: tuple[int, ...], start: int, table: tuple[int, ...], *, sampled: bool = True) -> BatchEntry:
    spec = SampleSpec(GREEDY, start + len(token_ids), 0) if sampled else None
    return BatchEntry(AttemptId(attempt), Phase.DECODE, token_ids, start, table, spec)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_eager_steps_to_the_bit(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, **MODELS[name])
    prompts = [list(range(3, 3 + length)) for length in (1, 16, 17, 40, 5)]
    eager, graphed = (make(folder, has_graphs=has_graphs) for has_graphs in (False, True))
    way = Way(block_seed=None, batch=4)
    tokens, expected = generate(eager.runner, prompts, 7, way)
    other_tokens, logits = generate(graphed.runner, prompts, 7, way)
    assert other_tokens == tokens
    assert all(torch.equal(got, wanted) for got, wanted in zip(logits, expected, strict=True))
    assert graphed.capturer.num_captured == len(buckets_up_to(MAX_ROWS))
    assert graphed.capturer.num_replayed > 5


def test_a_step_takes_the_smallest_bucket_that_holds_it(tmp_path: Path) -> None:
    assert buckets_up_to(1) == buckets_up_to(2) == (2,)
    assert buckets_up_to(8) == (2, 4, 8)
    assert buckets_up_to(16) == (2, 4, 8, 16)
    assert buckets_up_to(100) == (2, 4, 8, 16, 32, 64, 96, 100)
    graphs = make(write_config(tmp_path), has_graphs=True, max_rows=7).graphs
    assert graphs is not None
    assert [graphs.bucket_for(rows) for rows in (1, 2, 3, 4, 5, 7, 8)] == [2, 2, 4, 4, 7, 7, None]


def test_idle_rows_touch_no_block_but_their_own(tmp_path: Path) -> None:
    engine = make(write_config(tmp_path), has_graphs=True)
    cache = engine.runner.cache
    for layer in range(cache.layout.num_layers):
        cache.layer(layer).slab.fill_(7.0)
    tables = ((3, 9), (5, 2), (11, 0))
    engine.runner.execute(Batch(1, tuple(decode(index, (4 + index,), 17, table) for index, table in enumerate(tables))))
    assert engine.capturer.num_replayed == 1
    for layer in range(cache.layout.num_layers):
        slab = cache.layer(layer).slab
        written = {(block, slot) for block in range(NUM_BLOCKS) for slot in range(BLOCK) if slab[block, :, slot].ne(7.0).any()}
        assert written == {(9, 1), (2, 1), (0, 1), (NUM_BLOCKS - 1, 0)}


def test_idle_rows_of_a_larger_step_before_do_not_come_back(tmp_path: Path) -> None:
    """A bucket's memory holds what the last step left there: fewer rows must not compute the old ones again."""
    engine = make(write_config(tmp_path), has_graphs=True)
    cache = engine.runner.cache
    engine.runner.execute(Batch(1, tuple(decode(index, (4,), 17, (2 * index, 2 * index + 1)) for index in range(4))))
    fourth = cache.rows(torch.arange(6 * BLOCK, 8 * BLOCK))
    cache.write(0, fourth, torch.full((2 * BLOCK, 2 * cache.layout.num_kv_heads, cache.layout.head_dim), 7.0))
    engine.runner.execute(Batch(2, tuple(decode(index, (9,), 18, (2 * index, 2 * index + 1)) for index in range(3))))
    assert engine.capturer.num_replayed == 2
    assert cache.read(0, fourth).eq(7.0).all()


def test_rows_that_are_not_sampled_and_tokens_computed_again(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    entries = (decode(1, (5, 6, 7), 2, (0,)), decode(2, (8,), 9, (1,), sampled=False), decode(3, (9,), 1, (2,)))
    eager, graphed = (make(folder, has_graphs=has_graphs) for has_graphs in (False, True))
    results = [engine.runner.execute(Batch(1, entries)).sampled for engine in (eager, graphed)]
    assert results[0] == results[1]
    assert [token.attempt_id for token in results[1]] == [1, 3]
    assert graphed.capturer.num_replayed == 1
    nothing = graphed.runner.execute(Batch(2, (decode(2, (8,), 10, (1,), sampled=False),)))
    assert nothing.sampled == ()
    with torch.inference_mode():
        inputs = build_step_inputs(entries, BLOCK, CPU)
        assert torch.equal(graphed.runner.forward(inputs), eager.runner.forward(inputs))


def test_prompts_mixed_steps_and_too_many_rows_are_eager(tmp_path: Path) -> None:
    engine = make(write_config(tmp_path), has_graphs=True, max_rows=2)
    prompt = BatchEntry(AttemptId(9), Phase.PREFILL, (3, 4, 5), 0, (4,), SampleSpec(GREEDY, 3, 0))
    one_token = BatchEntry(AttemptId(9), Phase.PREFILL, (3,), 0, (4,), SampleSpec(GREEDY, 1, 0))
    rows = tuple(decode(index, (5,), 3, (index,)) for index in range(3))
    for entries in ((prompt,), (one_token,), (rows[0], prompt), rows):
        assert len(engine.runner.execute(Batch(1, entries)).sampled) == len(entries)
    assert engine.capturer.num_replayed == 0
    engine.runner.execute(Batch(2, rows[:2]))
    assert engine.capturer.num_replayed == 1


def test_on_layer_is_never_called_in_a_captured_step(tmp_path: Path) -> None:
    engine = make(write_config(tmp_path), has_graphs=True)
    layers: list[int] = []

    def on_layer(layer: int) -> None:
        assert not engine.capturer.is_recording
        layers.append(layer)

    entries = (decode(1, (5,), 3, (0,)), decode(2, (6,), 3, (1,)))
    pushed = engine.runner.execute(Batch(1, entries, has_push=True), on_layer)
    assert layers == [0, 1]
    assert engine.capturer.num_replayed == 0
    silent = engine.runner.execute(Batch(1, entries), on_layer)
    assert (layers, engine.capturer.num_replayed) == ([0, 1], 1)
    assert silent.sampled == pushed.sampled


def test_a_hook_inside_a_captured_step_would_be_seen(tmp_path: Path) -> None:
    """Planted: a model that calls its hook while it is captured."""

    @dataclass
    class Calling:
        model: Any

        def forward(self, inputs: Any, cache: Any, plan: Any, on_layer: Any) -> torch.Tensor:
            return self.model.forward(inputs, cache, plan, seen.append)  # type: ignore[no-any-return]

    seen: list[int] = []
    engine = make(write_config(tmp_path), has_graphs=True, wrap=Calling)
    assert len(seen) == 2 * 2 * engine.capturer.num_captured, "once in the run before, once in the capture, per layer"
    seen.clear()
    engine.runner.execute(Batch(1, (decode(1, (5,), 3, (0,)),)))
    assert seen == [], "a replay calls nobody: a hook in a graph would never fire"


def test_inputs_made_on_the_host_inside_a_step_would_be_seen(tmp_path: Path) -> None:
    """Planted: a model that takes its positions from Python numbers, which a graph keeps as they were."""

    @dataclass
    class Frozen:
        model: Any

        def forward(self, inputs: Any, cache: Any, plan: Any, on_layer: Any) -> torch.Tensor:
            inputs.positions.copy_(torch.tensor(inputs.positions.tolist()))
            return self.model.forward(inputs, cache, plan, on_layer)  # type: ignore[no-any-return]

    folder = write_config(tmp_path)
    entries = (decode(1, (5, 6, 7), 20, (0, 1)),)
    results = []
    for engine in (make(folder, has_graphs=False), make(folder, has_graphs=True), make(folder, has_graphs=True, wrap=Frozen)):
        with torch.inference_mode():
            results.append(engine.runner.forward(build_step_inputs(entries, BLOCK, CPU)).clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_step_that_waits_for_the_device_cannot_be_captured(tmp_path: Path) -> None:
    @dataclass
    class Asking:
        model: Any

        def forward(self, inputs: Any, cache: Any, plan: Any, on_layer: Any) -> torch.Tensor:
            inputs.positions.nonzero()
            return self.model.forward(inputs, cache, plan, on_layer)  # type: ignore[no-any-return]

    with pytest.raises(EngineError, match=r"engine\.cuda_graphs = false"):
        make(write_config(tmp_path), has_graphs=True, wrap=Asking)


def test_only_models_that_ask_the_host_nothing_are_captured(tmp_path: Path) -> None:
    captured = {name for name in MODELS if can_be_captured(describe(write_config(tmp_path / name, **MODELS[name]), has_weights=False), 1)}
    assert captured == set(MODELS) - {"mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"}
    assert not can_be_captured(describe(tmp_path / "llama", has_weights=False), 2)
