"""Runs a study with progress bars, and does with it what was asked: a table or JSON, pictures, files to deploy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pd_serve.bench.progress import Bar, Bars
from pd_serve.cli.plan_simulate_inputs import Inputs, settings_of
from pd_serve.cli.plan_simulate_show import show
from pd_serve.cores import usable_cores
from pd_serve.plan.candidates import Candidate, splits
from pd_serve.plan.compose import Deployment, write_deployment
from pd_serve.plan.curve import Curve, Trial, goodput_curve
from pd_serve.plan.errors import PlanError
from pd_serve.plan.outcome import ATTAINMENTS
from pd_serve.plan.pictures import curve_pictures, load_pictures, write_pictures
from pd_serve.plan.processes import CurveProcesses
from pd_serve.plan.scenario import Scenario
from pd_serve.plan.search import CurveTask, RunCurves
from pd_serve.plan.study import Arm, Question, Study, study
from pd_serve.plan.trials import Trials

_EMITS = ("compose",)
_STEPS = 100


@dataclass(frozen=True, slots=True)
class RunOptions:
    processes: int
    """0: as many as there are cores."""
    out: Path | None
    emit: str
    as_json: bool


def run(inputs: Inputs, options: RunOptions) -> int:
    """Raises PlanError, ConfigError, BenchError without matplotlib."""
    if options.emit and (options.emit not in _EMITS or options.out is None):
        raise PlanError(f"--emit {options.emit}: expected {', '.join(_EMITS)}, and --out for the folder to write into")
    model_id = inputs.workers.model_id() if options.emit else ""
    scenario = inputs.scenario()
    question = inputs.question(scenario)
    found = _studied(scenario, question, options)
    written: list[Path] = []
    if options.out is not None:
        written += _record(found, scenario, options.out)
    if options.emit and options.out is not None:
        arm = found.arms[found.chosen]
        is_cuda = bool(inputs.workers.gpu) or scenario.router_config().engine.device == "cuda"
        because = _because(arm, scenario, found)
        written += write_deployment(Deployment(arm.fleet, model_id, scenario.router_config(), is_cuda, because), options.out)
    show(found, scenario, question, written, options.as_json)
    return 0


def _studied(scenario: Scenario, question: Question, options: RunOptions) -> Study:
    count = options.processes or usable_cores()
    with ExitStack() as stack:
        bars = stack.enter_context(Bars(options.as_json))
        curves = bars.add("fleets", _most_curves(question)) if question.has_goodput else None
        run_curves = _in_turn(Trials(scenario), curves) if count == 1 else _Lazily(scenario, count, curves, stack).run
        return study(question, run_curves, _looking(scenario, bars))


def _most_curves(question: Question) -> int:
    """If none were passed over."""
    models = question.models
    pools = len(models.colocated) * len(question.budgets)
    return pools + (len(splits(question.num_gpus, models.prefill, models.decode, question.whole_grid)) if question.num_gpus else 1)


def _in_turn(trials: Trials, bar: Bar | None) -> RunCurves:
    def run_curves(tasks: Sequence[CurveTask]) -> Iterable[Curve]:
        for task in tasks:
            yield goodput_curve(task.candidate, trials.evaluate, task.start, task.attainments)
            if bar is not None:
                bar.advance()

    return run_curves


class _Lazily:
    """Processes that are started when there is something for them."""

    def __init__(self, scenario: Scenario, count: int, bar: Bar | None, stack: ExitStack) -> None:
        self._scenario = scenario
        self._count = count
        self._bar = bar
        self._stack = stack
        self._processes: CurveProcesses | None = None

    def run(self, tasks: Sequence[CurveTask]) -> Iterable[Curve]:
        if self._processes is None:
            on_done: Callable[[Curve], None] = self._bar.advance if self._bar is not None else lambda _: None
            self._processes = self._stack.enter_context(CurveProcesses(self._scenario, self._count, on_done))
        return self._processes.run(tasks)


def _looking(scenario: Scenario, bars: Bars) -> Callable[[Candidate, float, float], Trial]:
    def look(candidate: Candidate, rate: float, times: float) -> Trial:
        bar = bars.add(f"{candidate.name} at {rate:.3g}/s", _STEPS)
        done = 0

        def progress(share: float) -> None:
            nonlocal done
            while done < min(_STEPS, int(share * _STEPS)):
                bar.advance()
                done += 1

        return Trials(scenario).look(candidate, rate, times, progress)

    return look


def _record(found: Study, scenario: Scenario, out: Path) -> list[Path]:
    drawn = curve_pictures(found.curves)
    drawn |= load_pictures({arm.fleet.name: arm.at_load for arm in found.arms}, scenario.slo)
    written = write_pictures(drawn, out)
    path = out / "study.json"
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode({"scenario": settings_of(scenario), "study": found}), indent=1) + b"\n")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from error
    return [path, *written]


def _because(arm: Arm, scenario: Scenario, found: Study) -> tuple[str, ...]:
    slo = scenario.slo
    limits = [f"TTFT {1e3 * slo.ttft_s:g} ms"] * bool(slo.ttft_s) + [f"99 % of gaps {1e3 * slo.itl_s:g} ms"] * bool(slo.itl_s)
    goodput = ", ".join(f"{arm.goodput[str(share)]:.3g} requests/s within them for {share:.0%}" for share in ATTAINMENTS if arm.goodput)
    lines = [
        f"load: {scenario.load.words()}",
        f"limits: {' and '.join(limits)}; simulated: {goodput or f'{arm.at_load.attainment:.1%} within them'}",
    ]
    return (*lines, *found.verdict[:1])
