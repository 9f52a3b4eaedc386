"""Latents and experts: logits are bit-identical whatever the chunk, the batch, the block order, the block size and the company."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.engine.batch import BatchEntry, Phase, SampleSpec
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.models import moe
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.ids import AttemptId
from tests.accuracy.driver import GREEDY, Way, generate, make_runner

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


def test_latents_may_lie_in_either_order_and_in_eight_bits(prompts: list[list[int]], tmp_path: Path) -> None:
    """The order is without meaning for one head; eight bits cost a little, and as little whatever the chunk."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    _, expected = generate(make_runner(tmp_path, "float32", load_format="random"), prompts, NUM_TOKENS, Way())

    def logits_of(kv: dict[str, Any], way: Way) -> list[torch.Tensor]:
        sections = {"model": {"dtype": "float32", "load_format": "random"}, "kv": {"num_blocks": 64, **kv}, "engine": {"device": "cpu"}}
        runner = load_runner(plan_engine(tmp_path, Config.model_validate(sections)), None, MonotonicClock())
        return [_first_logits(runner, prompt, way.chunk) for prompt in prompts]

    for mine, theirs in zip(logits_of({"order": "head_major"}, Way(chunk=10)), expected, strict=True):
        assert torch.equal(mine, theirs[0])
    small = logits_of({"dtype": "fp8_e4m3"}, Way())
    for mine, theirs in zip(small, expected, strict=True):
        assert 0 < float((mine - theirs[0]).abs().max()) < 0.1 * float(theirs[0].abs().max())
    assert all(torch.equal(a, b) for a, b in zip(small, logits_of({"dtype": "fp8_e4m3"}, Way(chunk=10)), strict=True))


def _first_logits(runner: ModelRunner[Any], prompt: list[int], chunk: int) -> torch.Tensor:
    """[vocab_size], of the prompt's last token."""
    size = runner.cache.layout.block_size
    table = tuple(range(-(-len(prompt) // size)))
    logits = torch.empty(0)
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        sample = SampleSpec(GREEDY, end, 0) if end == len(prompt) else None
        entry = BatchEntry(AttemptId(1), Phase.PREFILL, tuple(prompt[start:end]), start, table, sample)
        with torch.inference_mode():
            logits = runner.forward(build_step_inputs([entry], size, torch.device("cpu")))
    return logits[0]


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
