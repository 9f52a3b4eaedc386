"""What a Gemma 3 GGUF file calls its tensors, and what the config of the model it was made from says. Called by gguf_convert.

llama.cpp adds one to the weights of all norms, and drops what is the same in all of Gemma 3: the pattern of layers, the local rotary base.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pd_serve.model_store.gguf_fields import GGUFFields

LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = 6
_LOCAL_ROPE_THETA = 10000.0


def read_config(fields: GGUFFields, *, tied: bool) -> dict[str, object]:
    """config.json but for the token ids. Raises KeyError, ValueError for what the file does not say."""
    num_layers, head_dim = fields.integer("gemma3.block_count"), fields.integer("gemma3.attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": fields.integer("gemma3.embedding_length"),
        "intermediate_size": fields.integer("gemma3.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": fields.integer("gemma3.attention.head_count"),
        "num_key_value_heads": fields.integer("gemma3.attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "max_position_embeddings": fields.integer("gemma3.context_length"),
        "rms_norm_eps": fields.decimal("gemma3.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("gemma3.rope.freq_base"),
        "rope_local_base_freq": _LOCAL_ROPE_THETA,
        "sliding_window": fields.integer("gemma3.attention.sliding_window"),
        "layer_types": ["sliding_attention" if (layer + 1) % _PATTERN else "full_attention" for layer in range(num_layers)],
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "dtype": "bfloat16",
    }


def restore(_fields: GGUFFields, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tensor as the checkpoint has it; `name` as in the file."""
    return values - np.float32(1) if name.endswith("norm.weight") else values
