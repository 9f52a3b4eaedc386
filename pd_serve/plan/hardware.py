"""Links and accelerators by name, with the sources of their figures. They are peaks: what is reached of them the user says, or measures."""

from __future__ import annotations

import re

import msgspec

from pd_serve.plan.errors import PlanError


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One path, one way."""

    name: str
    bytes_per_s: float
    source: str


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    bf16_flop_per_s: float
    """Dense: tables that count sparsity say twice as much."""
    memory_nbytes: float
    memory_bytes_per_s: float
    source: str


_NVLINK = "NVIDIA data sheets: half of the bandwidth they give, which counts both ways"
LINKS = (
    Link(
        "shm",
        5e9,
        "pd-serve's shared-memory lane, one core copying, as measured on a small VM (docs/benchmarks.md); measure yours: bench transfer",
    ),
    Link("pcie4", 31.5e9, "PCI Express 4.0, 16 lanes, 128b/130b"),
    Link("pcie5", 63e9, "PCI Express 5.0, 16 lanes, 128b/130b"),
    Link("nvlink3", 300e9, f"A100; {_NVLINK}"),
    Link("nvlink", 450e9, f"fourth generation, H100 and H200; {_NVLINK}"),
    Link("nvlink5", 900e9, f"B200; {_NVLINK}"),
)
LINE_RATE = "line rate; protocols leave about nine tenths of it"
ACCELERATORS = (
    Accelerator("L4", 121e12, 24e9, 300e9, "NVIDIA L4 data sheet"),
    Accelerator("L40S", 362e12, 48e9, 864e9, "NVIDIA L40S data sheet"),
    Accelerator("A100", 312e12, 80e9, 2.039e12, "NVIDIA A100 80GB SXM data sheet"),
    Accelerator("H100", 989e12, 80e9, 3.35e12, "NVIDIA H100 SXM data sheet"),
    Accelerator("H200", 989e12, 141e9, 4.8e12, "NVIDIA H200 SXM data sheet"),
    Accelerator("B200", 2250e12, 180e9, 8e12, "NVIDIA DGX B200 data sheet, an eighth of it"),
    Accelerator("MI300X", 1307e12, 192e9, 5.3e12, "AMD Instinct MI300X data sheet"),
)
_FASTEST = 1e15
"""Bytes per second; the slowest is 1."""
_RATE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*(gb/s|gbps|gbit/s|g|gib/s|mb/s|b/s)?", re.IGNORECASE)


def link(text: str) -> Link:
    """A name of LINKS; `400` or `400Gb/s`, bits at line rate; `12.5GB/s` or `12500000000B/s`, bytes as measured. Raises PlanError."""
    word = text.strip()
    named = next((each for each in LINKS if each.name == word.lower()), None)
    if named is not None:
        return named
    match = _RATE.fullmatch(word)
    unit = (match[2] or "Gb/s") if match else ""
    if match is None or not (per_unit := _bytes_of(unit)) or not 1 <= float(match[1]) * per_unit <= _FASTEST:
        names = ", ".join(each.name for each in LINKS)
        raise PlanError(f"{text!r} is no link: expected {names}, gigabits such as 400 or 400Gb/s, or measured bytes such as 12.5GB/s")
    number = float(match[1])
    if per_unit == 1e9 / 8:
        return Link(f"{number:g} Gb/s", number * per_unit, LINE_RATE)
    return Link(f"{number * per_unit / 1e9:.3g} GB/s", number * per_unit, "as given")


def accelerator(name: str) -> Accelerator:
    """Raises PlanError."""
    found = next((each for each in ACCELERATORS if each.name.lower() == name.strip().lower()), None)
    if found is None:
        known = ", ".join(each.name for each in ACCELERATORS)
        raise PlanError(f"no figures for a GPU {name!r}: expected {known}; for another give its effective TFLOP/s")
    return found


def _bytes_of(unit: str) -> float:
    """B is bytes, b is bits; 0.0 where neither is meant."""
    if unit in ("GB/s", "MB/s", "B/s", "b/s", "GiB/s"):
        return {"GB/s": 1e9, "MB/s": 1e6, "B/s": 1.0, "GiB/s": float(1 << 30)}.get(unit, 0.0)
    return 1e9 / 8 if unit.lower() in ("gb/s", "gbps", "gbit/s", "g") else 0.0
