"""Which attention runs on which device. Each implementation is imported only where it is used."""

from __future__ import annotations

from typing import Any

import torch

from pd_serve.engine.attention.base import AttentionBackend, AttentionGeometry


def attention_for(geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device) -> AttentionBackend[Any]:
    """The plan type differs per implementation and is opaque to everyone else."""
    if device.type == "cuda" and geometry.num_planes == 1:
        from pd_serve.engine.attention.mla import LatentAttention

        return LatentAttention(geometry, dtype, device)
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        from pd_serve.engine.attention.varlen import VarlenAttention

        return VarlenAttention(geometry, device, varlen_attn)
    from pd_serve.engine.attention.cpu import CpuAttention

    return CpuAttention(geometry, dtype)


def reads_in_place(num_planes: int, device: torch.device) -> bool:
    """Whether attention reads pages as they lie in the pool, so that these must be of the engine's type. Latents are gathered."""
    return device.type == "cuda" and num_planes == 2
