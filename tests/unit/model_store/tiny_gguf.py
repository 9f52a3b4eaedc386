"""A GGUF file of a tiny llama with SmolLM's kind of tokenizer, as llama.cpp would write it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from pd_serve.model_store.gguf_convert import convert_gguf
from pd_serve.model_store.progress import ignore_progress

NUM_HEADS, NUM_KV_HEADS, HIDDEN, MLP = 4, 2, 32, 48
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"

_LAYER_SHAPES = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of bytes that byte-level BPE uses (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def write_tiny_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> dict[str, NDArray[np.float32]]:
    """Returns the tensors as transformers names and orders them; q and k go into the file permuted as llama.cpp does."""
    tokens = [*SPECIAL, *byte_tokens(), "12", "he"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens": ("token_embd", (len(tokens), HIDDEN)), "model.norm": ("output_norm", (HIDDEN,))}
    for layer in range(2):
        for name, shape in _LAYER_SHAPES.items():
            tensors[f"model.layers.{layer}.{_transformers_name(name)}"] = (f"blk.{layer}.{name}", shape)
    written: dict[str, NDArray[np.float32]] = {}
    for name, (gguf_name, shape) in tensors.items():
        values = rng.standard_normal(shape).astype(np.float32)
        written[f"{name}.weight"] = values
        if gguf_name.endswith(("attn_q", "attn_k")):
            values = _permute(values, NUM_HEADS if gguf_name.endswith("attn_q") else NUM_KV_HEADS)
        writer.add_tensor(f"{gguf_name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _permute(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute."""
    return np.ascontiguousarray(
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    )


def _transformers_name(name: str) -> str:
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if name in norms:
        return norms[name]
    kind, part = name.split("_")
    return f"self_attn.{part[0]}_proj" if kind == "attn" else f"mlp.{part}_proj"


def check_tensors(file: Path, expected: dict[str, NDArray[np.float32]]) -> None:
    """Convert the file, in its folder: just these tensors come out, in bfloat16."""
    convert_gguf(file, file.parent, ignore_progress)
    tensors = load_file(file.parent / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.from_numpy(expected[name]).to(torch.bfloat16)), name
