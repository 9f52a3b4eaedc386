"""What those that compile C for this machine share: the processor it is for, and a run of the compiler. Used by engine and transport."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pd_serve.errors import PdServeError


def processor() -> str:
    """What -march=native looks at: model and flags of the first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "stepping", "flags", "Features")))


def run_compiler(command: Sequence[str], what: str, time_limit_s: float, failure: type[PdServeError]) -> None:
    """`what` is built by the command. Raises `failure` with the compiler's words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=time_limit_s)
    except subprocess.TimeoutExpired as error:
        raise failure(f"{command[0]} did not end within {time_limit_s:g} s") from error
    if done.returncode != 0:
        raise failure(f"{command[0]} cannot build {what}: {done.stderr.strip()[-1000:]}")
