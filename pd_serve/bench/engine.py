"""`pd-serve bench engine`: steps of the engine alone, without server, scheduler or transport, against what the memory allows.

Arms are ways to compute (engine.cpu_ops off and on); they take turns within each round, and so do reads of a buffer as large as the
weights and on pages like theirs, whose fastest pass is the limit: a decode step reads every weight and the KV of its sequences once.

    decode_s[BATCHxCONTEXT]         one step of BATCH sequences that see CONTEXT tokens: median; .min: fastest
    limit_ratio[BATCHxCONTEXT]      the limit's time over the fastest step's: 1 is as fast as memory can be read
    prefill_tokens_per_s[LENGTH]    a whole prompt of LENGTH tokens in chunks, fastest
    read_bytes_per_s                the limit
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from pd_serve.bench.engine_growth import growth
from pd_serve.bench.engine_steps import decode_batch, prefill_batches
from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineWatch
from pd_serve.bench.progress import Bars
from pd_serve.bench.results import ArmResult, Config, Described, Result, new_result
from pd_serve.clock import MonotonicClock
from pd_serve.config import Config as Settings
from pd_serve.engine.batch import Batch
from pd_serve.model_store import resolve_model

if TYPE_CHECKING:
    from pd_serve.engine.runner import ModelRunner


_STEPS_IN_A_ROW = 4


@dataclass(frozen=True, slots=True)
class EngineOptions:
    settings: Settings
    cpu_ops: tuple[str, ...] = ("off", "auto")
    """One arm each."""
    batches: tuple[int, ...] = (1, 8, 16)
    contexts: tuple[int, ...] = (256,)
    prefill: tuple[int, ...] = (512, 2048)
    rounds: int = 12
    threads: int = 1
    has_growth: bool = False
    """Also what engine_growth.py measures, as an arm of its own."""
    name: str = ""


@dataclass(slots=True)
class _Arm:
    runner: ModelRunner[Any]
    decode_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    prefill_s: dict[int, list[float]] = field(default_factory=dict)


def run_engine(options: EngineOptions, bars: Bars) -> Result:
    """Loads the model once per arm. Raises BenchError for a pool that is too small, ModelError, ConfigError."""
    from pd_serve.engine.loader import load_runner, plan_engine
    from pd_serve.engine.memory_speed import ReadProbe, use_threads
    from pd_serve.engine.native.choice import open_operators
    from pd_serve.engine.parameters import num_parameters

    use_threads(options.threads)
    settings = options.settings
    folder = resolve_model(settings.model.id, settings.model.cache_dir)
    arms: dict[str, _Arm] = {}
    config: Config = {}
    for choice in options.cpu_ops:
        engine = settings.engine.model_copy(update={"cpu_ops": choice, "threads": options.threads})
        plan = plan_engine(folder, settings.model_copy(update={"engine": engine}))
        _check_pool(options, plan.layout.block_size, plan.layout.num_blocks)
        arms[f"cpu_ops={choice}"] = _Arm(load_runner(plan, None, MonotonicClock()))
        config[f"cpu_ops={choice}"] = {f"engine.{key}": value for key, value in engine.model_dump().items()}
    weights_nbytes = num_parameters(plan.info) * plan.dtype.itemsize
    operators = open_operators("auto", plan.layout, plan.dtype, plan.device, settings.model.cache_dir)
    probe, reads = ReadProbe(weights_nbytes, operators), list[float]()
    with MachineWatch() as watch:
        bar = bars.add("engine steps", options.rounds + 1)
        for turn in range(options.rounds + 1):
            _round(options, arms, is_warm_up=turn == 0, between=lambda: reads.append(probe.seconds_per_byte()))
            bar.advance()
        grown = growth(options.cpu_ops[-1], bars) if options.has_growth else {}
    layout = plan.layout
    limits = {
        (batch, context): min(reads) * (weights_nbytes + batch * context * layout.bytes_per_token)
        for batch in options.batches
        for context in options.contexts
    }
    return new_result(
        Described(
            "engine",
            options.name,
            {"model": settings.model.id, "dtype": settings.model.dtype, "threads": options.threads, "rounds": options.rounds},
            config,
        ),
        watch.load,
        {name: ArmResult(_figures(arm, limits, min(reads))) for name, arm in arms.items()} | ({"host": ArmResult(grown)} if grown else {}),
    )


def _round(options: EngineOptions, arms: dict[str, _Arm], *, is_warm_up: bool, between: Callable[[], None]) -> None:
    for batch in options.batches:
        for context in options.contexts:
            for arm in arms.values():
                step = decode_batch(batch, context, arm.runner.cache.layout.block_size)
                # The first one finds the other arm's weights in the caches.
                seconds = [_timed(arm.runner, step) for _ in range(_STEPS_IN_A_ROW)][1:]
                if not is_warm_up:
                    arm.decode_s.setdefault((batch, context), []).extend(seconds)
            for _ in range(_STEPS_IN_A_ROW):
                between()
    for length in options.prefill:
        for arm in arms.values():
            chunk = options.settings.engine.max_batch_tokens
            whole = sum(_timed(arm.runner, batch) for batch in prefill_batches(length, chunk, arm.runner.cache.layout.block_size))
            if not is_warm_up:
                arm.prefill_s.setdefault(length, []).append(whole)


def _timed(runner: ModelRunner[Any], batch: Batch) -> float:
    started_at = time.perf_counter()
    runner.execute(batch)
    return time.perf_counter() - started_at


def _check_pool(options: EngineOptions, block_size: int, num_blocks: int) -> None:
    contexts = [batch * -(-context // block_size) for batch in options.batches for context in options.contexts]
    needed = max([*contexts, *(-(-length // block_size) for length in options.prefill)])
    if needed > num_blocks:
        raise BenchError(f"the KV pool has {num_blocks} blocks, the largest step needs {needed}: set kv.num_blocks or kv.memory_bytes")


def _figures(arm: _Arm, limits: dict[tuple[int, int], float], seconds_per_byte: float) -> dict[str, float]:
    figures = {"read_bytes_per_s": 1 / seconds_per_byte}
    for (batch, context), seconds in arm.decode_s.items():
        case = f"[{batch}x{context}]"
        figures[f"decode_s{case}"] = median(seconds)
        figures[f"decode_s{case}.min"] = min(seconds)
        figures[f"decode_tokens_per_s{case}"] = batch / median(seconds)
        figures[f"limit_ratio{case}"] = limits[batch, context] / min(seconds)
    for length, seconds in arm.prefill_s.items():
        figures[f"prefill_tokens_per_s[{length}]"] = length / min(seconds)
    return figures
