"""The pictures of a run of `bench interference`, as PNG files beside its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pd_serve.bench.interference_turns import Measured
from pd_serve.bench.plots_interference import bars, gaps_over_time, tails
from pd_serve.bench.report import write_picture
from pd_serve.bench.results import ArmResult
from pd_serve.bench.victims import LONG, Round


def draw_interference(path: Path, measured: Mapping[str, Measured], results: Mapping[str, ArmResult]) -> tuple[str, ...]:
    """`path`: the result's. Returns the names of the files. Raises BenchError."""
    over_time = {name: sorted((moment, 1e3 * gap) for moment, gap in found.injected[0].gaps) for name, found in measured.items()}
    first = next(iter(measured.values())).injected[0]
    arrivals = sorted(record.planned_s for record in first.of_kind(LONG))
    drawn = {
        "gaps-over-time": gaps_over_time(over_time, arrivals, "Gaps between the victims' tokens, first round"),
        "gaps-tail": tails(
            {name: _lengths_ms(found.injected) for name, found in measured.items()},
            {name: _lengths_ms(found.baseline) for name, found in measured.items()},
            "Gaps between the victims' tokens",
        ),
        "gaps": bars({name: arm.figures for name, arm in results.items()}, "Gaps between the victims' tokens while long prompts arrive"),
    }
    return tuple(write_picture(path, name, data) for name, data in drawn.items())


def _lengths_ms(rounds: Sequence[Round]) -> list[float]:
    return [1e3 * length for one in rounds for _, length in one.gaps]
