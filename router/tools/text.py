"""The text of a choice whose calls of tools and reasoning are told apart from its content: as router/choice.py's, with parts besides."""

from __future__ import annotations

from pd_serve.protocol.link import FinishReason, TokenOutput
from router.choice import ChoiceText, Piece
from router.tokenizer import TextCodec
from router.tools.parser import CallParser
from router.tools.parts import Content, ParsedPiece, Part, Reasoning
from router.tools.reasoning import ReasoningSplitter

TOOL_CALLS = "tool_calls"
_STOP = "stop"


class ParsedText(ChoiceText):
    """Stop strings are looked for in all that the model says, before it is parsed. `reasoning`, `calls`: None: not told apart.

    It is over, with nothing left to come, when as many calls are complete as the client takes.
    """

    def __init__(
        self, codec: TextCodec, stops: tuple[str, ...], min_tokens: int, reasoning: ReasoningSplitter | None, calls: CallParser | None
    ) -> None:
        super().__init__(codec, stops, min_tokens)
        self._reasoning = reasoning
        self._calls = calls
        self.num_reasoning_tokens = None if reasoning is None else 0

    def push(self, token: TokenOutput) -> Piece:
        was_reasoning = self._reasoning is not None and self._reasoning.is_reasoning
        piece = super().push(token)
        parts = self._parsed(piece.text)
        if self.num_reasoning_tokens is not None and token.finish is not FinishReason.STOP:
            self.num_reasoning_tokens += was_reasoning or (self._reasoning is not None and self._reasoning.is_reasoning)
        if self.finish_reason is not None:
            parts += self._flushed()
        elif self._calls is not None and self._calls.is_over:
            self.finish_reason = TOOL_CALLS
        return ParsedPiece(piece.text, piece.token_id, piece.logprobs, parts)

    def are_plain(self, tokens: list[TokenOutput]) -> bool:
        return False

    def end(self, reason: FinishReason) -> list[Piece]:
        text = self.finish(reason)
        parts = self._parsed(text) + self._flushed()
        return [ParsedPiece(text, -1, None, parts)] if parts else []

    def _parsed(self, text: str) -> tuple[Part, ...]:
        if not text:
            return ()
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._told_apart(reasoning, answer)

    def _flushed(self) -> tuple[Part, ...]:
        """What was held back, at the end; and the reason of it is that calls were made."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.flush()
        parts = self._told_apart(reasoning, answer)
        if self._calls is not None:
            parts += self._calls.flush()
            if self._calls.num_calls and self.finish_reason == _STOP:
                self.finish_reason = TOOL_CALLS
        return parts

    def _told_apart(self, reasoning: str, answer: str) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = (Reasoning(reasoning),) if reasoning else ()
        if not answer:
            return parts
        return (*parts, Content(answer)) if self._calls is None else parts + self._calls.push(answer)
