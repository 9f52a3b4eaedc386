"""Models without a module of their own: their tokens are those of transformers, and what our attention does not do is refused at load."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from pd_serve.engine.batch import BatchEntry, Phase
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.errors import ModelError
from pd_serve.ids import AttemptId
from tests.accuracy.driver import Way, generate, make_runner
from tests.accuracy.test_greedy_equals_transformers import NUM_TOKENS, transformers_generate
from tests.accuracy.tiny_models import SIZES

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    name: (lambda name=name, changes=changes: _tiny(name, changes))
    for name, changes in {
        "Olmo2": {},
        "Granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
        "Starcoder2": {"sliding_window": 70},
        "Cohere": {"logit_scale": 0.5},
        "Gemma2": {"head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 4.0},
        "Phi": {},
        "GptOss": {"head_dim": 16, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    }.items()
}


def _tiny(name: str, changes: Mapping[str, Any]) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def save_fallback_model(name: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(11)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.2)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", sorted(MODELS))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_fallback_model(name, tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 211) for _ in range(length)] for length in (1, 17, 65, 130)]
    expected = transformers_generate(model, prompts, NUM_TOKENS)
    tokens, _ = generate(make_runner(tmp_path, "float32"), prompts, NUM_TOKENS, Way(chunk=50, batch=4, block_seed=2))
    assert tokens == expected


def test_each_layers_kv_is_announced_before_its_attention(tmp_path: Path) -> None:
    save_fallback_model("Olmo2", tmp_path)
    runner = make_runner(tmp_path, "float32")
    seen: list[tuple[int, bool]] = []

    def on_layer(index: int) -> None:
        rows = runner.cache.rows(torch.arange(5))
        written = bool((runner.cache.read(index, rows) != 0).all())
        later = index + 1 < 3 and bool((runner.cache.read(index + 1, rows) != 0).any())
        seen.append((index, written and not later))

    inputs = build_step_inputs([BatchEntry(AttemptId(0), Phase.PREFILL, (5, 6, 7, 8, 9), 0, (0,), None)], 16, torch.device("cpu"))
    with torch.inference_mode():
        assert runner.forward(inputs, on_layer).shape == (0, 211)
    assert seen == [(0, True), (1, True), (2, True)]


def test_random_weights_are_equal_in_every_process(tmp_path: Path) -> None:
    save_fallback_model("Starcoder2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    runners = [make_runner(tmp_path, "float32", load_format="random") for _ in range(2)]
    first, second = (generate(runner, [[5, 6, 7]], 8, Way())[1] for runner in runners)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("StableLm", {}, "does not attend through transformers' attention interface"),
        ("Mamba", {}, "recurrent layers"),
        ("Olmo2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary scaling 'dynamic'"),
        ("Bloom", {"n_head": 4}, "ALiBi"),
        ("Falcon", {"alibi": True}, "ALiBi"),
        ("Qwen3Next", {"linear_num_key_heads": 2, "linear_num_value_heads": 2}, "layers of type linear_attention"),
        ("MiniCPM3", {}, "latent attention"),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "OPT"),
        ("Jamba", {}, "recurrent layers"),
    ],
)
def test_what_our_attention_does_not_do_is_refused_by_name(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        make_runner(tmp_path, "float32", load_format="random")
    assert "\n" not in str(caught.value)


def test_a_model_that_attends_otherwise_is_caught_by_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: positions that do not come from the step."""
    save_fallback_model("Olmo2", tmp_path)
    forward = transformers.models.olmo2.modeling_olmo2.Olmo2RotaryEmbedding.forward

    def from_zero(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(transformers.models.olmo2.modeling_olmo2.Olmo2RotaryEmbedding, "forward", from_zero)
    with pytest.raises(ModelError, match="its logits are off"):
        make_runner(tmp_path, "float32")
