"""Pictures, as PNG bytes. No global state of matplotlib is touched; nothing here knows what a result is.

Those of single commands are in plots_<name>.py and draw through `png`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pd_serve.bench.errors import missing_library

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Told apart by the colour-blind as well. Source: Okabe and Ito 2008."""
LEAST = 0.01
"""On a logarithmic scale: what is less, gaps of tokens that came in one piece among it, is drawn here."""
_DPI = 110
_NUM_WINDOWS = 240
_LONGEST_BRIDGE = 8
_MAX_DOTS = 20_000

Points = Sequence[tuple[float, float]]


def png(draw: Callable[[Axes], None], title: str, size: tuple[float, float] = (8.0, 4.2)) -> bytes:
    """One set of axes that `draw` fills. `size` in inches. Raises BenchError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library("matplotlib", error) from error
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    draw(axes)
    axes.set_title(title, loc="left", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def cdf(series: Mapping[str, Sequence[float]], title: str, xlabel: str) -> bytes:
    """Share of values above x, one curve a series. Both scales are logarithmic: the tail is what counts."""

    def draw(axes: Axes) -> None:
        shown = {name: sorted(max(value, LEAST) for value in values) for name, values in series.items() if values}
        for color, (name, ordered) in zip(_colors(len(shown)), shown.items(), strict=True):
            count = len(ordered)
            axes.step(ordered, [1 - index / count for index in range(count)], where="post", label=name, color=color, linewidth=1.4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        if shown:
            axes.set_xlim(left=0.8 * min(ordered[len(ordered) // 100] for ordered in shown.values()))
        _write_plainly(axes.xaxis)
        _write_plainly(axes.yaxis)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("share of values above")
        _legend(axes, len(shown))

    return png(draw, title)


def timeline(series: Mapping[str, Points], title: str, ylabel: str) -> bytes:
    """Dots (seconds, value), and the largest value of each short window as a line; y is logarithmic."""

    def draw(axes: Axes) -> None:
        shown = {name: [(moment, max(value, LEAST)) for moment, value in points] for name, points in series.items() if points}
        end_s = max((points[-1][0] for points in map(sorted, shown.values())), default=0.0)
        for color, (name, points) in zip(_colors(len(shown)), shown.items(), strict=True):
            step = max(1, len(points) // _MAX_DOTS)
            axes.plot(*zip(*points[::step], strict=True), ".", markersize=2.5, alpha=0.4, color=color)
            axes.plot(*zip(*_highest(points, end_s), strict=True), linewidth=1.2, color=color, label=name)
        axes.set_yscale("log")
        if shown:
            low = min(sorted(value for _, value in points)[len(points) // 100] for points in shown.values())
            axes.set_ylim(bottom=0.8 * low)
        _write_plainly(axes.yaxis)
        axes.set_xlabel("seconds since the start")
        axes.set_ylabel(ylabel)
        _legend(axes, len(shown))

    return png(draw, title)


def lines(series: Mapping[str, Points], title: str, xlabel: str, ylabel: str, has_log_x: bool = False) -> bytes:
    """One line with marks a series, in the order of x."""

    def draw(axes: Axes) -> None:
        for color, (name, points) in zip(_colors(len(series)), series.items(), strict=True):
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1.4, color=color, label=name)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
        if has_log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _legend(axes, len(series))

    return png(draw, title)


def _highest(points: Points, end_s: float) -> list[tuple[float, float]]:
    """Of each of _NUM_WINDOWS windows; nan where there are none for a while, so that the line is broken there."""
    width = end_s / _NUM_WINDOWS or 1.0
    highest: dict[int, float] = {}
    for moment, value in points:
        window = int(moment / width)
        highest[window] = max(value, highest.get(window, value))
    line: list[tuple[float, float]] = []
    last = -1
    for window, value in sorted(highest.items()):
        if line and window - last > _LONGEST_BRIDGE:
            line.append((window * width, float("nan")))
        line.append(((window + 0.5) * width, value))
        last = window
    return line


def _write_plainly(axis: Axis) -> None:
    """A logarithmic one: 100 and 200, not powers of ten; what lies between the powers only where there are few of them."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def _colors(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _legend(axes: Axes, count: int) -> None:
    if count:
        axes.legend(frameon=False, fontsize=9, ncols=1 if count <= 8 else 2)
