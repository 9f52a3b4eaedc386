"""`pd-serve bench engine --growth`: what a step costs besides arithmetic, and how that grows.

host_s[batch=N]          a step of N decoding sequences of a model of almost no arithmetic: Python, and calling torch's operators
host_per_sequence_s      slope over N of the same, from the smallest batch to the largest
host_per_layer_s         slope over layers, at the smallest batch
schedule_s[batch=N]      Scheduler.schedule and complete of such a step
long_prompt_s.WHAT       of a prompt of 100,000 tokens: scheduling and completing all its chunks, matching its prefix, then scheduling a
                         step that decodes it, and building that step's inputs
long_prompt_ratio.WHAT   the same over a prompt of a tenth of the length: 10 where it is linear
queue_s[N]               schedule and complete of one step with N prompts queued behind it
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_serve.bench.engine_steps import decode_batch
from pd_serve.bench.progress import Bars
from pd_serve.clock import MonotonicClock
from pd_serve.config import Config, EngineConfig, KVConfig, ModelConfig
from pd_serve.engine.batch import SampledToken, StepResult
from pd_serve.engine.scheduler import Scheduler, SchedulerSettings
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.ids import AttemptId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pd_serve.engine.runner import ModelRunner

BLOCK_SIZE = 16
LONG = 100_000
BATCHES = (1, 16, 64, 256)
QUEUES = (100, 10_000)
_LAYERS = (4, 16)
_CONTEXT = 64
_REPEATS = 15
_PARAMS = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


def growth(cpu_ops: str, bars: Bars) -> dict[str, float]:
    """`cpu_ops`: as in EngineConfig, for what is computed at all."""
    figures: dict[str, float] = {}
    bar = bars.add("growth", 4)
    with tempfile.TemporaryDirectory() as folder:
        figures |= _host(Path(folder), cpu_ops)
    bar.advance()
    for batch in BATCHES:
        figures[f"schedule_s[{batch}]"] = _scheduling(batch)
    bar.advance()
    figures |= _long_prompt()
    bar.advance()
    for count in QUEUES:
        figures[f"queue_s[{count}]"] = _queue(count)
    bar.advance()
    return figures


def _host(folder: Path, cpu_ops: str) -> dict[str, float]:
    seconds = {layers: {batch: _host_step(_runner(folder, layers, cpu_ops), batch) for batch in BATCHES} for layers in _LAYERS}
    few, many = _LAYERS
    figures = {f"host_s[{batch}]": value for batch, value in seconds[many].items()}
    figures["host_per_sequence_s"] = (seconds[many][BATCHES[-1]] - seconds[many][BATCHES[0]]) / (BATCHES[-1] - BATCHES[0])
    figures["host_per_layer_s"] = (seconds[many][BATCHES[0]] - seconds[few][BATCHES[0]]) / (many - few)
    return figures


def _host_step(runner: ModelRunner[Any], batch: int) -> float:
    step = decode_batch(batch, _CONTEXT, BLOCK_SIZE)
    return _fastest(lambda: runner.execute(step))


def _runner(folder: Path, num_layers: int, cpu_ops: str) -> ModelRunner[Any]:
    """A model that hardly computes anything."""
    from pd_serve.engine.loader import load_runner, plan_engine

    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = Config(
        model=ModelConfig(load_format="random"),
        kv=KVConfig(block_size=BLOCK_SIZE, num_blocks=BATCHES[-1] * _CONTEXT // BLOCK_SIZE),
        engine=EngineConfig.model_validate({"device": "cpu", "cpu_ops": cpu_ops}),
    )
    return load_runner(plan_engine(folder, settings), None, MonotonicClock())


def _scheduling(batch: int) -> float:
    _, scheduler = _scheduler(batch * 16)
    for index in range(batch):
        scheduler.add(_prompt(index, 16))
    while any(not sequence.prompt_done for sequence in scheduler):
        _step(scheduler)
    return _fastest(lambda: _step(scheduler))


def _long_prompt() -> dict[str, float]:
    few, many = _long_parts(LONG // 10), _long_parts(LONG)
    figures = {f"long_prompt_s.{what}": value for what, value in many.items()}
    return figures | {f"long_prompt_ratio.{what}": value / few[what] for what, value in many.items()}


def _long_parts(length: int) -> dict[str, float]:
    from pd_serve.engine.loader import choose_device
    from pd_serve.engine.step_inputs import build_step_inputs

    pool, scheduler = _scheduler(2 * (length // BLOCK_SIZE) + 64)
    sequence = _prompt(0, length)
    scheduler.add(sequence)

    def run_prompt() -> None:
        while not sequence.prompt_done:
            _step(scheduler)

    parts = {"chunks": _timed(run_prompt)}
    entry = replace(decode_batch(1, length, BLOCK_SIZE).entries[0], block_table=tuple(sequence.block_table))
    device = choose_device("cpu")
    parts["match"] = _fastest(lambda: pool.release(pool.match_prefix(sequence.token_ids)))
    parts["decode"] = _fastest(lambda: _step(scheduler))
    parts["inputs"] = _fastest(lambda: build_step_inputs((entry,), BLOCK_SIZE, device))
    return parts


def _queue(count: int) -> float:
    """Prompts of one block, of which each step takes a few."""
    _, scheduler = _scheduler(count * 4)
    for index in range(count):
        scheduler.add(_prompt(index, BLOCK_SIZE))
    return _fastest(lambda: _step(scheduler), 3)


def _scheduler(num_blocks: int) -> tuple[BlockPool, Scheduler]:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return pool, Scheduler(SchedulerSettings(512, 256, 0, frozenset(), 2 * LONG), pool)


def _prompt(index: int, length: int) -> Sequence:
    tokens = [(index * 7919 + position * 31) % 50_000 for position in range(length)]
    return Sequence(AttemptId(index), SequenceKind.LOCAL, tokens, length, _PARAMS)


def _step(scheduler: Scheduler) -> None:
    """Schedule and complete, as if every sampled token were 7."""
    batch = scheduler.schedule(0).batch
    assert batch is not None, "nothing to compute"
    sampled = tuple(SampledToken(entry.attempt_id, 7, None) for entry in batch.entries if entry.sample is not None)
    scheduler.complete(StepResult(0, sampled, 0.0, 0.0))


def _fastest(function: Callable[[], object], repeats: int = _REPEATS) -> float:
    return min(_timed(function) for _ in range(repeats))


def _timed(function: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    function()
    return time.perf_counter() - started_at
