"""How large a model is, from its config: for sizing the KV pool before any weight is read. No torch."""

from __future__ import annotations

from pd_serve.engine.model_info import ModelInfo


def num_parameters(info: ModelInfo, num_ranks: int = 1) -> int:
    """Elements of the matrices that the fullest rank of `num_ranks` holds; norms and biases, left out, are about a thousandth."""
    num_embeddings = 1 if info.has_tied_embeddings else 2
    shared_out = info.num_layers * _attention(info) + sum(_mlp(info, layer) for layer in range(info.num_layers))
    return shared_out // num_ranks + num_embeddings * info.vocab_size * info.hidden_size


def num_active_parameters(info: ModelInfo) -> int:
    """Elements that take part in computing one token: of each mixture the experts that are chosen, and the router."""
    experts = info.experts
    if experts is None:
        return num_parameters(info)
    num_idle = len(experts.sparse_layers) * (experts.num_experts - experts.num_chosen)
    return num_parameters(info) - num_idle * 3 * info.hidden_size * experts.intermediate_size


def _attention(info: ModelInfo) -> int:
    latent = info.latent
    if latent is None:
        return info.hidden_size * info.head_dim * (2 * info.num_heads + 2 * info.num_kv_heads)
    query = info.num_heads * (latent.nope_head_dim + latent.rope_head_dim)
    query_size = latent.query_rank * (info.hidden_size + query) if latent.query_rank else info.hidden_size * query
    cached = info.hidden_size * (latent.kv_rank + latent.rope_head_dim)
    expanded = latent.kv_rank * info.num_heads * (latent.nope_head_dim + latent.value_head_dim)
    return query_size + cached + expanded + info.num_heads * latent.value_head_dim * info.hidden_size


def _mlp(info: ModelInfo, layer: int) -> int:
    experts = info.experts
    if experts is None or layer not in experts.sparse_layers:
        return 3 * info.hidden_size * info.intermediate_size
    inner = experts.num_experts * experts.intermediate_size + experts.shared_intermediate_size
    return info.hidden_size * (3 * inner + experts.num_experts)
