"""What surrounds attention over latents (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1): projections, and their absorption.

A cached vector is (latent, rotated key part), one for all heads. With keys k = W_uk c and values v = W_uv c of a head,

    q . k = (W_uk^T q) . c        sum_i p_i v_i = W_uv (sum_i p_i c_i)

so queries are taken into the latents' space once, attention reads the cached vectors as they are, as keys and as values, and its results
are taken to values once: nothing is expanded for every key. Prefill and decode do the same, so a token's result depends on its phase alone.
Rotary pairs that are neighbours in a checkpoint are brought halves apart when weights are loaded: scores do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_serve.engine.latent_info import LatentInfo
from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import rotate_
from pd_serve.engine.parallel_shares import Share, scaled
from pd_serve.engine.weights import Part, WeightSource

_INNER_EPS = 1e-6
"""Of the norms on latents, whatever the config says of the others."""


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """Of one layer, for the rank's heads."""

    info: LatentInfo
    down: Linear
    """hidden -> (query latent, if queries are compressed; latent; rotated key part)"""
    query_norm: RMSNorm | None
    query: Linear
    """query latent or hidden -> per head (nope, rope)"""
    latent_norm: RMSNorm
    absorb: Linear
    """per head: nope -> latent space"""
    expand: Linear
    """per head: latent space -> value"""
    output: Linear

    def latents(self, hidden: Tensor, num_decode_rows: int, cosine: Tensor, signed_sine: Tensor) -> tuple[Tensor, Tensor]:
        """What is cached, [num_rows, 1, kv_rank + rope_head_dim], and what queries() wants."""
        query_rank, kv_rank = self.info.query_rank, self.info.kv_rank
        down = self.down(hidden, num_decode_rows)
        latent = self.latent_norm(down[:, query_rank : query_rank + kv_rank])
        rotated = down[:, None, query_rank + kv_rank :]
        rotate_(rotated, cosine, signed_sine)
        source = hidden if self.query_norm is None else self.query_norm(down[:, :query_rank])
        return torch.cat((latent[:, None], rotated), dim=-1), source

    def queries(self, source: Tensor, num_decode_rows: int, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        """[num_rows, num_heads, kv_rank + rope_head_dim], to be compared with cached vectors."""
        info, num_rows = self.info, source.shape[0]
        heads = self.query(source, num_decode_rows).view(num_rows, -1, info.nope_head_dim + info.rope_head_dim)
        rotated = heads[..., info.nope_head_dim :]
        rotate_(rotated, cosine, signed_sine)
        absorbed = self.absorb(heads[..., : info.nope_head_dim].reshape(num_rows, -1), num_decode_rows)
        return torch.cat((absorbed.view(num_rows, -1, info.kv_rank), rotated), dim=-1)

    def outputs(self, attended: Tensor, num_decode_rows: int) -> Tensor:
        """`attended` [num_rows, num_heads * (kv_rank + rope_head_dim)]: sums of cached vectors. To [num_rows, hidden_size], of the rank's
        heads alone."""
        info, num_rows = self.info, attended.shape[0]
        latents = attended.view(num_rows, -1, info.kv_rank + info.rope_head_dim)[..., : info.kv_rank]
        return self.output(self.expand(latents.reshape(num_rows, -1), num_decode_rows), num_decode_rows)


def load_projections(
    info: ModelInfo, latent: LatentInfo, weights: WeightSource, linears: LinearFactory, share: Share, layer: int
) -> LatentProjections:
    """Raises ModelError where a tensor is missing or has another shape than `info` says."""
    prefix = f"model.layers.{layer}.self_attn."
    heads, own_heads = info.num_heads, share.of(info.num_heads)
    query_size, value_size = latent.nope_head_dim + latent.rope_head_dim, latent.value_head_dim
    cached_size, hidden_size = latent.kv_rank + latent.rope_head_dim, info.hidden_size
    num_query_inputs = latent.query_rank or hidden_size

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(weights.get(f"{prefix}{name}.weight", (size,)), _INNER_EPS)

    def own(name: str, size: int, num_inputs: int) -> Tensor:
        """[own heads, size, num_inputs]"""
        part = Part(0, scaled(own_heads, size))
        return weights.get(f"{prefix}{name}.weight", (heads * size, num_inputs), part).view(-1, size, num_inputs)

    down = {"kv_a_proj_with_mqa": cached_size}
    if latent.query_rank:
        down = {"q_a_proj": latent.query_rank, **down}
    down_weight = torch.cat([weights.get(f"{prefix}{name}.weight", (size, hidden_size)) for name, size in down.items()])
    down_bias = torch.cat([weights.get(f"{prefix}{name}.bias", (size,)) for name, size in down.items()]) if info.has_qkv_bias else None
    rotary_rows = _halves_apart(latent, latent.query_rank + latent.kv_rank)
    query = own("q_b_proj" if latent.query_rank else "q_proj", query_size, num_query_inputs)
    query = query[:, _halves_apart(latent, latent.nope_head_dim)].reshape(-1, num_query_inputs)
    expanded = own("kv_b_proj", latent.nope_head_dim + value_size, latent.kv_rank)
    keys, values = expanded[:, : latent.nope_head_dim], expanded[:, latent.nope_head_dim :]
    output = weights.get(f"{prefix}o_proj.weight", (hidden_size, heads * value_size), Part(1, scaled(own_heads, value_size)))
    output_bias = weights.get(f"{prefix}o_proj.bias", (hidden_size,)) if info.has_output_bias and share.is_first else None
    return LatentProjections(
        info=latent,
        down=linears.make(down_weight[rotary_rows], None if down_bias is None else down_bias[rotary_rows]),
        query_norm=norm("q_a_layernorm", latent.query_rank) if latent.query_rank else None,
        query=linears.make(query),
        latent_norm=norm("kv_a_layernorm", latent.kv_rank),
        absorb=linears.make_per_head(keys.contiguous()),
        expand=linears.make_per_head(values.transpose(1, 2).contiguous()),
        output=linears.make(output, output_bias),
    )


def _halves_apart(latent: LatentInfo, num_before: int) -> Tensor:
    """Rows in their new order: `num_before` that stay, then the rotary ones."""
    rotary = torch.arange(latent.rope_head_dim)
    if latent.is_interleaved:
        rotary = torch.cat((rotary[0::2], rotary[1::2]))
    return torch.cat((torch.arange(num_before), num_before + rotary))
