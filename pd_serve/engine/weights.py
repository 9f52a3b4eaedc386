"""Where a model's tensors come from: a checkpoint, or a seed for benchmarks without one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.errors import ModelError

KEPT_WIDE = ("e_score_correction_bias",)
"""Tensors whose names end so are given in float32 whatever the engine's type: they are compared after an addition, not multiplied."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank takes of a tensor: a run of indices along one dimension (0: outputs of a matrix, 1: its inputs)."""

    dim: int
    indices: range

    def slices(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(self.indices.start, self.indices.stop))


class WeightSource(Protocol):
    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The tensor, or `part` of it, in the engine's dtype (but for KEPT_WIDE) on its device; `shape` is that of the whole tensor in any
        case.

        Raises ModelError where it is missing or has another shape.
        """
        ...


class CheckpointWeights:
    """Reads one tensor at a time from safetensors, of a part only its own bytes; opened files stay open until the object goes."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, safe_open] = {}

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        entry = self._checkpoint.tensors.get(name)
        if entry is None:
            raise ModelError(f"{self._checkpoint.path} has no tensor {name}")
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}; config.json asks for {list(shape)}")
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            file = self._open[entry.file]
            tensor: Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part.slices()]  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {entry.file}: {error}") from error
        return tensor.to(device=self._device, dtype=torch.float32 if name.endswith(KEPT_WIDE) else self._dtype)


class RandomWeights:
    """Normal weights of deviation 0.02, norms of one; equal in every process that uses the seed: a tensor is drawn from (seed, name).

    A part is cut out of the whole tensor, so that ranks together hold what one rank would.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        if name.endswith("norm.weight"):
            whole = torch.ones(shape, dtype=self._dtype, device=self._device)
        else:
            digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            whole = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        tensor = whole if part is None else whole[part.slices()].clone()
        return tensor.to(device=self._device, dtype=torch.float32 if name.endswith(KEPT_WIDE) else self._dtype)
