"""Reasoning that a model marks, `<think>...</think>`, apart from its answer. It stands first, if at all, and may be opened by the prompt.

The marks are dropped, and so are line breaks beside them, which templates put there. What comes out depends on the text, not on its pieces.
"""

from __future__ import annotations

from enum import Enum

BEGIN = "<think>"
END = "</think>"
_BREAKS = "\r\n"


class Stage(Enum):
    START = "start"
    """Nothing has come but white space, or the beginning of the mark."""
    ENTRY = "entry"
    """Within reasoning; nothing has come but line breaks."""
    REASONING = "reasoning"
    EXIT = "exit"
    """Behind it; nothing has come but line breaks."""
    ANSWER = "answer"


class ReasoningSplitter:
    """push() pieces of text, flush() once at their end; each returns (reasoning, answer), whose order is that.

    `is_open`: what comes is reasoning even if the model does not open it.
    """

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        self._stage = Stage.START
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        return self._stage in (Stage.ENTRY, Stage.REASONING) or (self._stage is Stage.START and self._is_open)

    def push(self, text: str) -> tuple[str, str]:
        if self._stage is Stage.ANSWER:
            return "", text
        text, self._held = self._held + text, ""
        if self._stage is Stage.START:
            text = self._start(text)
        if self._stage is Stage.ENTRY:
            text = text.lstrip(_BREAKS)
            if text:
                self._stage = Stage.REASONING
        reasoning = ""
        if self._stage is Stage.REASONING:
            reasoning, text = self._reason(text)
        if self._stage is Stage.EXIT:
            text = text.lstrip(_BREAKS)
            if text:
                self._stage = Stage.ANSWER
        return reasoning, text

    def flush(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self.is_reasoning else ("", held)

    def _start(self, text: str) -> str:
        """Text of the stage that follows; empty and held where that is not known yet."""
        begun = text.lstrip()
        if begun.startswith(BEGIN):
            self._stage = Stage.ENTRY
            return begun.removeprefix(BEGIN)
        if BEGIN.startswith(begun):
            self._held = text
            return ""
        self._stage = Stage.ENTRY if self._is_open else Stage.ANSWER
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """(reasoning, what stands behind its end); holds back what may belong to the end."""
        reasoning, mark, behind = text.partition(END)
        if mark:
            self._stage = Stage.EXIT
            return reasoning.rstrip(_BREAKS), behind
        size = next((size for size in range(min(len(text), len(END) - 1), 0, -1) if END.startswith(text[-size:])), 0)
        known = text[: len(text) - size].rstrip(_BREAKS)
        self._held = text[len(known) :]
        return known, ""
