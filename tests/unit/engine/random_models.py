"""Random checkpoints of any architecture that the engine builds: it is asked which tensors it wants."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pd_serve.engine.families.registry import describe
from pd_serve.engine.models.registry import build_model
from pd_serve.engine.models.settings import BuildSettings
from pd_serve.engine.parallel import SingleRank
from pd_serve.engine.weights import Part
from tests.unit.engine.model_folders import write_config


def write_random_model(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """TINY_CONFIG with `changes`; every tensor random, biases and norms too: at 0 and 1 they would hide a mistake."""
    write_config(folder, **changes)
    wanted = _Wanted()
    settings = BuildSettings(16, 64, torch.float32, torch.device("cpu"), SingleRank())
    build_model(describe(folder, has_weights=False), wanted, settings)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(wanted.shapes.items()):
        noise = torch.randn(shape, generator=generator)
        tensors[name] = noise * 0.2 + 1.0 if "norm" in name else noise * 0.3
    save_file(tensors, folder / "model.safetensors")
    return folder


class _Wanted:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        self.shapes[name] = shape
        whole = torch.zeros(shape)
        return whole if part is None else whole[part.slices()]
