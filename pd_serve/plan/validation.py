"""How far a plan may be trusted: what `bench load` or `bench trace` measured, and the simulator's word on the very same requests.

The simulator gets the moments at which they were sent, their lengths and prompts, the router's settings, and worker models fitted on the
same machine. It hears nothing of what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.results import ArmResult, Result, read_records, read_result
from pd_serve.bench.results import Config as ProcessSettings
from pd_serve.bench.statistics import load_figures
from pd_serve.config import Config
from pd_serve.config_sources import Sources, load_config
from pd_serve.plan.errors import PlanError
from pd_serve.plan.sim.fleet import simulate
from pd_serve.plan.sim.network import LinkSpec
from pd_serve.plan.sim.spec import FleetSpec, Group
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.plan.workload import PlannedRequest, chained
from pd_serve.protocol.link import Role

FIGURES = ("ttft_s.p50", "ttft_s.p99", "itl_s.p50", "itl_s.p99")
TARGET = 0.20
"""Relative error up to which a figure counts as predicted."""
_SECTIONS = ("kv", "router", "routing", "overload", "breaker", "roles")
"""Settings by which the simulator decides."""
_TABLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.BOTH}


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure."""

    load: str
    """Name of the arm of the result."""
    figure: str
    measured: float
    predicted: float
    """Median of the runs with different seeds."""
    low: float
    high: float
    """Least and most of them: what chance alone makes of so many requests."""

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= TARGET


@dataclass(frozen=True, slots=True)
class Fitted:
    """What `bench fit` wrote."""

    models: Mapping[Role, WorkerModel]
    link: LinkSpec


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm of a result."""

    name: str
    records: tuple[RequestRecord, ...]
    groups: tuple[tuple[Role, int], ...]
    """Workers that there were."""
    config: Config


def read_fitted(path: Path) -> Fitted:
    """`path`: the result of `bench fit`, its worker models beside it. Raises PlanError, BenchError."""
    result = read_result(path)
    if result.kind != "fit":
        raise PlanError(f"{path} is a result of bench {result.kind}, not of bench fit")
    models: dict[Role, WorkerModel] = {}
    for role in (Role.PREFILL, Role.DECODE, Role.BOTH):
        file = path.with_name(f"{path.stem}.{role.value}.json")
        if file.exists():
            models[role] = WorkerModel.read(file)
    if not models:
        raise PlanError(f"no worker models beside {path}: expected such as {path.stem}.prefill.json")
    figures = next(iter(result.arms.values())).figures
    return Fitted(models, LinkSpec(figures.get("bandwidth_bytes_per_s") or _NO_LINK))


_NO_LINK = 1e12
"""Bytes/s where nothing is sent."""


def read_measured(path: Path) -> Iterator[Measured]:
    """Each arm that kept its records. Raises PlanError, BenchError."""
    result = read_result(path)
    if result.kind not in ("load", "trace"):
        raise PlanError(f"{path} is a result of bench {result.kind}: expected one of load or trace")
    for label, arm in result.arms.items():
        records = read_records(path, arm)
        if records:
            name = f"{path.stem} {label}" if len(result.arms) > 1 else path.stem
            yield Measured(name, tuple(records), _groups(result, arm, path), _config(result, arm))


def requests_of(records: Iterable[RequestRecord], plans: Sequence[RequestPlan], block_tokens: int) -> Iterator[PlannedRequest]:
    """As they were sent; their prompts' keys by their plans', where there are any. Answers are as long as they were."""
    prompts = {plan.index: plan.prompt for plan in plans}
    for record in sorted(records, key=lambda record: record.sent_s):
        keys = block_keys(prompts.get(record.index, ()), block_tokens)
        yield PlannedRequest(record.sent_s, max(1, record.num_prompt_tokens), max(1, record.num_output_tokens), keys, block_tokens)


def block_keys(prompt: tuple[int, ...] | str, block_tokens: int) -> tuple[int, ...]:
    """Of token ids, every block that the prompt fills. Text is taken to share nothing."""
    keys: list[int] = []
    if not isinstance(prompt, str):
        for begin in range(0, len(prompt) - block_tokens + 1, block_tokens):
            keys.append(chained(keys[-1] if keys else 0, hash(prompt[begin : begin + block_tokens])))
    return tuple(keys)


def validate(
    measured: Measured, fitted: Fitted, plans: Sequence[RequestPlan] = (), num_seeds: int = 9, progress: Callable[[], None] = lambda: None
) -> tuple[Predicted, ...]:
    """Simulates what was measured, with so many seeds. Raises PlanError, ConfigError."""
    missing = [role.value for role, _ in measured.groups if role not in fitted.models]
    if missing:
        raise PlanError(f"{measured.name} had {missing[0]} workers, of which nothing was fitted")
    groups = tuple(Group(role, count, fitted.models[role]) for role, count in measured.groups)
    spec = FleetSpec(groups, fitted.link, measured.config)
    requests = list(requests_of(measured.records, plans, measured.config.kv.block_size))
    runs: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for seed in range(num_seeds):
        figures = simulate(spec, iter(requests), seed=seed).figures()
        for figure in FIGURES:
            runs[figure].append(figures.get(figure, 0.0))
        progress()
    found = load_figures(measured.records).figures()
    return tuple(
        Predicted(measured.name, figure, found.get(figure, 0.0), median(values), min(values), max(values))
        for figure, values in runs.items()
    )


def _groups(result: Result, arm: ArmResult, path: Path) -> tuple[tuple[Role, int], ...]:
    """By the processes of the arm. Raises PlanError for an endpoint that was there already."""
    processes = [name for name in _processes(result.config, arm) if name != "router"]
    counts = {table: sum(name.startswith(f"{table}-") for name in processes) for table in _TABLES}
    groups = tuple((_TABLES[table], count) for table, count in counts.items() if count)
    if not groups:
        raise PlanError(f"{path} does not say which workers there were: measure a cluster that bench starts, such as --arm ours=1p1d")
    return groups


def _config(result: Result, arm: ArmResult) -> Config:
    """The router's. Raises ConfigError."""
    settings = _processes(result.config, arm)["router"]
    default = Config()
    sets = []
    for key, value in settings.items():
        section, _, name = key.partition(".")
        # A result has lists as text.
        if section in _SECTIONS and not isinstance(getattr(getattr(default, section), name, ()), tuple):
            sets.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return load_config(Sources(sets=tuple(sets)))


def _processes(config: ProcessSettings, arm: ArmResult) -> ProcessSettings:
    """Of the arm, by their names without it."""
    head = f"{arm.parameters.get('arm', '')}/"
    return {name.removeprefix(head): settings for name, settings in config.items() if name.startswith(head)}
