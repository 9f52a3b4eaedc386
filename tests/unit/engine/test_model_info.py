from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.engine.families.registry import describe
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeType
from pd_serve.errors import ModelError
from tests.unit.engine.model_folders import write_checkpoint, write_config


def _describe(folder: Path, **changes: object) -> ModelInfo:
    return describe(write_config(folder, **changes), has_weights=False)


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    info = _describe(tmp_path)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim, info.vocab_size, info.max_len) == (2, 4, 2, 8, 97, 256)
    assert _describe(tmp_path, head_dim=16).head_dim == 16
    assert _describe(tmp_path, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, True)),
    ],
)
def test_families_differ_in_biases_and_norms(architecture: str, changes: dict[str, object], expected: object, tmp_path: Path) -> None:
    info = _describe(tmp_path, architectures=[architecture], **changes)
    assert (info.has_qkv_bias, info.has_output_bias, info.has_qk_norm) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "not supported .GPT2LMHeadModel"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights .awq"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention are not supported"),
        ({"num_key_value_heads": 3}, "shared evenly"),
        ({"head_dim": 7}, "odd"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32', not an integer"),
        ({"vocab_size": True}, "not an integer"),
    ],
)
def test_what_is_not_honoured_is_refused_in_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        _describe(tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, (64, 64)),
        ({"sliding_window": 64, "use_sliding_window": False}, ()),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, ()),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (0, 64)),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2}, ()),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, (0, 64)),
        ({"sliding_window": None}, ()),
    ],
)
def test_each_layer_has_its_window(changes: dict[str, object], windows: tuple[int, ...], tmp_path: Path) -> None:
    info = _describe(tmp_path, **changes)
    assert (info.layer_windows, info.max_len) == (windows, 256)


def test_rope_is_read_in_both_spellings(tmp_path: Path) -> None:
    old = _describe(tmp_path, rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 4.0}).rope
    new = _describe(tmp_path, rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}).rope
    assert old == new
    assert (old.rope_type, old.factor, old.theta) == (RopeType.LINEAR, 4.0, 500000.0)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert _describe(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert _describe(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text("{}")
    assert _describe(tmp_path).eos_token_ids == (2,)
    assert _describe(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_missing_or_broken_config_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        describe(tmp_path)


def test_fingerprint_tells_models_apart_and_copies_alike(tmp_path: Path) -> None:
    first = describe(write_checkpoint(tmp_path / "a")).fingerprint
    assert describe(write_checkpoint(tmp_path / "b")).fingerprint == first
    assert describe(write_checkpoint(tmp_path / "other-weights", seed=1)).fingerprint != first
    assert describe(write_checkpoint(tmp_path / "other-config", rope_theta=5.0)).fingerprint != first
    assert describe(write_config(tmp_path / "random"), has_weights=False).fingerprint.startswith("random-")
