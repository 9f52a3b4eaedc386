"""Runs the victims test (victims.py) on arms that are open side by side: in turn, each with and without long prompts."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pd_serve.bench.arms import Arm
from pd_serve.bench.client import Endpoint
from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineLoad, MachineWatch
from pd_serve.bench.process_use import Use, place_fronts, placed_client, use_of
from pd_serve.bench.progress import Bars
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.rounds import shifted
from pd_serve.bench.runner import closed_loop, open_loop
from pd_serve.bench.victims import LONG, VICTIM, Round, VictimsTest, by_slot, make_test
from pd_serve.bench.workload import read_plans, write_plans

_LAST_REPORT_S = 0.3


@dataclass(slots=True)
class Measured:
    """Of one arm."""

    injected: list[Round] = field(default_factory=list)
    baseline: list[Round] = field(default_factory=list)
    loads: list[MachineLoad] = field(default_factory=list)
    """While it was measured."""
    idle_cores: list[float] = field(default_factory=list)
    """CPU that the arm's processes took while another one was measured."""
    used: list[tuple[float, dict[str, Use]]] = field(default_factory=list)
    """Seconds, and what each of its processes took of them, in each run with injection ..."""
    baseline_used: list[tuple[float, dict[str, Use]]] = field(default_factory=list)
    """... and without."""


@dataclass(frozen=True, slots=True)
class Run:
    test: VictimsTest
    aside: tuple[int, ...]
    """Cores for what computes nothing (router, fronts, this client) while the disaggregated cluster is measured; empty: any."""
    is_injected: bool = False


async def take_turns(arms: Sequence[Arm], run: Run, num_rounds: int, path: Path, bars: Bars) -> dict[str, Measured]:
    """By arm. Each round's requests go into a file beside `path` and are read from it. Raises BenchError when a request fails."""
    test = run.test
    for arm in arms:
        if run.aside and arm.cluster is not None and arm.cluster.spec.decode:
            place_fronts(arm.cluster, run.aside)
    measured = {arm.name: Measured() for arm in arms}
    bar = bars.add("runs", 2 * len(arms) * num_rounds)
    for turn in range(num_rounds):
        file = path.with_name(f"{path.stem}.requests-{turn}.jsonl")
        write_plans(file, make_test(msgspec.structs.replace(test, seed=test.seed + turn)))
        plans = read_plans(file)
        for is_injected in (False, True):
            part = plans if is_injected else [plan for plan in plans if plan.kind == VICTIM]
            for arm in arms if turn % 2 == 0 else tuple(reversed(arms)):
                await _measure(arm, arms, part, replace(run, is_injected=is_injected), measured)
                bar.advance()
    return measured


def in_sequence(rounds: Sequence[Round]) -> list[RequestRecord]:
    """Records as if the rounds had followed on each other at once, victims first in each."""
    shift_s = [sum(one.window.end_s for one in rounds[:index]) for index in range(len(rounds))]
    return [shifted(record, seconds) for one, seconds in zip(rounds, shift_s, strict=True) for record in one.records]


def mean_load(loads: Sequence[MachineLoad]) -> MachineLoad:
    """By time. Precondition: at least one."""
    seconds = sum(load.duration_s for load in loads) or 1.0

    def mean(values: Iterable[float]) -> float:
        return sum(value * load.duration_s for value, load in zip(values, loads, strict=True)) / seconds

    return msgspec.structs.replace(
        loads[0],
        duration_s=seconds,
        own_cores=mean(load.own_cores for load in loads),
        others_cores=mean(load.others_cores for load in loads),
        others_cores_max=max(load.others_cores_max for load in loads),
        steal_cores=mean(load.steal_cores for load in loads),
    )


async def replay(endpoint: Endpoint, plans: Sequence[RequestPlan], test: VictimsTest) -> list[RequestRecord]:
    """One run of the test: victims in their slots until its end, long prompts (if there are any) at their times, to their own end.

    Raises BenchError when a slot is through with its requests before.
    """
    # A collection stops this process for as long as tokens take to come.
    gc.collect()
    gc.disable()
    try:
        return await _replay(endpoint, plans, test)
    finally:
        gc.enable()


async def _replay(endpoint: Endpoint, plans: Sequence[RequestPlan], test: VictimsTest) -> list[RequestRecord]:
    start = time.monotonic()

    async def slot(waiting: Sequence[RequestPlan]) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        for plan in waiting:
            if time.monotonic() - start >= test.end_s:
                break
            records.append(await endpoint.stream(plan, start, test.end_s))
        return records

    longs = [plan for plan in plans if plan.kind == LONG]
    queues = by_slot(plans)
    async with asyncio.TaskGroup() as group:
        slots = [group.create_task(slot(waiting)) for waiting in queues]
        injected = group.create_task(open_loop(endpoint, longs, start=start))
    if any(len(task.result()) == len(waiting) for task, waiting in zip(slots, queues, strict=True)):
        raise BenchError("the victims ran out of requests: they fail at once, or their tokens come faster than was thought of")
    return [record for task in slots for record in task.result()] + injected.result()


async def warm_up(arm: Arm, test: VictimsTest) -> None:
    """A request of each kind, with prompts of their own. Raises BenchError when the arm answers none."""
    plans = make_test(msgspec.structs.replace(test, slots=2, count=1, seed=test.seed + 1_000_003))
    few = [msgspec.structs.replace(plan, max_tokens=4, at_s=0.0) for plan in (plans[0], plans[1], plans[-1])]
    records = await closed_loop(arm.endpoint, few, 1)
    if failed := next((record.error for record in records if not record.ok), ""):
        raise BenchError(f"{arm.name} ({arm.endpoint.url}) fails already at its first requests: {failed}")


async def _measure(arm: Arm, arms: Sequence[Arm], plans: Sequence[RequestPlan], run: Run, measured: Mapping[str, Measured]) -> None:
    test, is_injected = run.test, run.is_injected
    client_cores = run.aside if arm.cluster is not None and arm.cluster.spec.decode else ()
    before, started = {one.name: use_of(one.cluster) for one in arms}, time.monotonic()
    with placed_client(client_cores), MachineWatch(window_s=None) as watch:
        records = await replay(arm.endpoint, plans, test)
    seconds = time.monotonic() - started
    # Ranks tell of their last steps when they have become idle.
    await asyncio.sleep(_LAST_REPORT_S)
    if failed := next((record.error for record in records if not record.ok), ""):
        raise BenchError(f"{arm.name}: a request failed, so the arms were not sent the same: {failed}")
    mine = measured[arm.name]
    (mine.injected if is_injected else mine.baseline).append(Round(tuple(records), test.window))
    mine.loads.append(watch.load)
    for one in arms:
        used = {name: use.since(before[one.name].get(name, Use(0.0, 0.0))) for name, use in use_of(one.cluster).items()}
        if one is not arm:
            measured[one.name].idle_cores.append(sum(use.running_s for use in used.values()) / seconds)
        else:
            (mine.used if is_injected else mine.baseline_used).append((seconds, used))
