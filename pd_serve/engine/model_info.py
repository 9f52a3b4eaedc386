"""What the engine knows of a model before any weight is read. Made by families/registry.describe from config.json; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.engine.experts_info import ExpertsInfo
from pd_serve.engine.latent_info import LatentInfo
from pd_serve.engine.rope import RopeParams


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps of each token."""

    num_planes: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A decoder-only transformer. Sizes are of the whole model, not of a shard."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeParams
    max_len: int
    """Longest prompt + output in tokens that the model was trained for."""
    eos_token_ids: tuple[int, ...]
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype: str
    """Type the checkpoint says it is in, such as `bfloat16`; empty where it does not say."""
    fingerprint: str
    """Equal for equal models (see Checkpoint.fingerprint): workers exchange KV only when it is."""
    layer_windows: tuple[int, ...] = ()
    """By layer: how many keys a query sees at most, its own included; 0: all. Empty: no layer has a window."""

    latent: LatentInfo | None = None
    """None: keys and values are cached. With latents num_kv_heads is 1 and head_dim that of the cached vector."""
    experts: ExpertsInfo | None = None
    """None: every layer has a plain MLP."""

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(2 if self.latent is None else 1, self.num_kv_heads, self.head_dim)
