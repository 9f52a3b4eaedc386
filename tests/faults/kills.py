"""SIGKILL at seeded moments under load: no request fails, none is answered differently, every table is empty at the end.

python -m tests.faults.kills --seed 7 --kills 20      one campaign on its own cluster, with a line per kill
python -m tests.faults.kills --pairs                  two workers at once each time
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.cluster import Cluster, running
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, Clients, Heard, prepare
from tests.pids import send

SETTINGS = {"kv.num_blocks": "160", "worker.heartbeat_s": "0.5"}
"""A pool that the questions' prompts do not all fit into: prompts are computed and moved again and again, not found in the cache."""
RANDOM = {"model.load_format": "random", "model.name": "demo"}
PAIR_SETTINGS = {"router.max_moves": "8"}
"""A pair costs a request up to two moves, and the next pair dies before it is answered: four in all are more than the default allows."""
RECOVERY_TIMEOUT_S = 90.0
CLEAN_TIMEOUT_S = 15.0
CALM_S = 2.0
"""Before the first kill: what a pause without one is."""


@dataclass(frozen=True)
class Kill:
    """One to come: `after_s` seconds after everything was whole again."""

    role: str
    index: int
    victim: str
    """Which processes of the worker: rank, front or both."""
    after_s: float
    also: tuple[str, int] | None = None
    """Role and index of another worker that dies in the same moment, in the same way."""


def draw_kills(seed: int, count: int) -> list[Kill]:
    """Every role and kind of victim in turn, in random order, so that few kills already are of different kinds."""
    rng = Random(seed)
    kinds = [(role, victim) for role in ("prefill", "decode") for victim in ("rank", "front", "both")]
    kills: list[Kill] = []
    while len(kills) < count:
        for role, victim in rng.sample(kinds, len(kinds)):
            kills.append(Kill(role, rng.randrange(2), victim, rng.uniform(0.0, 2.0)))
    return kills[:count]


def draw_pairs(seed: int, count: int) -> list[Kill]:
    """Two workers at once: one of each role, or all of one role, so that nothing of that kind is left until it has started again."""
    rng = Random(seed)
    kinds = [(roles, victim) for roles in (("prefill", "decode"), ("decode", "decode")) for victim in ("rank", "both")]
    kinds.append((("prefill", "prefill"), "both"))
    kills: list[Kill] = []
    while len(kills) < count:
        for (role, other), victim in rng.sample(kinds, len(kinds)):
            index = rng.randrange(2)
            also = (other, 1 - index if other == role else rng.randrange(2))
            kills.append(Kill(role, index, victim, rng.uniform(0.0, 2.0), also))
    return kills[:count]


@dataclass
class Report:
    seed: int
    num_kills: int = 0
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    """From the kill until every worker is ready and joined again."""
    pauses_s: list[float] = field(default_factory=list)
    """Per kill: the longest pause between two pieces of a stream that was open when the worker died."""
    usual_pause_s: float = 0.0
    """The longest pause of a stream before the first kill."""
    moves: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.num_kills} kills, {self.num_answers} answers, {len(self.failures)} failed or differing; "
            f"moves {self.moves}; recovery s {_spread(self.recovery_s)}; client pause s {_spread(self.pauses_s)}, "
            f"without a kill {self.usual_pause_s:.2f}"
        )


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f} max {max(values):.2f}" if values else "none"


class Campaign:
    """Kills in a row on one whole cluster under load."""

    def __init__(self, cluster: Cluster, seed: int, is_verbose: bool = False) -> None:
        self._cluster = cluster
        self._is_verbose = is_verbose
        self._heard: list[Heard] = []
        self.report = Report(seed)

    async def run(self, kills: list[Kill], num_questions: int = 20) -> Report:
        """Stops at the first failure; what went wrong is in the report."""
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=self._cluster.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
            questions = await prepare(client, self.report.seed, num_questions)
            clients = Clients(client, questions, Random(self.report.seed), on_heard=self._heard.append)
            clients.start()
            await asyncio.sleep(CALM_S)
            usual = [heard.longest_pause_s(0.0) for heard in self._heard if len(heard.arrivals) > 1]
            for kill in kills:
                await asyncio.sleep(kill.after_s)
                killed_at = time.monotonic()
                await self._one(kill)
                if clients.failures:
                    break
                self.report.pauses_s.append(self._longest_pause(killed_at))
                self._heard.clear()
            await clients.stop()
        report = self.report
        report.num_answers = clients.num_answers
        report.failures += [str(failure) for failure in clients.failures]
        report.moves = self._moves()
        report.usual_pause_s = max(usual, default=0.0)
        return report

    async def _one(self, kill: Kill) -> None:
        victims = await asyncio.to_thread(self._strike, kill)
        began = time.monotonic()
        await self._whole_again(victims)
        self.report.num_kills += 1
        self.report.recovery_s.append(time.monotonic() - began)
        if self._is_verbose:
            print(f"{self.report.num_kills}: {kill} -> whole after {self.report.recovery_s[-1]:.2f} s", flush=True)

    def _strike(self, kill: Kill) -> list[dict[str, Any]]:
        places = [(kill.role, kill.index), *([kill.also] if kill.also else [])]
        workers = [self._cluster.worker(role, index) for role, index in places]
        for worker in workers:
            pids = {"rank": worker["rank_pids"], "front": [worker["pid"]], "both": [*worker["rank_pids"], worker["pid"]]}[kill.victim]
            send(pids, signal.SIGKILL)
        return workers

    async def _whole_again(self, victims: list[dict[str, Any]]) -> None:
        """Other incarnations are there, and every pair has joined."""
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            if await asyncio.to_thread(self._is_whole, victims):
                return
            if time.monotonic() > deadline:
                names = [victim["id"] for victim in victims]
                raise AssertionError(f"not whole {RECOVERY_TIMEOUT_S} s after the death of {names}\n{self._cluster.log}")
            await asyncio.sleep(0.1)

    def _is_whole(self, victims: list[dict[str, Any]]) -> bool:
        try:
            workers = self._cluster.workers()
        except httpx.HTTPError:
            return False
        names = {f"{worker['id']}@{worker['incarnation']:016x}": worker for worker in workers}
        if len(workers) != 4 or not all(worker["ready"] for worker in workers):
            return False
        if {worker["incarnation"] for worker in workers} & {victim["incarnation"] for victim in victims}:
            return False
        for worker in workers:
            others = {name for name, other in names.items() if other["role"] != worker["role"]}
            if not others <= {peer["peer"] for peer in worker["peers"] if peer["joined"]}:
                return False
        return True

    def _longest_pause(self, killed_at: float) -> float:
        met = [heard for heard in self._heard if heard.started_at < killed_at and len(heard.arrivals) > 1]
        return max((heard.longest_pause_s(killed_at) for heard in met), default=0.0)

    def _moves(self) -> dict[str, int]:
        reasons = ("peer_lost", "transfer_failed", "timeout", "preempted", "engine_error", "refused", "draining")
        counts = {reason: int(self._cluster.metric(self._cluster.url, "pd_serve_moves_total", reason=reason)) for reason in reasons}
        return {reason: count for reason, count in counts.items() if count}


def campaign(
    log_dir: Path, seed: int, num_kills: int, is_verbose: bool = False, in_pairs: bool = False, model: Path | None = None
) -> Report:
    """On a cluster of its own: of the demo model, or of random weights for the configuration in `model`.

    Raises AssertionError with the command that replays the same kills.
    """
    kills = (draw_pairs if in_pairs else draw_kills)(seed, num_kills)
    settings = SETTINGS | (PAIR_SETTINGS if in_pairs else {})
    options: dict[str, Any] = {"dtype": "bfloat16", "restart": True}
    if model is not None:
        settings = settings | RANDOM
        options["model"] = str(model)
    try:
        with running(log_dir, prefill=2, decode=2, settings=settings, **options) as cluster:
            report = asyncio.run(Campaign(cluster, seed, is_verbose).run(kills))
            assert not report.failures, f"{report}\n" + "\n".join(report.failures[:5])
            cluster.assert_clean(CLEAN_TIMEOUT_S)
    except AssertionError as error:
        error.add_note(f"replay: python -m tests.faults.kills --seed {seed} --kills {num_kills}{' --pairs' * in_pairs}")
        raise
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pairs", action="store_true", help="two workers at once")
    parser.add_argument("--log-dir", type=Path)
    options = parser.parse_args()
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="pd-serve-kills-"))
    print(f"logs in {log_dir}")
    print(campaign(log_dir, options.seed, options.kills, is_verbose=True, in_pairs=options.pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
