"""`pd-serve bench transfer`: how fast bytes get from one process's pool into another's, beside memcpy and UCX's own measuring tool.

Two processes, one transport each (transfer_node.py), joined as workers are; every case (transfer_cases.py) is written over and over, in
turns with copies of ranges like them inside the writing process. A ratio is the median over rounds of neighbours in time, never of two
medians from different minutes. The bytes of every case are compared on both sides before it is measured.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence

import msgspec

from pd_serve.bench.errors import BenchError
from pd_serve.bench.perftest import Perftest, find_perftest
from pd_serve.bench.transfer_cases import Case, KVCase, PoolState, RunsCase, layout_of, size_text
from pd_serve.bench.transfer_node import Digest, Digested, Measure, Measured, Open, Took
from pd_serve.bench.transfer_process import NodeProcess, join

UNIT_NBYTES = 4096
RUNS = tuple(4**power for power in range(8))
"""4 KiB to 64 MiB: all of a pass."""
SMOLLM2 = "30x3x64x16"
KV_POOLS = 4
"""A KV pool holds that many prompts, so that each pass writes other blocks than the one before."""
MIN_PERFTEST_NBYTES = 64 * 1024
_LEAST_BY_SIZE = {1 << 20: 0.9, 64 << 10: 0.75}
"""Of memcpy, on shared memory."""


class TransferOptions(msgspec.Struct, frozen=True):
    transport: str = "ucx"
    lanes: tuple[str, ...] = ("shm", "tcp")
    layouts: tuple[str, ...] = (SMOLLM2,)
    num_tokens: int = 2048
    rounds: int = 12
    runs: tuple[int, ...] = RUNS
    pass_nbytes: int = 64 << 20
    pool_nbytes: int = 256 << 20
    """Of the cases of runs."""
    perftest: str = ""
    """Path of ucx_perftest; empty: found on PATH or in the libucx package; `none`: left out."""


class Outcome(msgspec.Struct, frozen=True):
    """One case on one lane."""

    lane: str
    case: Case
    layout: str
    """As it was asked for; empty for runs."""
    measured: Measured
    perftest_bytes_per_s: float
    """Of the same size of message, the mean of before and after; 0: not measured."""

    @property
    def name(self) -> str:
        return f"{self.lane}: {f'{self.layout}, ' if self.layout else ''}{self.case.name}"

    @property
    def bytes_per_s(self) -> float:
        return self.measured.nbytes / statistics.median(_walls(self.measured.written))

    def figures(self) -> dict[str, float]:
        measured = self.measured
        walls, copied, whole = (_walls(tooks) for tooks in (measured.written, measured.copied, measured.whole_copied))
        figures = {
            "bytes": float(measured.nbytes),
            "writes": float(measured.num_writes),
            "bytes_per_s": self.bytes_per_s,
            "memcpy_bytes_per_s": measured.nbytes / statistics.median(whole),
            "memcpy_same_ranges_bytes_per_s": measured.nbytes / statistics.median(copied),
            "of_memcpy_ratio": paired_ratio(whole, walls),
            "of_memcpy_same_ranges_ratio": paired_ratio(copied, walls),
            "of_memcpy_cpu_ratio": paired_ratio([took.cpu_s for took in measured.whole_copied], [took.cpu_s for took in measured.written]),
            "write_s.p50": statistics.median(walls),
            "write_s.max": max(walls),
            "write_cpu_s.p50": statistics.median(took.cpu_s for took in measured.written),
        }
        if self.perftest_bytes_per_s:
            figures["perftest_bytes_per_s"] = self.perftest_bytes_per_s
            figures["of_perftest_ratio"] = self.bytes_per_s / self.perftest_bytes_per_s
        return figures


class Target(msgspec.Struct, frozen=True):
    """A figure of one outcome, and the least it should be."""

    what: str
    value: float
    least: float

    @property
    def is_met(self) -> bool:
        return self.value >= self.least

    def words(self) -> str:
        return f"{'met' if self.is_met else 'not met'}: {self.what}: {self.value:.2f} (at least {self.least:g})"


def paired_ratio(theirs_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """How fast ours is in parts of theirs: the median over rounds of the ratio within a round."""
    return statistics.median(their / our for their, our in zip(theirs_s, ours_s, strict=True))


def _walls(tooks: Sequence[Took]) -> list[float]:
    return [took.wall_s for took in tooks]


def measure(options: TransferOptions, advance: Callable[[], None]) -> tuple[list[Outcome], list[str]]:
    """All cases on all lanes, and notes. `advance` is called once per case (`num_cases` of them). Raises BenchError."""
    outcomes: list[Outcome] = []
    notes: list[str] = []
    tool: Perftest | None = None
    if options.perftest != "none" and options.transport == "ucx":
        tool = find_perftest(options.perftest)
        notes.append(f"ucx_perftest: {tool.path}" if tool else "ucx_perftest left out: none on PATH, none that runs in the libucx package")
    for lane in options.lanes:
        outcomes += _measure_lane(options, lane, tool, notes, advance)
    return outcomes, notes


def num_cases(options: TransferOptions) -> int:
    return len(options.lanes) * len(cases_of(options))


def cases_of(options: TransferOptions) -> list[tuple[Case, str]]:
    """(case, layout as asked for). Raises BenchError."""
    cases: list[tuple[Case, str]] = [
        (RunsCase(UNIT_NBYTES, run_length, options.pass_nbytes, options.pool_nbytes), "") for run_length in options.runs
    ]
    for text in options.layouts:
        try:
            layout = layout_of(text, 1)
        except ValueError as error:
            raise BenchError(str(error)) from error
        layout = msgspec.structs.replace(layout, num_blocks=KV_POOLS * layout.num_blocks_for(options.num_tokens))
        cases += [(KVCase(layout, options.num_tokens, state), text) for state in PoolState]
    return cases


def targets_of(outcomes: Sequence[Outcome]) -> list[Target]:
    """What is asked of the built-in transport on one machine: writes of one size beside copies of the same ranges, a prompt's KV beside
    one call of memcpy, messages beside ucx_perftest."""
    targets: list[Target] = []
    for outcome in outcomes:
        figures, case = outcome.figures(), outcome.case
        if "of_perftest_ratio" in figures:
            targets.append(Target(f"{outcome.name}, of ucx_perftest", figures["of_perftest_ratio"], 0.9))
        elif outcome.lane == "shm" and isinstance(case, KVCase):
            least = 0.7 if case.state is PoolState.FRESH else 0.5
            targets.append(Target(f"{outcome.name}, of memcpy", figures["of_memcpy_ratio"], least))
        elif outcome.lane == "shm" and isinstance(case, RunsCase) and case.run_nbytes in _LEAST_BY_SIZE:
            ratio = figures["of_memcpy_same_ranges_ratio"]
            targets.append(Target(f"{outcome.name}, of memcpy of the same ranges", ratio, _LEAST_BY_SIZE[case.run_nbytes]))
    return targets


def _measure_lane(
    options: TransferOptions, lane: str, tool: Perftest | None, notes: list[str], advance: Callable[[], None]
) -> list[Outcome]:
    cases = cases_of(options)
    pool_nbytes = max(case.pool_nbytes if isinstance(case, RunsCase) else case.layout.pool_nbytes for case, _ in cases)
    usable = sorted(os.sched_getaffinity(0))
    cores = usable[:2] if len(usable) > 1 else [-1, -1]
    outcomes: list[Outcome] = []
    host_id = f"bench-{os.getpid()}"

    def opening(name: str, core: int) -> Open:
        return Open(name, options.transport, lane, host_id, pool_nbytes, core)

    with NodeProcess(opening("writer", cores[0])) as writer, NodeProcess(opening("target", cores[1])) as target:
        joined = join(writer, target)
        how = "puts" if joined.one_sided else "checked messages"
        notes.append(f"{lane}: {writer.opened.library}, {joined.lane}, {how}, pools of {size_text(pool_nbytes)}")
        for case, layout in cases:
            _check(writer, target, case, lane)
            yardstick = _Yardstick(tool, lane, case, cores)
            before = yardstick.measure()
            measured = writer.call(Measure(case, options.rounds), Measured)
            after = yardstick.measure()
            outcomes.append(Outcome(lane, case, layout, measured, (before + after) / 2))
            advance()
    return outcomes


class _Yardstick:
    """Active messages over tcp of the size of one write; 0 where there is nothing to compare with."""

    def __init__(self, tool: Perftest | None, lane: str, case: Case, cores: Sequence[int]) -> None:
        is_comparable = lane == "tcp" and isinstance(case, RunsCase) and case.run_nbytes >= MIN_PERFTEST_NBYTES
        self._tool = tool if is_comparable else None
        self._nbytes = case.run_nbytes if isinstance(case, RunsCase) else 0
        self._cores = cores

    def measure(self) -> float:
        return self._tool.bandwidth("ucp_am_bw", self._nbytes, "tcp", self._cores, ("-e",)) if self._tool is not None else 0.0


def _check(writer: NodeProcess, target: NodeProcess, case: Case, lane: str) -> None:
    sent = writer.call(Digest(case, is_target=False), Digested)
    if target.call(Digest(case, is_target=True), Digested) != sent:
        raise BenchError(f"{lane}, {case.name}: what arrived is not what was written")
