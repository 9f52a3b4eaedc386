"""A process of a search: `python -m pd_serve.plan.curve_process`. First line: Scenario; then CurveTasks, each answered by a Curve."""

from __future__ import annotations

import sys
from typing import BinaryIO

import msgspec

from pd_serve.errors import PdServeError
from pd_serve.plan.curve import goodput_curve
from pd_serve.plan.scenario import Scenario
from pd_serve.plan.search import CurveTask
from pd_serve.plan.trials import Trials


def answer(lines: BinaryIO, out: BinaryIO) -> None:
    """Until the lines end. Raises PdServeError."""
    trials = Trials(msgspec.json.decode(lines.readline(), type=Scenario))
    for line in lines:
        task = msgspec.json.decode(line, type=CurveTask)
        curve = goodput_curve(task.candidate, trials.evaluate, task.start, task.attainments)
        out.write(msgspec.json.encode(curve) + b"\n")
        out.flush()


def main() -> int:
    try:
        answer(sys.stdin.buffer, sys.stdout.buffer)
    except PdServeError as error:
        print(error.message, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
