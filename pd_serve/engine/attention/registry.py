"""Which attention runs on which device. Each implementation is imported only where it is used."""

from __future__ import annotations

import logging
from typing import Any

import torch

from pd_serve.engine.attention.base import ANY_LATENTS, AttentionBackend, AttentionGeometry, LatentSettings
from pd_serve.engine.native.operators import Operators
from pd_serve.errors import ConfigError

_log = logging.getLogger(__name__)


def attention_for(
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    device: torch.device,
    latents: LatentSettings = ANY_LATENTS,
    operators: Operators | None = None,
) -> AttentionBackend[Any]:
    """The plan type differs per implementation and is opaque to everyone else. `operators`: compiled ones, for pools of plain elements.

    Raises ConfigError where `latents` asks for what is not there.
    """
    if device.type == "cuda" and geometry.num_planes == 1:
        return _latent_attention_for(geometry, dtype, device, latents)
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

        from pd_serve.engine.attention.varlen import VarlenAttention

        return VarlenAttention(geometry, device, varlen_attn, varlen_attn_out)
    if operators is not None and geometry.num_planes == 2 and not geometry.softcap and not geometry.has_sinks:
        from pd_serve.engine.attention.native import NativeAttention

        return NativeAttention(geometry, operators)
    from pd_serve.engine.attention.cpu import CpuAttention

    return CpuAttention(geometry, dtype)


def reads_in_place(num_planes: int, device: torch.device) -> bool:
    """Whether attention reads pages as they lie in the pool, so that these must be of the engine's type. Latents are gathered."""
    return device.type == "cuda" and num_planes == 2


def _latent_attention_for(
    geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device, settings: LatentSettings
) -> AttentionBackend[Any]:
    from pd_serve.engine.attention.flashinfer_mla import FlashInferLatentAttention, open_kernels, takes
    from pd_serve.engine.attention.mla import LatentAttention

    is_wanted = settings.backend == "flashinfer"
    if settings.backend == "torch":
        return LatentAttention(geometry, dtype, device)
    if settings.has_scaled_cache or not takes(geometry, dtype):
        if is_wanted:
            raise ConfigError(
                "engine.latent_attention flashinfer takes latents of a multiple of 128 and rotated parts of a multiple of 64 elements,"
                " 16-bit types, and kv.dtype auto"
            )
        return LatentAttention(geometry, dtype, device)
    try:
        return FlashInferLatentAttention(geometry, dtype, open_kernels(device))
    except ConfigError as error:
        if is_wanted:
            raise
        _log.warning("attention over latents by plain torch products, which is slow: %s", error)
        return LatentAttention(geometry, dtype, device)
