"""The drawings of a plan, as PNG bytes, through bench/plots.py. Nothing here knows what a fleet is; pictures.py does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from pd_serve.bench.plots import COLORS, Points, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (8.0, 4.2)
_LEAST_SHARE = 1e-4
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def over_rate(series: Mapping[str, Points], marked: Sequence[float], title: str, xlabel: str) -> bytes:
    """Shares from 0 to 1 over a rate on a logarithmic scale, one line with marks a series; `marked` shares as dashed lines."""

    def draw(axes: Axes) -> None:
        for color, mark, (name, points) in zip(cycle(COLORS), cycle(_MARKS), series.items(), strict=False):
            rates, shares = zip(*sorted(points), strict=True)
            axes.plot(rates, [100 * share for share in shares], marker=mark, markersize=4, linewidth=1.4, color=color, label=name)
        for share in marked:
            axes.axhline(100 * share, color="#555555", linewidth=0.9, linestyle="--")
            axes.annotate(f"{share:.0%}", (1.0, 100 * share), xycoords=("axes fraction", "data"), fontsize=8, va="bottom", ha="right")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        axes.set_ylim(0, 103)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("% of requests within both limits")
        _legend(axes, len(series))

    return png(draw, title, _SIZE)


def share_above(series: Mapping[str, Points], limit: float, title: str, xlabel: str) -> bytes:
    """Points (value, share of values above it), both scales logarithmic; `limit` as a dashed line, 0: none."""

    def draw(axes: Axes) -> None:
        for color, (name, points) in zip(cycle(COLORS), series.items(), strict=False):
            shown = [(value, share) for value, share in points if value > 0 and share >= _LEAST_SHARE]
            if shown:
                axes.step(*zip(*shown, strict=True), where="post", label=name, color=color, linewidth=1.4)
        if limit:
            axes.axvline(limit, color="#555555", linewidth=0.9, linestyle="--")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(_LEAST_SHARE, 1.1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(xlabel)
        axes.set_ylabel("share of values above")
        _legend(axes, len(series))

    return png(draw, title, _SIZE)


def over_time(series: Mapping[str, Points], title: str, ylabel: str, highest: float = 0.0) -> bytes:
    """Points (seconds, value), as steps. `highest`: where the scale ends; 0: by itself."""

    def draw(axes: Axes) -> None:
        for color, (name, points) in zip(cycle(COLORS), series.items(), strict=False):
            if points:
                axes.step(*zip(*points, strict=True), where="post", label=name, color=color, linewidth=1.2)
        axes.set_ylim(bottom=0, top=highest or None)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel(ylabel)
        _legend(axes, len(series))

    return png(draw, title, _SIZE)


def heat_map(values: Mapping[tuple[int, int], float], title: str, xlabel: str, ylabel: str) -> bytes:
    """A cell for each (x, y) with its value written in it; cells that have none are left white, the highest has a frame."""
    columns, rows = (range(1, max((cell[axis] for cell in values), default=1) + 1) for axis in (0, 1))
    size = (max(4.0, 1.6 + 0.75 * len(columns)), max(3.2, 1.4 + 0.5 * len(rows)))

    def draw(axes: Axes) -> None:
        grid = [[values.get((x, y), float("nan")) for x in columns] for y in rows]
        most = max(values.values(), default=0.0)
        axes.grid(visible=False)
        axes.imshow(grid, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=2 * most or 1.0)
        for (x, y), value in values.items():
            is_best = value == most
            axes.text(x - 1, y - 1, f"{value:.3g}", ha="center", va="center", fontsize=9, fontweight="bold" if is_best else "normal")
            if is_best and most:
                axes.plot(
                    [x - 1.45, x - 0.55, x - 0.55, x - 1.45, x - 1.45], [y - 1.45, y - 1.45, y - 0.55, y - 0.55, y - 1.45], color="#d55e00"
                )
        axes.set_xticks([x - 1 for x in columns], [str(x) for x in columns])
        axes.set_yticks([y - 1 for y in rows], [str(y) for y in rows])
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)

    return png(draw, title, size)


def _legend(axes: Axes, count: int) -> None:
    if count:
        axes.legend(frameon=False, fontsize=9, ncols=1 if count <= 8 else 2)
