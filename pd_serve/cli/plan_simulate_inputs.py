"""What `pd-serve plan simulate` was given, made into a scenario and a question. Raises PlanError and ConfigError for what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pd_serve.bench.statistics import Slo
from pd_serve.cli.bench_options import numbers
from pd_serve.config_sources import Sources, load_config
from pd_serve.plan.candidates import CHUNK_BUDGETS, Candidate, colocated, disaggregated
from pd_serve.plan.errors import PlanError
from pd_serve.plan.hardware import accelerator, link
from pd_serve.plan.load import Burst, Load
from pd_serve.plan.modelled import modelled
from pd_serve.plan.models import model_shape
from pd_serve.plan.published import ALIASES, find_published
from pd_serve.plan.scenario import Outage, Scenario, Wire
from pd_serve.plan.study import Models, Question
from pd_serve.plan.worker_model import WorkerModel

_ROLES = ("prefill", "decode", "colocated")
_SYNTHETIC_REQUESTS = 2000
_LONGEST_S = 3e5
"""Of the virtual clock, which is looked at every second."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    files: tuple[str, ...]
    """FILE or ROLE=FILE."""
    model: str
    gpu: str
    tp: str
    efficiency: float
    link: str

    def models(self) -> Models:
        if bool(self.files) == bool(self.gpu):
            raise PlanError(
                "what are the workers? Give --workers FILE (pd-serve bench fit writes it), or --model and --gpu for published peaks"
            )
        found: Mapping[str, list[WorkerModel]] = {role: [] for role in _ROLES}
        if self.gpu:
            shape, gpu = model_shape(self.model or "demo"), accelerator(self.gpu)
            degrees = [int(value) for value in numbers("--tp", self.tp)]
            made = [modelled(shape, gpu, degree, self.efficiency) for degree in degrees]
            return Models(tuple(made), tuple(made), tuple(made))
        for text in self.files:
            role, equals, path = text.partition("=")
            if equals and role not in _ROLES:
                raise PlanError(f"--workers {text}: expected FILE, or one of {', '.join(_ROLES)} before =")
            model = WorkerModel.read(Path(path if equals else text))
            for each in [role] if equals else _ROLES:
                found[each].append(model)
        return Models(*(tuple(found[role]) for role in _ROLES))

    def model_id(self) -> str:
        """For a compose file: what a worker can load."""
        if not self.model:
            raise PlanError("--emit needs --model: which model the workers are to serve")
        path = Path(self.model).expanduser()
        if path.exists():
            return str((path.parent if path.is_file() else path).resolve())
        published = find_published(self.model)
        if self.model in ALIASES or "/" in self.model or published is None:
            return self.model
        return published.hub_id


@dataclass(frozen=True, slots=True)
class Fleet:
    prefill: int
    decode: int
    colocated: int
    chunk_budget: str
    gpus: int
    grid: bool
    failures: tuple[str, ...]

    def budgets(self) -> tuple[int, ...]:
        return tuple(int(value) for value in numbers("--chunk-budget", self.chunk_budget)) or CHUNK_BUDGETS

    def given(self, models: Models) -> Candidate | None:
        """None: it is to be searched."""
        is_split, is_pool = bool(self.prefill or self.decode), bool(self.colocated)
        if is_split + is_pool + bool(self.gpus) != 1:
            raise PlanError("which fleet? Give --prefill and --decode, or --colocated, or --gpus to search")
        if self.gpus:
            if not models.prefill or not models.decode:
                raise PlanError("a search needs worker models of both roles: --workers FILE, or prefill=FILE and decode=FILE")
            return None
        if is_pool:
            budgets = self.budgets() if self.chunk_budget else ()
            return colocated(self.colocated, _only(models.colocated, "colocated"), budgets[0] if len(budgets) == 1 else 0)
        if not (self.prefill and self.decode):
            raise PlanError("prefill apart needs both: --prefill and --decode")
        return disaggregated(self.prefill, self.decode, _only(models.prefill, "prefill"), _only(models.decode, "decode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    trace: Path | None
    speed_up: float
    minutes: float
    max_input: int
    max_output: int
    rate: float
    input: str
    output: str
    burst: str
    turns: int
    think_s: float
    system_tokens: int
    limit: int
    scale: float

    def load(self) -> Load:
        load = Load(
            trace=str(self.trace) if self.trace is not None else "",
            limit=self.limit or (0 if self.trace is not None else _SYNTHETIC_REQUESTS),
            minutes=self.minutes,
            max_input=self.max_input,
            max_output=self.max_output,
            input=self.input,
            output=self.output,
            burst=Burst.parse(self.burst) if self.burst else None,
            turns=self.turns,
            think_s=self.think_s,
            system_tokens=self.system_tokens,
        )
        load.check()
        return load

    def wanted_rate(self, load: Load) -> float:
        """0.0: whatever goodput is found."""
        return self.rate or (self.speed_up * load.natural_rate() if load.trace else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    workers: WorkerOptions
    fleet: Fleet
    load: LoadOptions
    slo_ttft_ms: float
    slo_itl_ms: float
    has_goodput: bool
    seed: int
    settings: Sources

    def scenario(self) -> Scenario:
        slo = Slo(self.slo_ttft_ms / 1e3, self.slo_itl_ms / 1e3)
        if not slo.is_set:
            raise PlanError("goodput is of limits: give --slo-ttft-ms, --slo-itl-ms or both")
        return Scenario(
            load=self.load.load(),
            slo=slo,
            wire=Wire(link(self.workers.link).bytes_per_s),
            config=load_config(self.settings).model_dump_json(),
            seed=self.seed,
            outages=tuple(Outage.parse(text) for text in self.fleet.failures),
        )

    def question(self, scenario: Scenario) -> Question:
        rate = self.load.wanted_rate(scenario.load)
        if not rate and not self.has_goodput:
            raise PlanError("--one-load looks at one load: give its --rate")
        slowest = rate * min(1.0, self.load.scale or 1.0)
        if rate and (lasts_s := scenario.load.num_requests() / slowest) > _LONGEST_S:
            days = lasts_s / 86_400
            raise PlanError(f"at {slowest:g} requests/s the load lasts {days:.3g} days: raise --rate or --speed-up, or give --limit")
        models = self.workers.models()
        return Question(
            models=models,
            shape=scenario.load.shape(rate or 1.0, self.seed),
            itl_s=scenario.slo.itl_s,
            fleet=self.fleet.given(models),
            num_gpus=self.fleet.gpus,
            whole_grid=self.fleet.grid,
            rate=rate,
            has_goodput=self.has_goodput,
            budgets=self.fleet.budgets(),
            scale=self.load.scale,
        )


def settings_of(scenario: Scenario) -> dict[str, object]:
    """For the record: the scenario without the router's settings, which are long."""
    told: dict[str, object] = msgspec.to_builtins(scenario)
    told.pop("config")
    return told


def _only(models: tuple[WorkerModel, ...], role: str) -> WorkerModel:
    if len(models) != 1:
        raise PlanError(f"{len(models)} worker models of role {role}: a given fleet needs one; several are for --gpus to choose from")
    return models[0]
