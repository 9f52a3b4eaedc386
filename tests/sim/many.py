"""Many runs, shared out over processes. Called by `python -m tests.sim`."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.sim.world import run_seed

_CHUNK = 50


@dataclass
class Runs:
    """What some seeds gave."""

    num_runs: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Tracebacks, each with the command that replays its run."""

    def add(self, other: Runs) -> None:
        self.num_runs += other.num_runs
        self.totals.update(other.totals)
        self.failures += other.failures


def run_all(seeds: range, num_jobs: int) -> Iterator[Runs]:
    """Chunk by chunk, in any order."""
    chunks = [seeds[first : first + _CHUNK] for first in range(0, len(seeds), _CHUNK)]
    if num_jobs <= 1:
        yield from map(run_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs) as workers:
        yield from workers.imap_unordered(run_chunk, chunks)


def run_chunk(seeds: range) -> Runs:
    runs = Runs()
    for seed in seeds:
        runs.num_runs += 1
        try:
            report = run_seed(seed)
        except Exception:  # noqa: BLE001 - the root of a run: whatever a machine raised is a finding
            runs.failures.append(traceback.format_exc())
            continue
        runs.totals.update(report.counts)
        runs.totals["events"] += report.num_events
    return runs
