"""The model of `make bench-gpu`: the config of a Llama of a billion weights, which are drawn, and a tokenizer for its whole vocabulary.

`tiny` is for rehearsing the whole on a machine without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SIZES: dict[str, dict[str, Any]] = {
    # Llama 3.2 1B, but for its scaled rotary angles.
    "big": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 16384,
    },
}


def write_model(folder: Path, size: str) -> Path:
    config = _COMMON | SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġ{word}" for word in _WORDS.split())]
    words += [f"Ġw{number}" for number in range(config["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


_WORDS = (
    "the of and to in is it that was for on are as with his they at be this from have or by one had not but what all were when we there "
    "an your which their said if do will each about how up out them then she many some so these would other into has more her two like "
    "see time could no make than first been its who now people my made over did down only way find use may water long little very after"
)
