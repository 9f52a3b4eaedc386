"""Gemma 3, Phi-3 and models run by transformers: what their configs say, in old and new spelling, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_serve.engine.families.fallback import FallbackInfo
from pd_serve.engine.families.gemma3 import Gemma3Info
from pd_serve.engine.families.registry import describe
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeType
from pd_serve.errors import ModelError
from tests.unit.engine.model_folders import write_config

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "head_dim": 16,
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
    "tie_word_embeddings": None,
    "rope_theta": None,
}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"]}
OLMO2: dict[str, Any] = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


def _describe(folder: Path, config: dict[str, Any], **changes: object) -> ModelInfo:
    return describe(write_config(folder, **{**config, **changes}), has_weights=False)


def test_gemma3_has_local_and_global_layers(tmp_path: Path) -> None:
    info = _describe(tmp_path, GEMMA3)
    assert isinstance(info, Gemma3Info)
    assert info.layer_windows == (64, 64, 64, 64, 64, 0, 64)
    assert (info.rope.theta, info.local_rope.theta, info.query_scale, info.has_tied_embeddings) == (1e6, 1e4, 0.125, True)


def test_gemma3_rope_is_read_in_both_spellings(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = _describe(tmp_path, GEMMA3, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=scaling)
    new = _describe(
        tmp_path,
        GEMMA3,
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert isinstance(old, Gemma3Info)
    assert isinstance(new, Gemma3Info)
    assert (old.rope, old.local_rope) == (new.rope, new.local_rope)
    assert (old.rope.rope_type, old.local_rope.rope_type) == (RopeType.LINEAR, RopeType.DEFAULT)


def test_a_model_without_a_module_of_its_own_is_described_by_transformers(tmp_path: Path) -> None:
    info = _describe(tmp_path, OLMO2, sliding_window=32, layer_types=["sliding_attention", "full_attention"])
    assert isinstance(info, FallbackInfo)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim, info.layer_windows) == (2, 4, 2, 8, (32, 0))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA3, {"use_bidirectional_attention": True}, "bidirectional"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"hidden_activation": "relu"}, "activation relu"),
        (GEMMA3, {"layer_types": ["full_attention"] * 3}, "3 layer_types for 7 layers"),
        (PHI3, {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "'longrope' is not supported"),
        (PHI3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'longrope' is not supported"),
        (PHI3, {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4}}, "partial rotary"),
        (OLMO2, {"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
        (OLMO2, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary scaling 'dynamic'"),
        (OLMO2, {"hidden_size": "wide"}, "transformers cannot read the config"),
        (OLMO2, {"architectures": ["NoSuchForCausalLM"]}, "not supported .NoSuchForCausalLM"),
    ],
)
def test_what_is_not_honoured_is_refused_in_one_line(config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        _describe(tmp_path, config, **changes)
    assert "\n" not in str(caught.value)
