"""`pd-serve bench load`: one or several arms under a load, or a sweep of loads: what users wait for, and how much of it keeps a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pd_serve.bench.arms import Arm, ArmSpec, ClientSettings, opened
from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineLoad, MachineWatch
from pd_serve.bench.progress import Bars
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.results import ArmResult, Config, Described, Result, Scalar, new_result, now_iso, write_records, write_result
from pd_serve.bench.rounds import Rounds, interleaved
from pd_serve.bench.runner import closed_loop, open_loop
from pd_serve.bench.statistics import Slo, goodput, load_figures, offered, rate_at_attainment
from pd_serve.bench.workload import Workload, make_plans, random_tokens

WARMUP_SEED = 1_000_003
ATTAINMENTS = (0.90, 0.99)


@dataclass(frozen=True, slots=True)
class Point:
    """One load of a sweep: so many requests per second, or so many open at once; or the times that the plans have."""

    rate: float = 0.0
    concurrency: int = 0
    speed_up: float = 1.0
    """Of the times that a trace has."""

    @property
    def label(self) -> str:
        if self.concurrency:
            return f"concurrency={self.concurrency}"
        if self.rate:
            return f"rate={self.rate:g}"
        return f"speed_up={self.speed_up:g}"


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """`plans` replaces the workload."""

    arms: tuple[ArmSpec, ...]
    client: ClientSettings
    points: tuple[Point, ...]
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    plans: tuple[Sequence[RequestPlan], ...] = ()
    """Those of every point, or one sequence for each: prompts that were sent before are in the servers' caches."""
    duration_s: float = 0.0
    """With rates: sends for so long, instead of a number of requests."""
    num_rounds: int = 1
    num_warmups: int = 2
    kind: str = "load"
    name: str = ""
    parameters: tuple[tuple[str, Scalar], ...] = ()
    """Further ones to be told in the result."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Records by (arm, point), and what the machine did meanwhile."""

    rounds: dict[tuple[str, Point], Rounds]
    load: MachineLoad
    config: Config
    started_at: str

    @property
    def records(self) -> dict[tuple[str, Point], list[RequestRecord]]:
        return {key: [record for part in rounds for record in part] for key, rounds in self.rounds.items()}


async def run_load(settings: LoadSettings, path: Path, bars: Bars) -> Result:
    """Measures, and writes the result to `path` with the records beside it. Raises BenchError; when no request at all was answered too."""
    measured = await measure(settings, bars)
    if not any(record.ok for records in measured.records.values() for record in records):
        errors = [record.error for records in measured.records.values() for record in records if record.error]
        raise BenchError(f"no request was answered: {errors[0] if errors else 'none was sent'}")
    arms = {}
    for (name, point), records in measured.records.items():
        label = f"{name} {point.label}" if len(settings.points) > 1 else name
        file = write_records(path, label.replace(" ", "-"), records)
        parameters: dict[str, Scalar] = {"arm": name, "rate": point.rate, "concurrency": point.concurrency, "speed_up": point.speed_up}
        arms[label] = ArmResult(_figures(settings, point, measured.rounds[name, point]), file, parameters)
    described = Described(settings.kind, settings.name, _parameters(settings), measured.config, tuple(_notes(settings, measured)))
    result = new_result(described, measured.load, arms, measured.started_at)
    write_result(path, result)
    return result


async def measure(settings: LoadSettings, bars: Bars) -> Measured:
    """Every point on every arm, rounds interleaved. Raises BenchError."""
    async with opened(settings.arms, settings.client, bars) as arms:
        await _warm_up(settings, arms, bars)
        rounds: dict[tuple[str, Point], Rounds] = {}
        started_at = now_iso()
        with MachineWatch() as watch:
            for index, point in enumerate(settings.points):
                plans = plans_of(settings, index)
                bar = bars.add(point.label or settings.kind, len(plans) * len(arms))

                async def run(
                    arm: Arm, part: Sequence[RequestPlan], point: Point = point, bar: object = bar.advance
                ) -> list[RequestRecord]:
                    assert callable(bar)
                    if point.concurrency:
                        return await closed_loop(arm.endpoint, part, point.concurrency, bar)
                    return await open_loop(arm.endpoint, part, bar)

                for name, found in (await interleaved(arms, plans, settings.num_rounds, run)).items():
                    rounds[name, point] = found
        config = {process: values for arm in arms for process, values in arm.config.items()}
    return Measured(rounds, watch.load, config, started_at)


def plans_of(settings: LoadSettings, index: int) -> Sequence[RequestPlan]:
    """Of one point of the sweep. Its prompts are drawn anew: those of the point before are in the servers' caches."""
    if settings.plans:
        return settings.plans[index % len(settings.plans)]
    point, workload = settings.points[index], settings.workload
    num_requests = max(1, round(point.rate * settings.duration_s)) if point.rate and settings.duration_s else workload.num_requests
    return make_plans(replace(workload, rate=point.rate, num_requests=num_requests, seed=workload.seed + index))


async def _warm_up(settings: LoadSettings, arms: Sequence[Arm], bars: Bars) -> None:
    """Requests like those to come but with prompts of their own, one after the other. Raises BenchError when an arm answers none."""
    if not settings.num_warmups:
        return
    if settings.plans:
        plans = [_redrawn(plan, settings.workload.vocab) for plan in settings.plans[0][: settings.num_warmups]]
    else:
        plans = make_plans(replace(settings.workload, num_requests=settings.num_warmups, rate=0.0, seed=WARMUP_SEED, kind="warm-up"))
    bar = bars.add("warming up", len(plans) * len(arms))
    for arm in arms:
        records = await closed_loop(arm.endpoint, plans, 1, bar.advance)
        if not any(record.ok for record in records):
            raise BenchError(f"{arm.name} ({arm.endpoint.url}) answers no request: {records[0].error}")


def _redrawn(plan: RequestPlan, vocab: int) -> RequestPlan:
    prompt = plan.prompt if isinstance(plan.prompt, str) else random_tokens(len(plan.prompt), vocab, (WARMUP_SEED, plan.index))
    return RequestPlan(plan.index, "warm-up", 0.0, prompt, min(plan.max_tokens, 16))


def _figures(settings: LoadSettings, point: Point, rounds: Rounds) -> dict[str, float]:
    records = [record for part in rounds for record in part]
    figures = load_figures(records).figures()
    figures["rejected_share"] = figures["rejected"] / len(records)
    if not point.concurrency:
        sent = offered(*rounds)
        figures |= {"planned_requests_per_s": sent.planned_rate, "offered_requests_per_s": sent.achieved_rate}
        figures |= sent.late.figures("late_s")
    if settings.slo.is_set:
        good = goodput(records, settings.slo)
        figures |= {"slo_attainment": good.attainment, "goodput_requests_per_s": good.requests_per_s}
    return figures


def _parameters(settings: LoadSettings) -> dict[str, Scalar]:
    workload, slo = settings.workload, settings.slo
    parameters: dict[str, Scalar] = {"seed": workload.seed, "rounds": settings.num_rounds, "warmups": settings.num_warmups}
    if settings.plans:
        parameters["plans"] = len(settings.plans[0])
    else:
        parameters |= {
            "requests": workload.num_requests,
            "input_tokens": f"{workload.input_length.low}-{workload.input_length.high}",
            "output_tokens": f"{workload.output_length.low}-{workload.output_length.high}",
            "length_pairs": len(workload.pairs),
            "arrivals": workload.arrivals.value,
            "duration_s": settings.duration_s,
            "prefix_tokens": workload.prefix_tokens,
            "num_prefixes": workload.num_prefixes,
        }
    if slo.is_set:
        parameters |= {"slo_ttft_s": slo.ttft_s, "slo_itl_s": slo.itl_s, "slo_tpot_s": slo.tpot_s}
    return parameters | dict(settings.parameters)


def _notes(settings: LoadSettings, measured: Measured) -> list[str]:
    notes = []
    if settings.slo.is_set and sum(not point.concurrency for point in settings.points) > 1:
        for arm in settings.arms:
            points = [
                (round(offered(*measured.rounds[name, point]).achieved_rate, 3), goodput(records, settings.slo).attainment)
                for (name, point), records in measured.records.items()
                if name == arm.name and not point.concurrency
            ]
            kept = ", ".join(f"{share:.0%} up to {rate_at_attainment(points, share):g}/s" for share in ATTAINMENTS)
            notes.append(f"{arm.name}: limits kept by {kept}")
    for (name, point), records in measured.records.items():
        if failed := [record.error for record in records if record.error]:
            notes.append(f"{name} {point.label}".strip() + f": {len(failed)} requests failed, the first: {failed[0]}")
    return notes
