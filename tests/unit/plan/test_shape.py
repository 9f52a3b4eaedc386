"""KV and arithmetic of a model, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.engine.families.registry import describe
from pd_serve.errors import ModelError
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.kv.routes import plan_routes
from pd_serve.plan.errors import PlanError
from pd_serve.plan.models import model_shape, read_shape, with_params
from pd_serve.plan.published import PUBLISHED
from pd_serve.plan.shape import ModelShape

BF16, FP8 = KVDtype.BFLOAT16, KVDtype.FP8_E4M3

PARAMETERS = {
    "Llama-3.2-1B": (1.24, 1.24),
    "Llama-3.2-3B": (3.21, 3.21),
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3.1-70B": (70.6, 70.6),
    "Llama-3.1-405B": (405, 405),
    "Qwen3-0.6B": (0.6, 0.6),
    "Qwen3-1.7B": (1.7, 1.7),
    "Qwen3-4B": (4.0, 4.0),
    "Qwen3-8B": (8.2, 8.2),
    "Qwen3-14B": (14.8, 14.8),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Mistral-7B-v0.1": (7.24, 7.24),
    "Mistral-7B-v0.3": (7.25, 7.25),
    "Mixtral-8x7B-v0.1": (46.7, 12.9),
    "gemma-3-270m": (0.268, 0.268),
    "gemma-3-27b-it": (27.0, 27.0),
    "DeepSeek-V2-Lite": (15.7, 2.66),
    "DeepSeek-V3": (671, 37.6),
    "DeepSeek-R1": (671, 37.6),
    "SmolLM2-135M-Instruct": (0.1345, 0.1345),
}
"""Billions in all and for one token, as their cards or reports give them (DeepSeek-V3's 37 does not count the embedding table twice)."""


def config_file(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("name", [each.name for each in PUBLISHED])
def test_published_sizes_add_up_to_published_parameters(name: str) -> None:
    shape = model_shape(name)
    billions, active = PARAMETERS[name]
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.02)
    assert shape.num_active_params / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.source.startswith("https://")
    assert shape.notes == ()


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b", "Meta-Llama-3.1-70B"])
def test_a_published_model_is_found_in_all_its_variants(name: str) -> None:
    assert model_shape(name).num_layers == 80


@pytest.mark.parametrize(("name", "layers"), [("demo", 30), ("demo-gemma3", 18)])
def test_bundled_models_need_no_conversion(name: str, layers: int) -> None:
    assert model_shape(name).num_layers == layers


def test_a_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    path = config_file(tmp_path, **LLAMA)
    shape = model_shape(str(path))
    assert shape == model_shape(str(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.source) == (2, 8, str(path))
    info = describe(tmp_path, has_weights=False)
    layout = KVLayout(info.num_layers, info.kv_shape.num_heads, info.kv_shape.head_dim, 16, 8, BF16)
    assert shape.bytes_per_token(BF16) == layout.bytes_per_token == 2 * 4 * 2 * 8 * 2


def test_fp8_of_tables_is_half_and_ours_a_byte_more_per_token_head_and_plane() -> None:
    shape = model_shape("Llama-3.1-70B")
    assert shape.bytes_per_token(FP8, has_scales=False) * 2 == shape.bytes_per_token(BF16)
    assert shape.bytes_per_token(FP8) - shape.bytes_per_token(FP8, has_scales=False) == 2 * 80 * 8
    latents = model_shape("DeepSeek-V3")
    assert latents.bytes_per_token(FP8) - latents.bytes_per_token(FP8, has_scales=False) == 61


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_ranks_beyond_the_kv_heads_hold_copies(tp: int, heads: int) -> None:
    shape = model_shape("Llama-3.1-70B")
    assert shape.rank_bytes_per_token(BF16, tp) == 2 * 80 * heads * 128 * 2
    sent = shape.sent_bytes_per_token(BF16, tp)
    assert sent == shape.bytes_per_token(BF16) * max(1, tp // 8)
    routed = sum(route.heads.num_heads for route in plan_routes(8, 4, tp))
    assert sent == routed * 2 * 80 * 128 * 2, "what the transport's own routes move"


def test_latents_are_whole_on_every_rank() -> None:
    shape = model_shape("DeepSeek-V3")
    assert shape.rank_bytes_per_token(BF16, 8) == shape.bytes_per_token(BF16) == 70_272
    assert shape.sent_bytes_per_token(BF16, 8) == 8 * 70_272


@pytest.mark.parametrize("tp", [3, 5, 128])
def test_a_degree_that_heads_cannot_be_shared_out_to_is_refused(tp: int) -> None:
    with pytest.raises(PlanError, match="cannot be shared out"):
        model_shape("Llama-3.1-70B").rank_bytes_per_token(BF16, tp)


def test_a_window_bounds_what_is_seen() -> None:
    mistral, gemma = model_shape("Mistral-7B-v0.1"), model_shape("gemma-3-27b-it")
    assert (mistral.seen_tokens(1000), mistral.seen_tokens(32_768)) == (1000, 4096)
    assert gemma.seen_tokens(32_768) == (52 * 1024 + 10 * 32_768) / 62
    assert not model_shape("Llama-3.1-8B").is_windowed


def brute_pairs(num_tokens: int, behind: int, window: int) -> int:
    return sum(min(place + 1, window or place + 1) for place in range(behind, behind + num_tokens))


@pytest.mark.parametrize("window", [0, 1, 5, 16])
@pytest.mark.parametrize("behind", [0, 3, 5, 30])
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_attention_counts_every_pair_once(num_tokens: int, behind: int, window: int) -> None:
    shape = ModelShape(
        name="x", source="", num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8, num_planes=2, query_dim=8, value_dim=8,
        layer_windows=(window, 0), num_params=1, num_active_params=1, max_len=64,
    )  # fmt: skip
    pairs = brute_pairs(num_tokens, behind, window) + brute_pairs(num_tokens, behind, 0)
    assert shape.attention_flop(num_tokens, behind) == 2 * (8 + 8) * 3 * pairs


def test_chunks_of_a_prompt_take_as_many_flop_as_the_whole() -> None:
    shape = model_shape("gemma-3-27b-it")
    chunks = sum(shape.prompt_flop(512, start) for start in range(0, 8192, 512))
    assert chunks == shape.prompt_flop(8192)


def test_experts_that_are_not_chosen_take_no_part() -> None:
    shape = model_shape("Mixtral-8x7B-v0.1")
    assert shape.flop_per_token == 2 * shape.num_active_params < shape.num_params


def test_another_architecture_is_read_by_common_names_and_says_so(tmp_path: Path) -> None:
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1}
    mla = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    shape = model_shape(str(config_file(tmp_path, **LLAMA | {"architectures": ["NewForCausalLM"]} | moe | mla)))
    assert "no module of its own" in shape.notes[0]
    assert shape.bytes_per_token(BF16) == 4 * (16 + 4) * 2
    assert shape.num_params - shape.num_active_params == 3 * 6 * 3 * 64 * 32


def test_quantized_and_refused_models_are_planned_with_a_note(tmp_path: Path) -> None:
    path = config_file(tmp_path, **LLAMA | {"quantization_config": {"quant_method": "fp8"}, "hidden_act": "gelu"})
    notes = model_shape(str(path)).notes
    assert "gelu is not supported" in notes[0]
    assert "quantized" in notes[1]


def test_of_a_model_with_pictures_the_decoder_counts(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "vocab_size": 100, "max_position_embeddings": 4096, "sliding_window": 512}
    path = config_file(tmp_path, architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    assert model_shape(str(path)).layer_windows == ((512,) * 5 + (0,)) * 2


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (LLAMA | {"architectures": ["MambaForCausalLM"], "state_size": 16}, PlanError, "recurrent"),
        ({"architectures": ["LlamaForCausalLM"]}, ModelError, "missing"),
    ],
)
def test_what_has_no_kv_per_token_or_no_sizes_is_refused(
    tmp_path: Path, values: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model_shape(str(config_file(tmp_path, **values)))


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"no model 'gpt-9'.*Llama-3.1-8B"):
        model_shape("gpt-9")


def test_a_config_in_the_hubs_cache_is_read_from_there(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "hub/models--some--model/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    config_file(snapshot, **LLAMA)
    assert model_shape("some/model", str(tmp_path)).num_layers == 4


def test_given_parameters_replace_those_of_the_config() -> None:
    shape = with_params(model_shape("Llama-3.1-70B"), 70e9)
    assert shape.flop_per_token == 140_000_000_000
    with pytest.raises(PlanError, match="above 0"):
        with_params(shape, -1)


def test_read_shape_names_the_file(tmp_path: Path) -> None:
    from pd_serve.engine.config_json import read_json

    path = config_file(tmp_path, **LLAMA)
    assert read_shape(read_json(path), "mine").source == str(path)
