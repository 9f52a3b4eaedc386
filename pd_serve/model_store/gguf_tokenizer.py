"""The tokenizer inside a GGUF file, written as the tokenizer.json and tokenizer_config.json that transformers reads.

For byte-level BPE, transformers' own GGUF reader drops the pre-tokenizer's digit splitting, so that numbers would be cut otherwise than in
training: built here. For SentencePiece it does what it should.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from pd_serve.errors import ModelError

_CONTROL_TOKEN = 3
"""gguf.TokenType.CONTROL"""


class Fields(Protocol):
    """The reading of GGUF fields that this file needs."""

    def has(self, key: str) -> bool: ...
    def text(self, key: str) -> str: ...
    def integer(self, key: str) -> int: ...
    def texts(self, key: str) -> list[str]: ...
    def integers(self, key: str) -> list[int]: ...


def write_tokenizer(fields: Fields, max_len: int, target: Path) -> None:
    """Write both files into `target`, chat template included. Raises ModelError for a tokenizer that is not SmolLM's byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"only the smollm tokenizer is converted from GGUF, not {kind[0]}/{kind[1]}")
    tokens = fields.texts("tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in fields.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.integers("tokenizer.ggml.token_type")
    special = [token for token, token_kind in zip(tokens, kinds, strict=True) if token_kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))

    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": special,
    }
    for name, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("unk", "unknown_token_id"), ("pad", "padding_token_id")):
        if fields.has(f"tokenizer.ggml.{key}"):
            config[f"{name}_token"] = tokens[fields.integer(f"tokenizer.ggml.{key}")]
    if fields.has("tokenizer.chat_template"):
        config["chat_template"] = fields.text("tokenizer.chat_template")
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_sentencepiece_tokenizer(source: Path, target: Path) -> None:
    """Write both files into `target`, as transformers reads them from the GGUF file (about 20 s for Gemma's 262,144 tokens)."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
