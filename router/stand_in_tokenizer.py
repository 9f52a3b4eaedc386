"""Text for a model of random weights whose folder holds config.json alone: what such a model says means nothing, but it must be carried.

    a byte of text <-> the token of its number        any token from 256 on -> `<number>`

so a text of n bytes is a prompt of n tokens, which is what a benchmark wants to choose. Used where model.load_format is `random` and the
folder has no tokenizer; implements router.tokenizer's TextCodec.
"""

from __future__ import annotations

import json
from pathlib import Path

from pd_serve.errors import ModelError
from pd_serve.protocol.openai import Message
from pd_serve.protocol.openai_tools import FunctionTool
from router.chat_template import ChatTemplate

_NUM_BYTES = 256


class StandInTokenizer:
    max_token_chars = 1
    chat_template: ChatTemplate | None = None

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @classmethod
    def of_folder(cls, folder: Path) -> StandInTokenizer:
        """Raises ModelError when config.json does not tell the size of the vocabulary."""
        path = folder / "config.json"
        try:
            size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"{path} does not name a vocab_size")
        return cls(size)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(value % self._vocab_size for value in text.encode("utf-8", "replace"))

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def render_chat(
        self, messages: tuple[Message, ...], template_kwargs: dict[str, bool | int | float | str], tools: tuple[FunctionTool, ...] = ()
    ) -> str:
        return "".join(f"{message.role}: {message.text}\n" for message in messages)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < _NUM_BYTES else b"<%d>" % token_id

    def text_bytes(self, token_id: int) -> bytes | None:
        return self.token_bytes(token_id)

    def keeping(self, texts: tuple[str, ...]) -> StandInTokenizer:
        return self
