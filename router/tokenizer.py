"""Text to tokens and back: the only place that knows the tokenizer. Called by the API and by the text of choices.

Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a model folder with the `tokenizers` library, which (unlike
transformers) does not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders

from pd_serve.errors import InvalidRequestError, ModelError
from pd_serve.protocol.openai import Message
from pd_serve.protocol.openai_tools import FunctionTool
from router.chat_template import ChatTemplate

TOKENIZER_NAME = "tokenizer.json"


class TextCodec(Protocol):
    """What the router needs of a tokenizer. Safe to call `encode` from several threads; it holds up the other threads little."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def max_token_chars(self) -> int:
        """Most characters of text that one token stands for."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]: ...

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Without special tokens."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    def render_chat(
        self, messages: tuple[Message, ...], template_kwargs: dict[str, bool | int | float | str], tools: tuple[FunctionTool, ...] = ()
    ) -> str:
        """Raises InvalidRequestError when the template refuses the messages, or the model has none."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token stands for, special tokens included; what log-probabilities show."""
        ...

    def text_bytes(self, token_id: int) -> bytes | None:
        """Bytes a token adds to the text (none for a special token), or None when that depends on its neighbours."""
        ...

    def keeping(self, texts: tuple[str, ...]) -> TextCodec:
        """The same, except that these special tokens are part of the text; all that are not special tokens here change nothing."""
        ...


class FolderTokenizer:
    """The tokenizer of a model folder.

    Raises ModelError from the constructor when `tokenizer.json` is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            raise ModelError(f"{folder} has no {TOKENIZER_NAME}; save it there with transformers' `AutoTokenizer.save_pretrained`")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"cannot read {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        self.chat_template = _chat_template(folder, config)
        self._is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._pieces = _Pieces(self._tokenizer)
        self._text_bytes: dict[int, bytes] = {}
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """As a batch of one: unlike `encode`, the library lets other threads run meanwhile."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def render_chat(
        self, messages: tuple[Message, ...], template_kwargs: dict[str, bool | int | float | str], tools: tuple[FunctionTool, ...] = ()
    ) -> str:
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", "messages")
        return self.chat_template.render(messages, tools, template_kwargs)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces.token_bytes(token_id, self._is_byte_level)

    def text_bytes(self, token_id: int) -> bytes | None:
        if not self._is_byte_level:
            return None
        found = self._text_bytes.get(token_id)
        if found is None:
            found = b"" if self._pieces.is_special(token_id) else self._pieces.token_bytes(token_id, True)
            self._text_bytes[token_id] = found
        return found

    def keeping(self, texts: tuple[str, ...]) -> TextCodec:
        ids = [(self._tokenizer.token_to_id(text), text.encode()) for text in texts]
        kept = {token_id: data for token_id, data in ids if token_id is not None and self._pieces.is_special(token_id)}
        return _Keeping(self, self._tokenizer, kept) if kept else self

    def is_special(self, token_id: int) -> bool:
        return self._pieces.is_special(token_id)


class _Keeping:
    """A FolderTokenizer for which some special tokens are text."""

    def __init__(self, codec: FolderTokenizer, tokenizer: Tokenizer, kept: dict[int, bytes]) -> None:
        self._codec = codec
        self._tokenizer = tokenizer
        self._kept = kept
        self.vocab_size = codec.vocab_size
        self.max_token_chars = codec.max_token_chars
        self.chat_template = codec.chat_template
        self.encode, self.render_chat, self.token_bytes = codec.encode, codec.render_chat, codec.token_bytes

    def decode(self, token_ids: tuple[int, ...]) -> str:
        shown = [token_id for token_id in token_ids if token_id in self._kept or not self._codec.is_special(token_id)]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def text_bytes(self, token_id: int) -> bytes | None:
        kept = self._kept.get(token_id)
        if kept is not None and self._codec.text_bytes(token_id) is not None:
            return kept
        return self._codec.text_bytes(token_id)

    def keeping(self, texts: tuple[str, ...]) -> TextCodec:
        return self._codec.keeping(texts)


class _Pieces:
    """Bytes of single tokens, computed on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.get_added_tokens_decoder())
        self._byte_of_char = _byte_of_char()
        self._cache: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        token = self._added.get(token_id)
        return token is not None and bool(token.special)

    def token_bytes(self, token_id: int, is_byte_level: bool) -> bytes:
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._compute(token_id, is_byte_level)
        return found

    def _compute(self, token_id: int, is_byte_level: bool) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""  # padding of the model's vocabulary
        if token_id in self._added:
            return str(piece).encode()
        if is_byte_level:
            values = [self._byte_of_char.get(char) for char in piece]
            return str(piece).encode() if None in values else bytes(value for value in values if value is not None)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for characters from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in kept}
    others = (value for value in range(256) if value not in kept)
    table.update({chr(0x100 + position): value for position, value in enumerate(others)})
    return table


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold an object")
    return value


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates name them."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _chat_template(folder: Path, config: dict[str, object]) -> ChatTemplate | None:
    """From the file of its own, else from the configuration (a text, or a list of named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), None, _special_tokens(config))
    template, tool_template = config.get("chat_template"), None
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template, tool_template = named.get("default"), named.get("tool_use")
    if not isinstance(template, str):
        return None
    return ChatTemplate(template, tool_template if isinstance(tool_template, str) else None, _special_tokens(config))
