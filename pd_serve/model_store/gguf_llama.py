"""What a llama GGUF file calls its tensors, and what the config of the model it was made from says. Called by gguf_convert.

llama.cpp stores the rows of the q and k projections in pairs (for its interleaved rotary embedding); transformers wants halves. Undoing
that permutation and dequantizing gives tensors bit-equal to what transformers itself reads from the file.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pd_serve.model_store.gguf_fields import GGUFFields

LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_config(fields: GGUFFields, *, tied: bool) -> dict[str, object]:
    """config.json but for the token ids. Raises KeyError, ValueError for what the file does not say."""
    hidden_size, num_heads = fields.integer("llama.embedding_length"), fields.integer("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": fields.integer("llama.context_length"),
        "rms_norm_eps": fields.decimal("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("llama.rope.freq_base"),
        "vocab_size": fields.integer("llama.vocab_size"),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


def restore(fields: GGUFFields, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tensor as the checkpoint has it; `name` as in the file."""
    if name.endswith("attn_q.weight"):
        return _unpermute(values, fields.integer("llama.attention.head_count"))
    if name.endswith("attn_k.weight"):
        return _unpermute(values, fields.integer("llama.attention.head_count_kv"))
    return values


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs (x0 y0 x1 y1 …) back to halves (x0 x1 … y0 y1 …); `weight` is [num_heads * head_dim, hidden]."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
