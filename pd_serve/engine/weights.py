"""Where a model's tensors come from: a checkpoint, or a seed for benchmarks without one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.errors import ModelError


class WeightSource(Protocol):
    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the engine's dtype on its device. Raises ModelError where it is missing or has another shape."""
        ...


class CheckpointWeights:
    """Reads one tensor at a time from safetensors; opened files stay open until the object goes."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, safe_open] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entry = self._checkpoint.tensors.get(name)
        if entry is None:
            raise ModelError(f"{self._checkpoint.path} has no tensor {name}")
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}; config.json asks for {list(shape)}")
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            tensor: Tensor = self._open[entry.file].get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {entry.file}: {error}") from error
        return tensor.to(device=self._device, dtype=self._dtype)


class RandomWeights:
    """Normal weights of deviation 0.02, norms of one; equal in every process that uses the seed: a tensor is drawn from (seed, name)."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator).to(device=self._device, dtype=self._dtype)
