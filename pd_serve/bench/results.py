"""The result of one measurement as a file: what was run on what, with which settings, and every figure by arm. Records lie beside it.

One shape for all commands, so that compare and report take any of them: an arm's figures are flat names (`itl_s.p99`) with numbers.
Names of seconds end in `_s` before the statistic; `_per_s`, `_ratio`, `_share` and `_bytes` likewise say their unit.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pd_serve import __version__
from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineLoad
from pd_serve.bench.records import RequestRecord
from pd_serve.cores import usable_cores

SCHEMA = 1
DEFAULT_FOLDER = Path("bench-results")

Scalar = str | int | float | bool
Config = dict[str, dict[str, Scalar]]
"""Settings by process name: dotted key -> value."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cpu: str
    cores: int
    kernel: str
    python: str
    gpu: str = ""


class ArmResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    figures: dict[str, float]
    records: str = ""
    """File of RequestRecords as JSON lines, relative to the result's own; empty: none."""
    parameters: dict[str, Scalar] = {}
    """What this arm alone was run with, such as `rate`."""


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    kind: str
    """The command that made it."""
    name: str
    started_at: str
    """ISO 8601, UTC."""
    version: str
    command: str
    machine: Machine
    load: MachineLoad
    config: Config
    parameters: dict[str, Scalar]
    arms: dict[str, ArmResult]
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    """PNG files that belong to it, relative to the result's own."""


class ConfigDifference(msgspec.Struct, frozen=True):
    """A setting that is not the same on both sides; None: the process or the key is not there."""

    process: str
    key: str
    a: Scalar | None
    b: Scalar | None


class Described(msgspec.Struct, frozen=True):
    """What a result says about itself besides its figures: the group of parameters for `new_result`."""

    kind: str
    name: str
    parameters: dict[str, Scalar]
    config: Config = {}
    notes: tuple[str, ...] = ()


def new_result(described: Described, load: MachineLoad, arms: dict[str, ArmResult], started_at: str = "") -> Result:
    """With version, command line and machine filled in. `started_at`: of `now_iso()` at the start."""
    return Result(
        schema=SCHEMA,
        kind=described.kind,
        name=described.name,
        started_at=started_at or now_iso(),
        version=__version__,
        command=shlex.join(["pd-serve", *sys.argv[1:]]),
        machine=this_machine(),
        load=load,
        config=described.config,
        parameters=described.parameters,
        arms=arms,
        notes=described.notes,
    )


def now_iso() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_machine() -> Machine:
    return Machine(_cpu_name(), usable_cores(), platform.release(), platform.python_version())


def result_path(out: Path | None, kind: str, name: str) -> Path:
    """Where a result goes: `out` as given when it ends in .json, else a new name in that folder (by default bench-results)."""
    if out is not None and out.suffix == ".json":
        return out
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    parts = [part for part in (kind, re.sub(r"[^\w.-]+", "-", name).strip("-"), stamp) if part]
    return (out or DEFAULT_FOLDER) / f"{'-'.join(parts)}.json"


def write_result(path: Path, result: Result) -> None:
    """Raises BenchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def read_result(path: Path) -> Result:
    """Raises BenchError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is no result of pd-serve bench: {error}") from error
    if result.schema != SCHEMA:
        raise BenchError(f"{path} has schema {result.schema}, this version reads {SCHEMA}")
    return result


def write_records(result_path: Path, arm: str, records: Iterable[RequestRecord]) -> str:
    """Beside the result; returns the name to put into its ArmResult. Raises BenchError."""
    name = f"{result_path.stem}.{re.sub(r'[^A-Za-z0-9_.=-]+', '-', arm)}.jsonl"
    try:
        result_path.parent.mkdir(parents=True, exist_ok=True)
        with (result_path.parent / name).open("wb") as file:
            for record in records:
                file.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise BenchError(f"cannot write {result_path.parent / name}: {error.strerror}") from error
    return name


def read_records(result_path: Path, arm: ArmResult) -> list[RequestRecord]:
    """Empty for an arm that has none. Raises BenchError."""
    if not arm.records:
        return []
    path = result_path.parent / arm.records
    decoder = msgspec.json.Decoder(RequestRecord)
    try:
        return [decoder.decode(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} holds no records: {error}") from error


def diff_config(a: Config, b: Config) -> tuple[ConfigDifference, ...]:
    """In the order of names; a process that only one side has differs in every key."""
    differences: list[ConfigDifference] = []
    for process in sorted(a.keys() | b.keys()):
        mine, theirs = a.get(process, {}), b.get(process, {})
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                differences.append(ConfigDifference(process, key, mine.get(key), theirs.get(key)))
    return tuple(differences)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
