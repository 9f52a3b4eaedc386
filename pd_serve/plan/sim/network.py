"""The links between workers: each has one NIC with a line each way, which serve what is sent in the order in which it was begun.

What goes from one worker to another takes both lines at once, so two transfers that share either of them wait for each other. KV goes out
layer by layer while it is computed: the transfer may begin when the first layer is there, and ends at the earliest when the last layer,
which is there with the end of compute, has crossed.

    compute      |--layer--|--layer--|--layer--|
    transfer                |.......|.......|.......|  ends at max(begin + nbytes / rate, compute's end + nbytes / rate / layers)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSpec:
    bytes_per_s: float
    """Of each worker's NIC, each way."""
    setup_s: float = 0.0
    """Of each transfer, on both lines: what it costs before the first byte."""
    is_layerwise: bool = True
    """KV is sent while the rest is computed; otherwise when all of a step is."""


class Nic:
    """Of one worker. Until when each line has something to send."""

    __slots__ = ("in_free_at", "nbytes_in", "nbytes_out", "out_free_at")

    def __init__(self) -> None:
        self.out_free_at = 0.0
        self.in_free_at = 0.0
        self.nbytes_out = 0
        self.nbytes_in = 0


def transfer(
    link: LinkSpec, source: Nic, target: Nic, nbytes: int, computed: tuple[float, float], num_layers: int, is_first: bool
) -> float:
    """Queue the KV of what one step computes between two moments. Returns when all of it has arrived, in seconds of the same clock.

    `is_first`: of its request, which pays for the set-up. Precondition: calls come in the order in which steps begin.
    """
    begin, end = computed
    if not nbytes:
        return end
    there = begin + (end - begin) / num_layers if link.is_layerwise else end
    starts = max(there, source.out_free_at, target.in_free_at)
    lasts = nbytes / link.bytes_per_s
    ready = starts + (link.setup_s if is_first else 0.0) + lasts
    source.out_free_at = target.in_free_at = ready
    source.nbytes_out += nbytes
    target.nbytes_in += nbytes
    return max(ready, end + lasts / num_layers) if link.is_layerwise else ready
