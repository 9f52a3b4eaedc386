"""What a part of `make bench-gpu` is told, and what it answers. No torch."""

from __future__ import annotations

import msgspec


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str
    ratio: float | None = None
    """Of the limit that `of` names; 1: the limit itself."""
    of: str = ""


class Limits(msgspec.Struct, frozen=True):
    """As measured by the first part; 0: that part failed, and nothing is compared."""

    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0


class Task(msgspec.Struct, frozen=True):
    device: str
    """`cuda`, or `cpu` for a rehearsal."""
    folder: str
    """The model's."""
    block_size: int
    limits: Limits

    @property
    def is_rehearsal(self) -> bool:
        """Sizes are small, and no figure means anything."""
        return self.device == "cpu"


def share(ideal: float, measured: float) -> float | None:
    """Of two times; None where there is no ideal to compare with."""
    return ideal / measured if ideal else None
