"""How a figure is written for people: its unit is the end of its name (results.py says which there are)."""

from __future__ import annotations


def shown(name: str, value: float) -> str:
    """Such as `itl_s.p99`, 0.0123 -> `12.3 ms`."""
    base = name.partition(".")[0].partition("[")[0]
    if base.endswith("bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if base.endswith("_per_s"):
        return f"{value:.4g} /s"
    if base.endswith("duration_s"):
        return f"{value:.1f} s"
    if base.endswith("_s"):
        return _milliseconds(value)
    if base.endswith("bytes"):
        return f"{value / 2**20:.2f} MiB" if value >= 2**20 else f"{value:.0f} B"
    if base.endswith(("_share", "_rate", "_attainment")) and 0 <= value <= 1:
        return f"{value:.1%}"
    return f"{int(value)}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    if abs(value) >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.1f} ms" if abs(value) >= 10 else f"{value:.3g} ms"
