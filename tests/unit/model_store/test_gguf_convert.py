from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pd_serve.engine.families.registry import describe
from pd_serve.errors import ModelError
from pd_serve.model_store.gguf_convert import convert_gguf
from pd_serve.model_store.progress import ignore_progress
from pd_serve.model_store.safetensors_file import round_to_bfloat16, write_bfloat16
from tests.unit.model_store.tiny_gguf import NUM_HEADS, TEMPLATE, check_tensors, write_tiny_gguf


def test_tensors_come_back_unpermuted_under_transformers_names(tmp_path: Path) -> None:
    expected = write_tiny_gguf(tmp_path / "tiny.gguf")
    check_tensors(tmp_path / "tiny.gguf", expected)


def test_the_folder_describes_itself(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)
    info = describe(tmp_path)
    assert (info.architecture, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (
        "LlamaForCausalLM",
        2,
        NUM_HEADS,
        2,
        8,
    )
    assert (info.max_len, info.eos_token_ids, info.has_tied_embeddings, info.norm_eps) == (128, (2,), True, 1e-5)


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_and_template(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, ignore_progress)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>he12").tokens == ["<|im_start|>", "he", "1", "2"]
    text = "heé 🙂 12\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_progress_ends_complete(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    seen: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda _what, done, total: seen.append((done, total)))
    assert seen[0] == (0, 0)
    assert seen[-1] == (20, 20)


def test_other_architectures_and_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", architecture="gemma")
    with pytest.raises(ModelError, match="not 'gemma'"):
        convert_gguf(tmp_path / "a.gguf", tmp_path, ignore_progress)
    write_tiny_gguf(tmp_path / "b.gguf", pre="llama-bpe")
    with pytest.raises(ModelError, match="gpt2/llama-bpe"):
        convert_gguf(tmp_path / "b.gguf", tmp_path, ignore_progress)


def test_a_damaged_file_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, ignore_progress)


def test_bfloat16_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal(100_000).astype(np.float32)
    ties = (rng.integers(0, 0x7F00, 1000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate((values, ties, np.array([0.0, -0.0, 1e-40], np.float32)))
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bfloat16(values), expected)


def test_a_tensor_of_another_shape_than_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="announced"):
        write_bfloat16(tmp_path / "x.safetensors", [("x", (2, 3))], [np.zeros((3, 2), np.float32)])
