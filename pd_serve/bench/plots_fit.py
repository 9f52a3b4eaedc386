"""The picture of `bench fit`: every case as fitted over as measured; on the diagonal they are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pd_serve.bench.plots import COLORS, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def fitted_against_measured(series: Mapping[str, Sequence[tuple[str, float, float]]]) -> bytes:
    """`series`: (name of the case, measured, fitted) in seconds. Raises BenchError without matplotlib."""

    def draw(axes: Axes) -> None:
        ends = [1e3 * value for cases in series.values() for _, *values in cases for value in values]
        low, high = min(ends) / 1.3, max(ends) * 1.3
        axes.plot([low, high], [low, high], color="#666666", linewidth=0.8)
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#666666", alpha=0.12, linewidth=0)
        for color, (name, cases) in zip(COLORS, series.items(), strict=False):
            axes.plot([1e3 * case[1] for case in cases], [1e3 * case[2] for case in cases], "o", markersize=5, color=color, label=name)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("measured, milliseconds (median of its case)")
        axes.set_ylabel("fitted, milliseconds")
        axes.legend(frameon=False, fontsize=9)

    return png(draw, "Steps as fitted and as measured; grey: within 10 %", (6.0, 5.0))
