"""The lease protocol as a model (lease.pml), every run of it within its bounds looked at by spin; and the checker, seen to fail.

Needs the model checker `spin` (Debian: apt-get install spin) and a C compiler. What is modelled and checked: docs/leases.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("lease.pml")
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(shutil.which("spin") is None, reason="the model checker spin is not installed (Debian: apt-get install spin)"),
    pytest.mark.skipif(COMPILER is None, reason="spin writes C, and there is no C compiler"),
]
SMALL = ("LEASES=2", "BLOCKS=1")

SAFETY = ("-O1", "-DSAFETY", "-DNOREDUCE", "-DMEMLIM=2048")
NO_CYCLES = ("-O0", "-DNP", "-DNOREDUCE", "-DMEMLIM=2048")
"""Also the assertions. The model has no progress labels, so any run without an end is an error."""


@dataclass(frozen=True, slots=True)
class Verdict:
    num_errors: int
    num_states: int
    violated: str
    """The assertion, as spin prints it; empty if none was."""
    unreached: tuple[str, ...]
    """Statements of the model that no run came to, as `line: statement`."""
    report: str


def verify(folder: Path, macros: tuple[str, ...], flags: tuple[str, ...] = SAFETY, search: tuple[str, ...] = ()) -> Verdict:
    """Search all runs of the model. Raises AssertionError if the search was cut short."""
    assert COMPILER is not None
    subprocess.run(["spin", "-a", *(f"-D{macro}" for macro in macros), MODEL], cwd=folder, check=True, capture_output=True)
    subprocess.run([COMPILER, "-w", *flags, "-o", "pan", "pan.c"], cwd=folder, check=True, capture_output=True)
    done = subprocess.run(
        [folder / "pan", "-m10000", "-w21", *search], cwd=folder, check=False, capture_output=True, text=True, timeout=280
    )
    report = done.stdout + done.stderr
    errors, states = re.search(r"errors: (\d+)", report), re.search(r"(\d+) states, stored", report)
    assert errors is not None, report
    assert states is not None, report
    assert "too small" not in report, report
    assert "out of memory" not in report, report
    violated = re.search(r"pan:1: (.*) \(at depth", report)
    unreached = re.findall(rf"{re.escape(MODEL.name)}:(\d+), state \d+, \"(.*)\"", report)
    return Verdict(
        num_errors=int(errors[1]),
        num_states=int(states[1]),
        violated=violated[1] if violated else "",
        unreached=tuple(f"{line}: {statement}" for line, statement in unreached if statement != "-end-"),
        report=report,
    )


def check_holds(folder: Path, verdict: Verdict, macros: tuple[str, ...]) -> None:
    """No counterexample, and none missed because a part of the model is never run."""
    if verdict.num_errors:
        command = ["spin", "-t", "-p", *(f"-D{macro}" for macro in macros), str(MODEL)]
        trail = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True).stdout
        pytest.fail(f"{verdict.report}\n{trail}")
    assert verdict.unreached == ()
    assert verdict.num_states > 10_000


def test_three_leases_of_two_blocks_with_a_restarted_writer(tmp_path: Path) -> None:
    check_holds(tmp_path, verify(tmp_path, ()), ())


@pytest.mark.parametrize(
    "macros",
    [("LEASES=2",), ("LEASES=2", "TWO_WORKERS"), (*SMALL, "CHECKED")],
    ids=["restart", "two_workers", "checked"],
)
def test_every_run_ends_with_all_blocks_back(tmp_path: Path, macros: tuple[str, ...]) -> None:
    check_holds(tmp_path, verify(tmp_path, macros, NO_CYCLES, ("-l",)), macros)


def test_checked_messages_that_come_twice(tmp_path: Path) -> None:
    macros = ("LEASES=2", "CHECKED")
    check_holds(tmp_path, verify(tmp_path, macros), macros)


@pytest.mark.slow
@pytest.mark.parametrize(
    "macros",
    [("TWO_WORKERS",), ("FAULTS=2",), ("LEASES=2", "TWO_WORKERS", "FAULTS=2"), ("LEASES=2", "CHECKED", "FAULTS=2")],
    ids=["two_workers", "two_faults", "two_workers_two_faults", "checked_two_faults"],
)
def test_larger_bounds(tmp_path: Path, macros: tuple[str, ...]) -> None:
    check_holds(tmp_path, verify(tmp_path, macros), macros)


LOST_BLOCK = "(holder[0]==2)"
"""Of the assertion at the end of a run; the others are about writes, records and blocks given out again."""


@pytest.mark.parametrize(
    ("mistake", "lane"),
    [
        ("FREE_ON_TIMEOUT", ()),
        ("FREE_ON_ABORT", ()),
        ("FREE_ON_PEER_LOST", ()),
        ("ACCEPT_OLD_EPOCH", ()),
        ("ACCEPT_OLD_EPOCH", ("CHECKED",)),
        ("RESTART_IS_SAME_PEER", ()),
        ("NO_TOMBSTONES", ()),
        ("QUIESCED_BEFORE_FLUSH", ()),
        ("FREE_BEFORE_WINDOW_CLOSED", ("CHECKED",)),
    ],
)
def test_a_block_reused_too_early_is_noticed(tmp_path: Path, mistake: str, lane: tuple[str, ...]) -> None:
    verdict = verify(tmp_path, (*SMALL, *lane, mistake), ("-O0", *SAFETY[1:]))
    assert verdict.num_errors == 1, verdict.report
    assert "assertion violated" in verdict.violated
    assert LOST_BLOCK not in verdict.violated


@pytest.mark.parametrize("mistake", ["ABANDON_UNANSWERED", "NO_HARD_FENCE"])
def test_a_block_that_never_comes_back_is_noticed(tmp_path: Path, mistake: str) -> None:
    verdict = verify(tmp_path, (*SMALL, mistake), ("-O0", *SAFETY[1:]))
    assert verdict.num_errors == 1, verdict.report
    assert "assertion violated" in verdict.violated
    assert LOST_BLOCK in verdict.violated


def test_every_planted_mistake_is_named_in_the_model() -> None:
    """A macro that the model does not know would plant nothing."""
    model = MODEL.read_text(encoding="utf-8")
    head, _, body = model.partition("*/")
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", head)) - {"TWO_WORKERS"}
    assert named == {name for name in re.findall(r"(?:#ifn?def|defined\()\s*([A-Z]+(?:_[A-Z]+)+)", body) if name != "TWO_WORKERS"}
    planted = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', Path(__file__).read_text(encoding="utf-8"))) - {"TWO_WORKERS"}
    assert planted == named
