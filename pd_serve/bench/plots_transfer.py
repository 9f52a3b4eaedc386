"""Pictures of `bench transfer`: bandwidth over the size of a write, and KV of whole prompts by state of the pool. One lane each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_serve.bench.plots import COLORS, png
from pd_serve.bench.transfer import Outcome
from pd_serve.bench.transfer_cases import KVCase, PoolState, RunsCase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GB = 1e9
_LINES = (
    ("bytes_per_s", "pd-serve", "o-"),
    ("perftest_bytes_per_s", "ucx_perftest, active messages", "s-"),
    ("memcpy_same_ranges_bytes_per_s", "memcpy of the same ranges", ":"),
    ("memcpy_bytes_per_s", "memcpy, one call", "--"),
)


def transfer_pictures(outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """PNG by a short name. Raises BenchError without matplotlib."""
    drawn: dict[str, bytes] = {}
    for lane in dict.fromkeys(outcome.lane for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.lane == lane]
        if runs := [outcome for outcome in mine if isinstance(outcome.case, RunsCase)]:
            drawn[f"runs-{lane}"] = _runs(runs, f"Writes of one size in random order, {lane}")
        if kv := [outcome for outcome in mine if isinstance(outcome.case, KVCase)]:
            drawn[f"kv-{lane}"] = _kv(kv, f"KV of a whole prompt, {lane}; above the bars: part of memcpy of the same ranges")
    return drawn


def _runs(outcomes: Sequence[Outcome], title: str) -> bytes:
    sizes = [outcome.case.run_nbytes for outcome in outcomes if isinstance(outcome.case, RunsCase)]

    def draw(axes: Axes) -> None:
        for color, (figure, label, style) in zip(COLORS, _LINES, strict=False):
            known = [(size, outcome.figures().get(figure, 0.0) / _GB) for size, outcome in zip(sizes, outcomes, strict=True)]
            if points := [point for point in known if point[1]]:
                axes.plot(*zip(*points, strict=True), style, color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [outcome.case.name.partition(" (")[0] for outcome in outcomes])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("bytes of a write")
        axes.set_ylabel("GB/s")
        axes.legend(frameon=False, fontsize=8)

    return png(draw, title)


def _kv(outcomes: Sequence[Outcome], title: str) -> bytes:
    layouts = list(dict.fromkeys(outcome.layout for outcome in outcomes))
    width = 0.8 / (len(PoolState) + 1)

    def draw(axes: Axes) -> None:
        for place, (color, state) in enumerate(zip(COLORS, PoolState, strict=False)):
            chosen = [outcome for outcome in outcomes if isinstance(outcome.case, KVCase) and outcome.case.state is state]
            bars = axes.bar(
                [index + place * width for index in range(len(chosen))],
                [outcome.bytes_per_s / _GB for outcome in chosen],
                width,
                color=color,
                label=f"{state.value} pool",
            )
            axes.bar_label(bars, [f"{outcome.figures()['of_memcpy_same_ranges_ratio']:.2f}" for outcome in chosen], fontsize=8)
        memcpy = [
            max(outcome.figures()["memcpy_bytes_per_s"] for outcome in outcomes if outcome.layout == layout) / _GB for layout in layouts
        ]
        places = [index + len(PoolState) * width for index in range(len(layouts))]
        axes.bar(places, memcpy, width, color="#bbbbbb", label="memcpy, one call")
        axes.set_xticks([index + len(PoolState) * width / 2 for index in range(len(layouts))], layouts)
        axes.set_xlabel("layout: layers x KV heads x head dim x block size")
        axes.set_ylabel("GB/s")
        axes.legend(frameon=False, fontsize=8)

    return png(draw, title)
