"""`pd-serve bench interference`: what long prompts do to the streams of others (victims.py), disaggregated and colocated on the same cores.

The arms are open side by side and take turns, each without injection (its baseline) and with it; every arm is sent the requests of one
file. The colocated arm runs at the chunk budget that does best in a sweep: a cluster per budget, so a sweep is slow, and its results are
kept in a file that later runs add to and read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pd_serve.bench.arms import ArmSpec, ClientSettings, opened
from pd_serve.bench.cluster import ClusterSpec
from pd_serve.bench.cores import CoreShare
from pd_serve.bench.errors import BenchError
from pd_serve.bench.interference_pictures import draw_interference
from pd_serve.bench.interference_turns import Measured, Run, in_sequence, mean_load, replay, take_turns, warm_up
from pd_serve.bench.machine import MachineLoad, MachineWatch, differs
from pd_serve.bench.process_use import Use
from pd_serve.bench.progress import Bars
from pd_serve.bench.results import (
    ArmResult,
    Config,
    Described,
    Result,
    Scalar,
    diff_config,
    new_result,
    now_iso,
    read_result,
    write_records,
    write_result,
)
from pd_serve.bench.victims import (
    Round,
    VictimsTest,
    beside_baseline,
    best_budget,
    make_test,
    offered_tokens_per_s,
    pooled,
    ratios,
)

DISAGGREGATED, COLOCATED = "disaggregated", "colocated"
_BUDGET = "engine.max_batch_tokens"
_EXPECTED_TO_DIFFER = frozenset(
    {"worker.id", "engine.cpu_affinity", "engine.threads", _BUDGET, "launch.prefill", "launch.decode", "launch.colocated"}
)


@dataclass(frozen=True, slots=True)
class InterferenceSettings:
    test: VictimsTest
    cores: CoreShare | None
    """None: the clusters are not pinned (GPUs, or arms that are there already)."""
    num_rounds: int = 1
    """The long prompts of the test are those of one round."""
    base: ClusterSpec = field(default_factory=ClusterSpec)
    """Model and settings of the clusters that are started."""
    is_local: bool = True
    """Start the two clusters; otherwise only `others` are measured."""
    others: tuple[ArmSpec, ...] = ()
    budget: int = 0
    """Of the colocated arm; 0: the best of the sweep."""
    client: ClientSettings = field(default_factory=ClientSettings)
    name: str = ""
    is_apart: bool = True
    """Router, fronts and client stay off the cores of decode while the disaggregated cluster is measured."""

    def run(self) -> Run:
        return Run(self.test, self.cores.prefill if self.cores is not None and self.is_apart else ())

    def disaggregated(self) -> ClusterSpec:
        spec = replace(self.base, prefill=1, decode=1, colocated=0)
        return self._with(spec, {} if self.cores is None else self.cores.apart())

    def colocated(self, budget: int) -> ClusterSpec:
        pinned = {} if self.cores is None else self.cores.together()
        return self._with(replace(self.base, prefill=0, decode=0, colocated=1), {**pinned, f"{COLOCATED}.{_BUDGET}": str(budget)})

    def _with(self, spec: ClusterSpec, settings: Mapping[str, str]) -> ClusterSpec:
        # Without a prefix cache every arm finds what it is sent as new as the first one did.
        return replace(spec, settings={"kv.prefix_cache": "false", **settings, **self.base.settings})


async def run_sweep(settings: InterferenceSettings, budgets: Sequence[int], path: Path, bars: Bars) -> Result:
    """Measure a colocated cluster at each budget, and add it to the sweep in `path`. Raises BenchError."""
    plans = make_test(settings.test)
    known = _known_sweep(path)
    arms = dict(known.arms) if known is not None else {}
    config = dict(known.config) if known is not None else {}
    bar = bars.add("chunk budgets", len(budgets))
    started_at = now_iso()
    loads: list[MachineLoad] = []
    result = known
    for budget in budgets:
        spec = ArmSpec(f"budget-{budget}", cluster=settings.colocated(budget))
        async with opened([spec], settings.client, bars) as (arm,):
            await warm_up(arm, settings.test)
            with MachineWatch(window_s=None) as watch:
                records = await replay(arm.endpoint, plans, settings.test)
            config |= arm.config
        loads.append(watch.load)
        figures = pooled([Round(tuple(records), settings.test.window)])
        arms[spec.name] = ArmResult(figures, write_records(path, spec.name, records), {"budget": budget, **_told_load(watch.load)})
        parameters: dict[str, Scalar] = {**_told_test(settings.test), "best_budget": best_of_sweep(arms)}
        # After each: a sweep takes long, and what has been measured stays.
        result = new_result(Described("interference-sweep", settings.name, parameters, config), mean_load(loads), arms, started_at)
        write_result(path, result)
        bar.advance()
    if result is None:
        raise BenchError("a sweep needs budgets")
    return result


def best_of_sweep(arms: Mapping[str, ArmResult]) -> int:
    return best_budget({int(arm.parameters["budget"]): arm.figures for arm in arms.values()})


async def run_interference(settings: InterferenceSettings, sweep_path: Path, path: Path, bars: Bars) -> Result:
    """Every arm in turn, and the result in `path` with its records and requests beside it. Raises BenchError."""
    sweep = _known_sweep(sweep_path)
    specs: list[ArmSpec] = []
    if settings.is_local:
        budget = settings.budget or (best_of_sweep(sweep.arms) if sweep is not None else 0)
        if not budget:
            raise BenchError(f"{sweep_path} holds no sweep of chunk budgets: run one (--sweep), or choose a --budget")
        specs += [ArmSpec(DISAGGREGATED, cluster=settings.disaggregated()), ArmSpec(COLOCATED, cluster=settings.colocated(budget))]
    specs += settings.others
    if not specs:
        raise BenchError("nothing to measure: no clusters are to be started, and no --arm is named")
    started_at = now_iso()
    async with opened(specs, settings.client, bars) as arms:
        for arm in arms:
            await warm_up(arm, settings.test)
        measured = await take_turns(arms, settings.run(), settings.num_rounds, path, bars)
        config = {process: values for arm in arms for process, values in arm.config.items()}
    results = {name: _arm_result(path, name, found) for name, found in measured.items()}
    notes = [*_load_notes(measured), *_config_notes(config), *_sweep_notes(sweep, settings.is_local and not settings.budget)]
    parameters: dict[str, Scalar] = {**_told_test(settings.test), "rounds": settings.num_rounds, "apart": settings.is_apart}
    described = Described("interference", settings.name, parameters, config, tuple(notes))
    load = mean_load([load for found in measured.values() for load in found.loads])
    result = new_result(described, load, results, started_at)
    result = msgspec.structs.replace(result, pictures=draw_interference(path, measured, results))
    write_result(path, result)
    return result


# ---- what is told


def _arm_result(path: Path, name: str, found: Measured) -> ArmResult:
    figures = beside_baseline(pooled(found.injected), pooled(found.baseline))
    if found.idle_cores:
        figures["idle_cores"] = sum(found.idle_cores) / len(found.idle_cores)
    figures |= _use_figures("", found.used) | _use_figures("baseline_", found.baseline_used)
    figures |= ratios(figures, [name for name in figures if name.startswith("step_cpu_s.")])
    write_records(path, f"{name}-baseline", in_sequence(found.baseline))
    return ArmResult(figures, write_records(path, name, in_sequence(found.injected)), _told_load(mean_load(found.loads)))


def _use_figures(prefix: str, runs: Sequence[tuple[float, Mapping[str, Use]]]) -> dict[str, float]:
    """Over all runs, by process; waiting, and CPU by step, only of what computes."""
    figures: dict[str, float] = {}
    seconds = sum(duration_s for duration_s, _ in runs)
    for process in dict.fromkeys(name for _, used in runs for name in used):
        mine = [used[process] for _, used in runs if process in used]
        running_s = sum(use.running_s for use in mine)
        figures[f"{prefix}busy_cores.{process}"] = running_s / seconds
        if "/" in process:
            figures[f"{prefix}waiting_cores.{process}"] = sum(use.waiting_s for use in mine) / seconds
            if num_steps := sum(use.num_steps for use in mine):
                figures[f"{prefix}step_cpu_s.{process}"] = running_s / num_steps
    return figures


def _told_test(test: VictimsTest) -> dict[str, Scalar]:
    told: dict[str, Scalar] = msgspec.structs.asdict(test)
    return {**told, "offered_prompt_tokens_per_s": offered_tokens_per_s(test)}


def _told_load(load: MachineLoad) -> dict[str, Scalar]:
    return {"others_cores": round(load.others_cores, 3), "steal_cores": round(load.steal_cores, 3)}


def _load_notes(measured: Mapping[str, Measured]) -> list[str]:
    """Why arms must not be compared."""
    (first, *rest) = measured.items()
    reasons = [(name, differs(mean_load(first[1].loads), mean_load(found.loads))) for name, found in rest]
    return [f"NOT COMPARABLE, {first[0]} and {name}: {reason}" for name, reason in reasons if reason]


def _config_notes(config: Config) -> list[str]:
    """Settings of workers that differ between the arms, those apart that tell the arms from each other."""
    found = {process: values for process, values in config.items() if "/router" not in process}
    names = sorted(found)
    differences = {
        difference.key: f"{difference.key}: {names[0]} {difference.a}, {other} {difference.b}"
        for other in names[1:]
        for difference in diff_config({"": found[names[0]]}, {"": found[other]})
        if difference.key not in _EXPECTED_TO_DIFFER
    }
    return [f"settings differ: {text}" for text in differences.values()]


def _sweep_notes(sweep: Result | None, is_chosen_by_it: bool) -> list[str]:
    if sweep is None or not is_chosen_by_it:
        return []
    budgets = sorted(int(arm.parameters["budget"]) for arm in sweep.arms.values())
    return [f"chunk budget {best_of_sweep(sweep.arms)} is the best of the sweep over {', '.join(map(str, budgets))}"]


def _known_sweep(path: Path) -> Result | None:
    """Raises BenchError for a file that is none."""
    if not path.exists():
        return None
    result = read_result(path)
    if result.kind != "interference-sweep":
        raise BenchError(f"{path} is a result of {result.kind}, not a sweep of chunk budgets")
    return result
