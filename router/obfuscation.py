"""`stream_options.include_obfuscation`: deltas are padded, so that who sees only the sizes of an encrypted stream learns less of its text.

Source: https://platform.openai.com/docs/api-reference/chat/create#chat_create-stream_options
"""

from __future__ import annotations

import secrets

from router.choice import Piece
from router.sse import EventWriter
from router.whole import UsageCounts

STEP_NBYTES = 64
"""Events of deltas are multiples of this."""
_FIELD = b',"obfuscation":"%b"}'
_FIELD_NBYTES = len(_FIELD) - 3
_END = b"}\n\n"


class ObfuscatedEvents:
    """The events of another writer, those of deltas with a field `obfuscation` of random letters."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events

    def begin(self, index: int) -> bytes:
        return self._events.begin(index)

    def piece(self, index: int, piece: Piece) -> bytes:
        return padded(self._events.piece(index, piece))

    def texts(self, index: int, texts: list[str]) -> bytes:
        return padded(self._events.texts(index, texts))

    def finish(self, index: int, reason: str) -> bytes:
        return self._events.finish(index, reason)

    def usage(self, usage: UsageCounts) -> bytes:
        return self._events.usage(usage)


def padded(events: bytes) -> bytes:
    """Whole events, each an object; a line break within one is escaped, so that its end is known."""
    return b"".join([_padded(event) for event in events.split(_END)[:-1]])


def _padded(event: bytes) -> bytes:
    num = -(len(event) + _FIELD_NBYTES + len(_END)) % STEP_NBYTES
    return event + _FIELD % secrets.token_urlsafe(STEP_NBYTES)[:num].encode() + b"\n\n"
