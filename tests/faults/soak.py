"""Everything at once, for as long as one likes: clients that leave, kills, freezes, drains, a slow link, every KV byte verified.

python -m tests.faults.soak --minutes 60 --seed 7      a 2P2D cluster of its own; a progress bar, then a table and a line of JSON

Undisturbed answers are collected first; every answer is compared with them. At the end every table is empty, and all questions are asked
once more. Any request that fails, any answer that differs, and anything that stays held is a failure. Requests that were open at a router
when it was killed are the exception: their clients see the connection break, ask again, and are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import httpx
import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pd_serve.transport.fault_plan import FAULT_PLAN_VARIABLE, FaultPlan
from tests.cluster import wait_until
from tests.faults.chaos import ROUTER, Chaos, Fault, draw_faults
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, Body, BrokenOffError, Question, ask, check, prepare
from tests.faults.separate import SeparateCluster, running_separately
from tests.unit.engine.model_folders import write_config

SETTINGS = {
    "kv.num_blocks": "400",
    "kv.headroom_tokens": "32",
    "transport.name": "faulty",
    "transport.verify": "true",
    "transport.hard_fence_after_s": "2",
    "worker.quarantine_retry_s": "0.5",
    "worker.heartbeat_s": "0.5",
    "worker.drain_deadline_s": "3",
    "router.worker_timeout_s": "2",
}
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20_480,
    "max_position_embeddings": 4096,
}
"""Random weights: small, so that a minute holds many requests."""
SLOW_WORKER = "prefill-1"
SLOW_LINKS = FaultPlan(inner="ucx", bandwidth=20e6, delay_s=(0.0, 0.02))
"""Of that worker to both others: its longest prompts take a quarter of a second to move."""
PLAIN_LINKS = FaultPlan(inner="ucx")
CLEAN_WITHIN_S = 5.0
MAX_FAILURES = 10
MOVE_REASONS = ("peer_lost", "transfer_failed", "timeout", "preempted", "engine_error", "refused", "draining")
COUNTERS = ("hard_fences", "stale_records", "refused_writes", "malformed_notices", "preemptions")


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    answers: int = 0
    cancels: int = 0
    broken_off: int = 0
    """Requests whose router was killed, and which were asked again."""
    failures: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    recovery_s: dict[str, float] = field(default_factory=dict)
    """By kind of fault: the longest time until all was whole again."""
    moves: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    """Of the workers that lived to the end."""
    router_clean_s: float = 0.0
    """From the death of a router until no worker held anything for it: the longest."""
    clean_s: float = 0.0
    """From the last request until every table was empty."""
    asked_again: int = 0
    router_fds: tuple[int, int] = (0, 0)
    """Before and after; where the first one was killed, of the last."""
    router_mib: tuple[int, int] = (0, 0)


class Soak:
    """One run on a whole cluster. `tell` hears of each fault, with the answers so far."""

    def __init__(self, cluster: SeparateCluster, seed: int, tell: Callable[[Report, Fault], None] = lambda report, fault: None) -> None:
        self._cluster = cluster
        self._rng = Random(seed)
        self._tell = tell
        self._is_over = False
        self._recoveries: list[tuple[str, float]] = []
        self.chaos = Chaos(cluster)
        self._moves: Counter[str] = Counter()
        self.report = Report(seed)

    async def run(self, seconds: float, num_clients: int = 10) -> Report:
        """Faults strike for so many seconds. Raises AssertionError when the cluster does not become whole or clean again."""
        report, cluster = self.report, self._cluster
        limits = httpx.Limits(max_connections=4 * num_clients)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
            questions = await prepare(client, report.seed, 20)
            questions += [Question(body, (await ask(client, body)).answer) for body in self._long_bodies(12)]
            before = _footprint(cluster)
            began_at = time.monotonic()
            asking = [asyncio.create_task(self._keep_asking(client, questions, Random(self._rng.random()))) for _ in range(num_clients)]
            await self._keep_striking(began_at + seconds)
            self._is_over = True
            await asyncio.gather(*asking)
            ended_at = time.monotonic()
            report.seconds = ended_at - began_at
            await asyncio.to_thread(wait_until, lambda: cluster.num_held() == 0, CLEAN_WITHIN_S, "every table is empty", 0.02)
            report.clean_s = time.monotonic() - ended_at
            for question in questions:
                await self.answer_one(client, question)
                report.asked_again += 1
            after = _footprint(cluster)
        report.router_fds, report.router_mib = (before[0], after[0]), (before[1], after[1])
        report.faults = dict(Counter(kind for kind, _ in self._recoveries))
        report.recovery_s = {kind: round(max(s for other, s in self._recoveries if other == kind), 2) for kind in report.faults}
        await asyncio.to_thread(self._read_metrics)
        return report

    async def _keep_striking(self, until: float) -> None:
        faults = draw_faults(self.report.seed, {"prefill": self._cluster.prefill, "decode": self._cluster.decode})
        while time.monotonic() < until and len(self.report.failures) < MAX_FAILURES:
            fault = next(faults)
            self._tell(self.report, fault)
            await asyncio.sleep(fault.after_s)
            if fault.kind == "kill router":
                await asyncio.to_thread(self._count_moves)
            self._recoveries.append((fault.kind, await self.chaos.strike(fault)))

    async def _keep_asking(self, client: httpx.AsyncClient, questions: list[Question], rng: Random) -> None:
        while not self._is_over:
            patience_s = rng.expovariate(2.0) if rng.random() < 0.15 else None
            try:
                async with asyncio.timeout(patience_s):
                    await self.answer_one(client, rng.choice(questions))
            except TimeoutError:
                self.report.cancels += 1
            else:
                self.report.answers += 1

    async def answer_one(self, client: httpx.AsyncClient, question: Question) -> None:
        """Until it is answered; a connection that breaks is an answer that failed, unless its router was killed."""
        chaos = self.chaos
        while True:
            was_up, num_deaths = chaos.router_is_up.is_set(), chaos.num_router_deaths
            try:
                check(question, await ask(client, question.body))
            except BrokenOffError as error:
                if was_up and num_deaths == chaos.num_router_deaths:
                    self._failed(error)
                    return
                self.report.broken_off += 1
                await chaos.router_is_up.wait()
            except AssertionError as error:
                self._failed(error)
                return
            else:
                return

    def _failed(self, error: AssertionError) -> None:
        self.report.failures.append(f"{time.strftime('%H:%M:%S')} {error}"[:2000])

    def _count_moves(self) -> None:
        """Of a router that is about to end; a new one counts from nothing."""
        for reason in MOVE_REASONS:
            self._moves[reason] += int(self._cluster.metric(self._cluster.url, "pd_serve_moves_total", reason=reason))

    def _long_bodies(self, count: int) -> list[Body]:
        """Prompts of many chunks: something to be in the middle of."""
        rng = self._rng
        prompts = [[rng.randrange(300, 20_000) for _ in range(rng.randrange(600, 1500))] for _ in range(count)]
        return [
            {"model": "demo", "prompt": prompt, "max_tokens": rng.randint(1, 80), "ignore_eos": True, "temperature": 0.0}
            for prompt in prompts
        ]

    def _read_metrics(self) -> None:
        cluster, report = self._cluster, self.report
        self._count_moves()
        report.moves = dict(+self._moves)
        report.router_clean_s = max(self.chaos.router_clean_s, default=0.0)
        addresses = [worker["address"] for worker in cluster.workers()]
        report.counters = {name: sum(int(cluster.metric(address, f"pd_serve_{name}_total")) for address in addresses) for name in COUNTERS}


def soak(log_dir: Path, seed: int, seconds: float, tell: Callable[[Report, Fault], None] = lambda report, fault: None) -> Report:
    """On a cluster of its own. Raises AssertionError with the command that replays the same faults."""
    model = write_config(log_dir / "model", **MODEL)
    settings = SETTINGS | {"model.load_format": "random", "model.name": "demo"}
    try:
        with running_separately(log_dir, prefill=2, decode=2, model=str(model), settings=settings, env=_links()) as cluster:
            report = asyncio.run(Soak(cluster, seed, tell).run(seconds))
            assert not report.failures, "\n".join([f"{len(report.failures)} failures", *report.failures[:5]])
    except AssertionError as error:
        error.add_note(f"replay: python -m tests.faults.soak --minutes {seconds / 60:.2f} --seed {seed}")
        raise
    return report


def _links() -> dict[str, dict[str, str]]:
    """What each worker's transport does wrong, by its name."""
    names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(2)]
    plans = {name: SLOW_LINKS if name == SLOW_WORKER else PLAIN_LINKS for name in names}
    return {name: {FAULT_PLAN_VARIABLE: msgspec.json.encode(plan).decode()} for name, plan in plans.items()}


def _footprint(cluster: SeparateCluster) -> tuple[int, int]:
    """(open descriptors, resident MiB) of the router"""
    process = psutil.Process(cluster.processes[ROUTER].pid)
    return process.num_fds(), process.memory_info().rss >> 20


def _table(report: Report) -> Table:
    table = Table("", "", title=f"soak, seed {report.seed}", show_header=False)
    for name, value in asdict(report).items():
        match value:
            case float():
                shown = f"{value:.2f}"
            case dict():
                shown = ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
            case list():
                shown = str(len(value))
            case tuple():
                shown = " -> ".join(map(str, value))
            case _:
                shown = str(value)
        table.add_row(name.replace("_", " "), shown)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", type=Path)
    options = parser.parse_args()
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="pd-serve-soak-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    console.print(f"logs in {log_dir}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=options.minutes * 60)
        began_at: list[float] = []

        def tell(report: Report, fault: Fault) -> None:
            began_at[:] = began_at or [time.monotonic()]
            what = f"{report.answers} answers, {len(report.failures)} failures; {fault.kind} of {fault.role}-{fault.index}"
            bar.update(task, description=what, completed=time.monotonic() - began_at[0])

        try:
            report = soak(log_dir, options.seed, options.minutes * 60, tell)
        except AssertionError as error:
            console.print(f"failed: {error}", "\n".join(getattr(error, "__notes__", [])), markup=False, soft_wrap=True)
            return 1
        bar.update(task, completed=options.minutes * 60)
    Console().print(_table(report))
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
