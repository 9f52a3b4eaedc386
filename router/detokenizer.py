"""Tokens of one choice to text, a few at a time: incomplete characters and possible beginnings of a stop string are held back.

Called by router/choice.py for every token, so it stays lean. What must stay true: the pieces put together equal the text decoded at once
(cut at the stop string), no piece ends inside a character, and what is held back is bounded.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from router.tokenizer import TextCodec

MAX_HELD_TOKENS = 16
"""Tokens without a complete character after which replacement characters are shown instead of waiting on."""


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that is now certain; may be empty."""
        ...

    def push_each(self, token_ids: list[int]) -> list[str]:
        """What pushing each returns."""
        ...

    def push_all(self, token_ids: list[int]) -> str:
        """The same, in one."""
        ...

    def flush(self) -> str:
        """The rest, at the end."""
        ...


def new_detokenizer(codec: TextCodec) -> Detokenizer:
    return WindowDetokenizer(codec) if codec.text_bytes(0) is None else ByteDetokenizer(codec)


class ByteDetokenizer:
    """For byte-level vocabularies: a token is its bytes, whatever stands beside it. Holds at most three bytes."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._held = b""

    def push(self, token_id: int) -> str:
        data = self._held + (self._codec.text_bytes(token_id) or b"")
        text, num_taken = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_taken:]
        return text

    def push_each(self, token_ids: list[int]) -> list[str]:
        texts: list[str] = []
        held, text_bytes = self._held, self._codec.text_bytes
        for token_id in token_ids:
            data = text_bytes(token_id) or b""
            if held:
                data = held + data
            text, num_taken = codecs.utf_8_decode(data, "replace", False)
            held = data[num_taken:]
            texts.append(text)
        self._held = held
        return texts

    def push_all(self, token_ids: list[int]) -> str:
        data = self._held + b"".join([self._codec.text_bytes(token_id) or b"" for token_id in token_ids])
        text, num_taken = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_taken:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]


class WindowDetokenizer:
    """For vocabularies where a token's text depends on its neighbours: decodes a window of tokens and takes what is new.

    Source: the prefix/read offsets of vLLM's and TGI's incremental detokenization.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._context: tuple[int, ...] = ()
        self._context_text = ""
        self._held: tuple[int, ...] = ()

    def push(self, token_id: int) -> str:
        self._held += (token_id,)
        text = self._codec.decode(self._context + self._held)
        if len(text) <= len(self._context_text) or text.endswith("\ufffd"):
            return self._take(text) if len(self._held) >= MAX_HELD_TOKENS else ""
        return self._take(text)

    def push_each(self, token_ids: list[int]) -> list[str]:
        return [self.push(token_id) for token_id in token_ids]

    def push_all(self, token_ids: list[int]) -> str:
        return "".join(self.push_each(token_ids))

    def flush(self) -> str:
        return self._take(self._codec.decode(self._context + self._held)) if self._held else ""

    def _take(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._context, self._held = self._held, ()
        self._context_text = self._codec.decode(self._context)
        return new


class StopFinder:
    """Cuts text at the first stop string, holding back only a suffix that may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        self.is_found = False

    @property
    def is_needed(self) -> bool:
        """There is something to find."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Text to show. After a stop string was found: nothing."""
        if not self._stops:
            return text
        if self.is_found:
            return ""
        text = self._held + text
        cut = min((position for stop in self._stops if (position := text.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.is_found = True
            self._held = ""
            return text[:cut]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix that begins some stop string without completing it."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            suffix = text[-size:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
