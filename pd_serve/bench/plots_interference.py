"""Pictures of `bench interference`: gaps over time with the long prompts marked, their tail, and their figures as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pd_serve.bench.plots import COLORS, Points, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis

STATISTICS = ("p50", "mean", "p90", "p99", "p999", "max")


def gaps_over_time(arms: Mapping[str, Points], arrivals: Sequence[float], title: str) -> bytes:
    """`arms`: (seconds, gap in milliseconds) of each victim token; `arrivals`: seconds at which a long prompt was sent."""

    def draw(axes: Axes) -> None:
        for color, (name, points) in zip(COLORS, arms.items(), strict=False):
            axes.plot(*zip(*points, strict=True), ".", markersize=2.5, alpha=0.5, color=color, label=name)
        for index, moment in enumerate(arrivals):
            axes.axvline(moment, color="#666666", linewidth=0.8, linestyle=":", label="" if index else "long prompt")
        axes.set_yscale("log")
        _plain(axes.yaxis)
        axes.set_xlabel("seconds since the start of the run")
        axes.set_ylabel("gap between two tokens, milliseconds")
        axes.legend(frameon=False, fontsize=9, markerscale=4, loc="upper right")

    return png(draw, title, (10.0, 4.6))


def tails(arms: Mapping[str, Sequence[float]], baselines: Mapping[str, Sequence[float]], title: str) -> bytes:
    """Share of gaps (milliseconds) above x, both axes logarithmic; baselines dashed in their arm's colour."""

    def draw(axes: Axes) -> None:
        for color, name in zip(COLORS, arms, strict=False):
            for values, style, label in ((arms[name], "-", name), (baselines.get(name, ()), "--", f"{name}, no long prompts")):
                if values:
                    ordered = sorted(values)
                    shares = [1 - index / len(ordered) for index in range(len(ordered))]
                    axes.step(ordered, shares, style, where="post", color=color, linewidth=1.4, label=label)
        axes.set_xscale("log")
        _plain(axes.xaxis)
        axes.set_yscale("log")
        axes.set_xlabel("gap between two tokens, milliseconds")
        axes.set_ylabel("share of gaps above")
        axes.legend(frameon=False, fontsize=9)

    return png(draw, title)


def bars(arms: Mapping[str, Mapping[str, float]], title: str) -> bytes:
    """Each statistic of the gaps (`itl_s.*`) by arm, its baseline (`baseline_itl_s.*`) as a line across the bar; logarithmic."""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(arms)
        for index, (color, (name, figures)) in enumerate(zip(COLORS, arms.items(), strict=False)):
            places = [place + (index - (len(arms) - 1) / 2) * width for place in range(len(STATISTICS))]
            values = [1e3 * figures.get(f"itl_s.{statistic}", 0.0) for statistic in STATISTICS]
            drawn = axes.bar(places, values, width * 0.92, color=color, label=name)
            axes.bar_label(drawn, [f"{value:.3g}" for value in values], fontsize=8, padding=1)
            baseline = [1e3 * figures.get(f"baseline_itl_s.{statistic}", 0.0) for statistic in STATISTICS]
            lows, highs = [place - width * 0.46 for place in places], [place + width * 0.46 for place in places]
            axes.hlines(baseline, lows, highs, color="black", linewidth=1.2, label="no long prompts" if index == 0 else "")
        axes.set_yscale("log")
        _plain(axes.yaxis)
        axes.set_ylim(top=2 * axes.get_ylim()[1])
        axes.set_xticks(range(len(STATISTICS)), ["p99.9" if statistic == "p999" else statistic for statistic in STATISTICS])
        axes.set_ylabel("gap between two tokens, milliseconds")
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)

    return png(draw, title)


def _plain(axis: XAxis | YAxis) -> None:
    """Numbers instead of powers on a logarithmic axis."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")
