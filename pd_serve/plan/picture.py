"""Pictures of costs. Called by `pd-serve plan cost --plot`."""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.bench import plots
from pd_serve.plan.cost import Setting, hand_over
from pd_serve.plan.hardware import Link

_SHORTEST, _LONGEST = 64, 131_072


def ratio_picture(setting: Setting, links: Sequence[Link]) -> bytes:
    """PNG: transfer by prefill over prompt length, a line for each link, and of the narrowest what layer by layer leaves exposed. Raises
    BenchError without matplotlib, naming the extra."""
    lengths: list[int] = []
    length = _SHORTEST
    while length <= max(_SHORTEST, min(_LONGEST, setting.shape.max_len or _LONGEST)):
        lengths.append(length)
        length *= 2
    series = {link.name: [(n, 100 * hand_over(setting, n, link).share) for n in lengths] for link in links}
    narrow = min(links, key=lambda link: link.bytes_per_s)
    series[f"{narrow.name}, exposed"] = [(n, 100 * hand_over(setting, n, narrow).exposed_share) for n in lengths]
    title = f"{setting.shape.name}, {setting.dtype.value}: moving a prompt's KV beside computing it"
    return plots.lines(series, title, "prompt tokens", "percent of prefill", has_log_x=True)
