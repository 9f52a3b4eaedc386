"""Latents and experts: logits are bit-identical whatever the chunk, the batch, the block order, the block size and the company."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_serve.engine.models import moe
from tests.accuracy.driver import Way, generate, make_runner

NUM_TOKENS = 4
LENGTHS = (1, 8, 65, 257)
WAYS = {
    "chunks of 64": Way(chunk=64),
    "one at a time": Way(batch=1),
    "chunks of 7, three at a time, shuffled": Way(chunk=7, batch=3, block_seed=6),
}
# Head and latent sizes of DeepSeek-V2-Lite and V3, whose kernels choose their ways by shape; few heads, experts and layers.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}


@pytest.fixture(params=[DEEPSEEK, QWEN3_MOE], ids=["deepseek-v3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(request.param))
    return tmp_path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(512) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_the_way(dtype: str, folder: Path, prompts: list[list[int]]) -> None:
    runner = make_runner(folder, dtype, load_format="random")
    _, expected = generate(runner, prompts, NUM_TOKENS, Way())
    for name, way in WAYS.items():
        _, logits = generate(runner, prompts, NUM_TOKENS, way)
        different = [LENGTHS[i] for i in range(len(prompts)) if not torch.equal(logits[i], expected[i])]
        assert not different, f"{dtype}, {name}: prompts of {different} tokens differ"
    other = make_runner(folder, dtype, block_size=48, num_blocks=64, load_format="random")
    _, logits = generate(other, prompts, NUM_TOKENS, Way(chunk=100, batch=3, block_seed=9))
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True)), "the block size matters"


def test_an_expert_with_room_for_so_many_tokens_only_is_caught(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What capacity-bound mixtures do: whoever comes late is not computed, so that company matters."""

    def with_capacity(self: moe.GatedMLP, x: torch.Tensor, num_decode_rows: int) -> torch.Tensor:
        out = compute(self, x, num_decode_rows)
        out[24:] = 0
        return out

    compute = moe.GatedMLP.__call__
    runner = make_runner(folder, "float32", load_format="random")
    monkeypatch.setattr(moe.GatedMLP, "__call__", with_capacity)
    _, expected = generate(runner, prompts, NUM_TOKENS, Way())
    _, logits = generate(runner, prompts, NUM_TOKENS, Way(chunk=7, batch=2))
    assert not all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
