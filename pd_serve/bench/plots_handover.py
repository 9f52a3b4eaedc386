"""Pictures of `bench handover`: one request's way as a waterfall, its layers' compute and pushes, and the phases' medians by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pd_serve.bench.passage import COMPUTE, FIRST_STEP, Passage
from pd_serve.bench.plots import COLORS, png
from pd_serve.protocol.worker_traces import Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLACES = {"client": 0, "router": 1, "link": 5, "decode": 2, "prefill": 3, "transfer": 4}
_MIN_SHARE = 0.002
"""Of the width: what is shorter is drawn that long, to be seen at all."""
_COMPUTE_SHARE = 0.4
"""Length at which a longer compute is drawn, by all that is none."""


def waterfall(passage: Passage, title: str) -> bytes:
    """A row for each phase, from the client's send to the end of the first decode step. What is computed is drawn shorter than it takes:
    all that is between would vanish beside it.
    """
    phases = (*passage.path, *passage.decode)
    origin, compute_end_s = phases[0].begin_s, passage.compute_end_s
    compute = next(phase for phase in phases if phase.name == COMPUTE)
    shown_s = _COMPUTE_SHARE * sum(phase.seconds for phase in phases if phase.name not in (COMPUTE, FIRST_STEP))
    cut_s = max(0.0, compute.seconds - shown_s)

    def draw(axes: Axes) -> None:
        seen: set[str] = set()
        for row, phase in enumerate(phases):
            begin_ms = 1e3 * (phase.begin_s - origin - (cut_s if phase.begin_s >= compute_end_s else 0.0))
            is_cut = phase.name in (COMPUTE, FIRST_STEP) and phase.seconds > shown_s
            length_ms = 1e3 * (shown_s if is_cut else phase.seconds)
            color, label = COLORS[_PLACES[phase.place]], "" if phase.place in seen else phase.place
            seen.add(phase.place)
            axes.barh(
                row, length_ms, 0.7, begin_ms, color=color, label=label, hatch="//" if is_cut else None, edgecolor="white", linewidth=0
            )
            axes.text(begin_ms + length_ms, row, f" {1e3 * phase.seconds:,.2f} ms", va="center", fontsize=8)
        axes.axvline(1e3 * (compute_end_s - origin - cut_s), color="#666666", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(phases)), [phase.name for phase in phases])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.set_xlabel(
            "milliseconds since the client sent the request; hatched: drawn shorter than it is; dotted: end of prefill's compute"
        )
        axes.legend(frameon=False, fontsize=8, loc="lower left")

    return png(draw, title, (10.0, 5.4))


def layers(transfer: Transfer, title: str) -> bytes:
    """Compute of each layer of each chunk, from the writing of its KV to that of the next layer, and below it its push."""

    def draw(axes: Axes) -> None:
        ordered = sorted(transfer.layers, key=lambda layer: layer.kv_written_s)
        ends = [layer.kv_written_s for layer in ordered[1:]] + [transfer.compute_end_s]
        least_ms = 1e3 * _MIN_SHARE * max(transfer.flushed_s, transfer.compute_end_s)
        for index, (layer, end_s) in enumerate(zip(ordered, ends, strict=True)):
            compute = "compute, from KV written" if index == 0 else ""
            push = "push, to the flush's answer" if index == 0 else ""
            axes.barh(layer.layer - 0.2, 1e3 * (end_s - layer.kv_written_s), 0.4, 1e3 * layer.kv_written_s, color=COLORS[0], label=compute)
            length_ms = max(least_ms, 1e3 * (layer.push_end_s - layer.push_start_s))
            axes.barh(layer.layer + 0.2, length_ms, 0.4, 1e3 * layer.push_start_s, color=COLORS[1], label=push, zorder=3)
        axes.axvline(1e3 * transfer.compute_end_s, color="black", linewidth=1.0, linestyle=":", label="end of compute")
        axes.axvline(1e3 * transfer.flushed_s, color=COLORS[1], linewidth=1.0, linestyle=":", label="all flushed")
        axes.set_xlabel("milliseconds since the first layer's KV was written")
        axes.set_ylabel("layer")
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=8, loc="lower left")

    return png(draw, title, (10.0, 5.4))


def medians(by_length: Mapping[str, Mapping[str, float]], title: str) -> bytes:
    """Median seconds of each phase, a bar for each length; logarithmic."""
    names: Sequence[str] = list(next(iter(by_length.values())))

    def draw(axes: Axes) -> None:
        height = 0.8 / len(by_length)
        for index, (color, (length, phases)) in enumerate(zip(COLORS, by_length.items(), strict=False)):
            places = [row + (index - (len(by_length) - 1) / 2) * height for row in range(len(names))]
            values = [max(1e-3, 1e3 * phases.get(name, 0.0)) for name in names]
            drawn = axes.barh(places, values, height * 0.92, color=color, label=length)
            axes.bar_label(drawn, [f"{value:.3g}" for value in values], fontsize=7, padding=2)
        axes.set_xscale("log")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("median, milliseconds")
        axes.legend(frameon=False, fontsize=9, title="tokens")

    return png(draw, title, (9.0, 6.4))
