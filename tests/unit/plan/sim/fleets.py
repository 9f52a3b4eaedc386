"""Small simulations for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pd_serve.config import Config
from pd_serve.plan.sim.fleet import FleetSpec, Group, LinkSpec
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.plan.workload import PlannedRequest
from pd_serve.protocol.link import Role

MODEL = WorkerModel(
    name="test",
    num_gpus=1,
    prefill=(0.004, 5e-5, 1e-10),
    decode=(0.006, 2e-8, 4e-5),
    num_kv_tokens=200_000,
    kv_bytes_per_token=131_072,
    num_layers=32,
    handover_s=0.003,
)
FAST = LinkSpec(25e9, 1e-4)
Lengths = Callable[[random.Random], int]


def model_of(**changes: Any) -> WorkerModel:
    return msgspec.structs.replace(MODEL, **changes)


def fleet(num_prefill: int, num_decode: int, model: WorkerModel = MODEL, **more: Any) -> FleetSpec:
    groups = (Group(Role.PREFILL, num_prefill, model), Group(Role.DECODE, num_decode, model))
    return FleetSpec(tuple(group for group in groups if group.count), more.pop("link", FAST), **more)


def colocated(count: int, model: WorkerModel = MODEL, **more: Any) -> FleetSpec:
    return FleetSpec((Group(Role.BOTH, count, model),), FAST, **more)


def config_of(**sections: dict[str, Any]) -> Config:
    """Defaults but for these fields of these sections."""
    config = Config()
    return config.model_copy(update={name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()})


def around(mean: int) -> Lengths:
    """Exponential, at least 1."""
    return lambda rng: max(1, round(rng.expovariate(1 / mean)))


def exactly(number: int) -> Lengths:
    return lambda rng: number


def poisson(rate: float, number: int, prompt: Lengths, output: Lengths, seed: int = 0, begin_s: float = 0.0) -> Iterator[PlannedRequest]:
    rng = random.Random(seed)
    at_s = begin_s
    for _ in range(number):
        yield PlannedRequest(at_s, prompt(rng), output(rng))
        at_s += rng.expovariate(rate)


def talks(rate: float, number: int, num_turns: int = 5, block_tokens: int = 64, seed: int = 0) -> Iterator[PlannedRequest]:
    """Conversations: each turn's prompt is the one before and as much again."""
    rng = random.Random(seed)
    turns: list[PlannedRequest] = []
    at_s = 0.0
    for talk in range(number):
        length, when = 0, at_s
        for _ in range(num_turns):
            length += rng.randrange(100, 600)
            keys = tuple(hash((seed, talk, place)) & (1 << 64) - 1 for place in range(-(-length // block_tokens)))
            turns.append(PlannedRequest(when, length, rng.randrange(10, 100), keys, block_tokens))
            when += rng.expovariate(1 / 5.0) + 2.0
        at_s += rng.expovariate(rate)
    return iter(sorted(turns, key=lambda request: request.at_s))
