"""`make bench-gpu`: the GPU path against its limits, in under eight minutes. NOT YET RUN ON A GPU.

    python -m tests.bench.gpu [--out bench-results/gpu.json] [--parts decode,prefill] [--block-size 256] [--json]
    python -m tests.bench.gpu --rehearse        every part at toy sizes on the CPU: no figure means anything

Every part is a process of its own with a deadline of its own: one that fails, or brings the device down, is told of and does not stop the
others. Limits are measured first, and the others are shown as a share of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.bench.gpu_figures import Figure, Limits, Task

MAX_TOTAL_S = 480


@dataclass(frozen=True)
class Part:
    function: str
    """module:name, called with the Task in a process of its own."""
    limit_s: int


PARTS: Mapping[str, Part] = {
    "limits": Part("tests.bench.gpu_engine:measure_limits", 25),
    "decode": Part("tests.bench.gpu_engine:measure_decode", 70),
    "prefill": Part("tests.bench.gpu_engine:measure_prefill", 45),
    "sampler": Part("tests.bench.gpu_engine:measure_sampler", 40),
    "transfer": Part("tests.bench.gpu_transfer:measure_transfer", 40),
    "handover": Part("tests.bench.gpu_serving:measure_handover", 80),
    "interference": Part("tests.bench.gpu_serving:measure_interference", 170),
}


class PartResult(msgspec.Struct, frozen=True):
    name: str
    seconds: float
    figures: tuple[Figure, ...] = ()
    error: str = ""
    """Empty: it ended well."""


class Report(msgspec.Struct, frozen=True):
    device: str
    is_rehearsal: bool
    parts: tuple[PartResult, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.run:
        _run_here(PARTS[options.run], Path(options.task), Path(options.answer))
        return 0
    device = "rehearsal on a CPU" if options.rehearse else _device_name()
    if device is None:
        print("bench-gpu: torch sees no CUDA device here (a rehearsal on the CPU: python -m tests.bench.gpu --rehearse)", file=sys.stderr)
        return 1
    names = options.parts.split(",") if options.parts else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        print(f"bench-gpu: no part {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        from tests.bench.gpu_model import write_model

        model = write_model(Path(folder) / "llama", "tiny" if options.rehearse else "big")
        task = Task("cpu" if options.rehearse else "cuda", str(model), options.block_size, Limits())
        parts = run_parts({name: PARTS[name] for name in names}, task, Path(folder), lambda name: _child(name, Path(folder)))
    report = Report(device, options.rehearse, tuple(parts))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report)
    return 0 if all(not part.error for part in parts) else 1


def run_parts(parts: Mapping[str, Part], task: Task, folder: Path, command: Callable[[str], list[str]]) -> list[PartResult]:
    """One after the other, whatever becomes of each; what `limits` finds goes to those behind it."""
    results = []
    for name, part in parts.items():
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        print(f"bench-gpu: {name} (at most {part.limit_s} s)", file=sys.stderr)
        result = _run_child(name, part, command(name), folder / f"{name}.json")
        results.append(result)
        if name == "limits" and not result.error:
            copied, multiplied = (figure.value for figure in result.figures)
            task = msgspec.structs.replace(task, limits=Limits(copied * 1e9, multiplied * 1e12))
    return results


def _run_child(name: str, part: Part, command: list[str], answer: Path) -> PartResult:
    started = time.monotonic()
    # A group of its own: what the part has started ends with it.
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = child.communicate(timeout=part.limit_s)
        error = "" if child.returncode == 0 else _last_line(errors) or f"it ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        _end_group(child)
        error = f"not done within {part.limit_s} s"
    figures: tuple[Figure, ...] = ()
    if not error:
        figures = msgspec.json.decode(answer.read_bytes(), type=tuple[Figure, ...])
    return PartResult(name, round(time.monotonic() - started, 2), figures, error)


def _end_group(child: subprocess.Popen[str]) -> None:
    import psutil

    family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=5)
    child.communicate()


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _run_here(part: Part, task: Path, answer: Path) -> None:
    module, _, name = part.function.partition(":")
    figures: list[Figure] = getattr(import_module(module), name)(msgspec.json.decode(task.read_bytes(), type=Task))
    answer.write_bytes(msgspec.json.encode(figures))


def _child(name: str, folder: Path) -> list[str]:
    places = ["--task", str(folder / "task.json"), "--answer", str(folder / f"{name}.json")]
    return [sys.executable, "-m", "tests.bench.gpu", "--run", name, *places]


def _device_name() -> str | None:
    """In a process of its own: the parts find the device untouched."""
    script = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return found.stdout.strip() or None


def _show(report: Report) -> None:
    table = Table("part", "figure", "value", "", "of the limit", title=report.device)
    for part in report.parts:
        if part.error:
            table.add_row(part.name, f"failed: {part.error}", "", "", "")
        for figure in part.figures:
            ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} of {figure.of}"
            table.add_row(part.name, figure.name, f"{figure.value:.4g}", figure.unit, ratio)
        table.add_row(part.name, "took", f"{part.seconds:.0f}", "s", "", end_section=True)
    Console(width=140).print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-results/gpu.json"), help="file for the figures, JSON")
    parser.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--block-size", type=int, default=256, help="tokens per KV block")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name in ("--run", "--task", "--answer"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
