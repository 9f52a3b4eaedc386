"""Configurations of well-known models, so that a plan needs no download: the fields of their config.json on the Hugging Face hub.

Sources, besides config.json: Llama 3 (arXiv:2407.21783, table 3), Qwen3 (arXiv:2505.09388, tables 1 and 2), DeepSeek-V2 and V3
(arXiv:2405.04434, arXiv:2412.19437, section 4.2), Mistral 7B (arXiv:2310.06825), Mixtral (arXiv:2401.04088), Gemma 3 (arXiv:2503.19786).
tests/unit/plan/test_shape.py compares the parameters that they add up to with those that were published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HUB = "https://huggingface.co/"


@dataclass(frozen=True, slots=True)
class Published:
    hub_id: str
    config: Mapping[str, object]

    @property
    def name(self) -> str:
        return self.hub_id.rpartition("/")[2]

    @property
    def source(self) -> str:
        return f"{HUB}{self.hub_id}/blob/main/config.json"


def _decoder(architecture: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], vocab: int, **rest: object) -> dict[str, object]:
    """`sizes`: layers, hidden, intermediate; `heads`: query heads, KV heads, elements of one."""
    return {
        "architectures": [architecture],
        "num_hidden_layers": sizes[0],
        "hidden_size": sizes[1],
        "intermediate_size": sizes[2],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "dtype": "bfloat16",
        **rest,
    }


def _llama(sizes: tuple[int, int, int], heads: tuple[int, int, int], tied: bool = False) -> dict[str, object]:
    return _decoder("LlamaForCausalLM", sizes, heads, 128_256, max_position_embeddings=131_072, tie_word_embeddings=tied)


def _qwen3(sizes: tuple[int, int, int], heads: tuple[int, int, int], tied: bool = False) -> dict[str, object]:
    return _decoder("Qwen3ForCausalLM", sizes, heads, 151_936, max_position_embeddings=40_960, tie_word_embeddings=tied)


def _qwen3_moe(sizes: tuple[int, int, int], heads: tuple[int, int, int], expert_size: int) -> dict[str, object]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_size}
    return _decoder("Qwen3MoeForCausalLM", sizes, heads, 151_936, max_position_embeddings=40_960, **experts)


def _gemma3(sizes: tuple[int, int, int], heads: tuple[int, int, int], window: int, max_len: int = 131_072) -> dict[str, object]:
    return _decoder("Gemma3ForCausalLM", sizes, heads, 262_144, max_position_embeddings=max_len, sliding_window=window)


def _mistral(window: int, vocab: int) -> dict[str, object]:
    sizes, heads = (32, 4096, 14_336), (32, 8, 128)
    return _decoder("MistralForCausalLM", sizes, heads, vocab, max_position_embeddings=32_768, sliding_window=window or None)


_DEEPSEEK_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "dtype": "bfloat16",
}
_DEEPSEEK_V2_LITE: dict[str, object] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "vocab_size": 102_400,
    "max_position_embeddings": 163_840,
    "dtype": "bfloat16",
}
_SMOLLM2 = _decoder("LlamaForCausalLM", (30, 576, 1536), (9, 3, 64), 49_152, max_position_embeddings=8192, tie_word_embeddings=True)
_MIXTRAL = _decoder(
    "MixtralForCausalLM",
    (32, 4096, 14_336),
    (32, 8, 128),
    32_000,
    max_position_embeddings=32_768,
    num_local_experts=8,
    num_experts_per_tok=2,
)

PUBLISHED = (
    Published("meta-llama/Llama-3.2-1B", _llama((16, 2048, 8192), (32, 8, 64), tied=True)),
    Published("meta-llama/Llama-3.2-3B", _llama((28, 3072, 8192), (24, 8, 128), tied=True)),
    Published("meta-llama/Llama-3.1-8B", _llama((32, 4096, 14_336), (32, 8, 128))),
    Published("meta-llama/Llama-3.1-70B", _llama((80, 8192, 28_672), (64, 8, 128))),
    Published("meta-llama/Llama-3.1-405B", _llama((126, 16_384, 53_248), (128, 8, 128))),
    Published("Qwen/Qwen3-0.6B", _qwen3((28, 1024, 3072), (16, 8, 128), tied=True)),
    Published("Qwen/Qwen3-1.7B", _qwen3((28, 2048, 6144), (16, 8, 128), tied=True)),
    Published("Qwen/Qwen3-4B", _qwen3((36, 2560, 9728), (32, 8, 128), tied=True)),
    Published("Qwen/Qwen3-8B", _qwen3((36, 4096, 12_288), (32, 8, 128))),
    Published("Qwen/Qwen3-14B", _qwen3((40, 5120, 17_408), (40, 8, 128))),
    Published("Qwen/Qwen3-32B", _qwen3((64, 5120, 25_600), (64, 8, 128))),
    Published("Qwen/Qwen3-30B-A3B", _qwen3_moe((48, 2048, 6144), (32, 4, 128), 768)),
    Published("Qwen/Qwen3-235B-A22B", _qwen3_moe((94, 4096, 12_288), (64, 4, 128), 1536)),
    Published("mistralai/Mistral-7B-v0.1", _mistral(4096, 32_000)),
    Published("mistralai/Mistral-7B-v0.3", _mistral(0, 32_768)),
    Published("mistralai/Mixtral-8x7B-v0.1", _MIXTRAL),
    Published("google/gemma-3-270m", _gemma3((18, 640, 2048), (4, 1, 256), 512, 32_768)),
    Published("google/gemma-3-27b-it", _gemma3((62, 5376, 21_504), (32, 16, 128), 1024)),
    Published("deepseek-ai/DeepSeek-V2-Lite", _DEEPSEEK_V2_LITE),
    Published("deepseek-ai/DeepSeek-V3", _DEEPSEEK_V3),
    Published("deepseek-ai/DeepSeek-R1", _DEEPSEEK_V3),
    Published("HuggingFaceTB/SmolLM2-135M-Instruct", _SMOLLM2),
)
ALIASES: Mapping[str, str] = {"demo": "SmolLM2-135M-Instruct", "demo-gemma3": "gemma-3-270m"}
"""Names of the bundled models."""
_VARIANTS = ("-instruct", "-chat", "-base", "-it", "-fp8")
"""Behind a name: other weights, the same shape."""


def find_published(text: str) -> Published | None:
    """By hub id or its last part, in any case, of whichever variant."""
    wanted = _plain(ALIASES.get(text, text).rpartition("/")[2])
    return next((each for each in PUBLISHED if _plain(each.name) == wanted), None)


def _plain(name: str) -> str:
    plain = name.lower().removeprefix("meta-")
    for ending in _VARIANTS:
        plain = plain.removesuffix(ending)
    return plain
