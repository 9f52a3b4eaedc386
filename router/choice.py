"""The text of one choice: tokens in, pieces for the client out, with stop strings cut off and log-probabilities named. No I/O."""

from __future__ import annotations

import msgspec

from pd_serve.protocol.link import FinishReason, TokenOutput
from pd_serve.protocol.openai_responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from pd_serve.protocol.sampling import TokenLogprobs
from router.detokenizer import StopFinder, new_detokenizer
from router.tokenizer import TextCodec

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one token adds: text that became certain with it, and its own log-probabilities if asked for."""

    text: str
    token_id: int
    logprobs: TokenLogprobs | None


class ChoiceText:
    """push() each token, finish() once at the end unless a stop string was found. `finish_reason` is set when it is over."""

    def __init__(self, codec: TextCodec, stops: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = new_detokenizer(codec)
        self._stop = StopFinder(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_cached_tokens = 0
        """Of the first attempt: a moved request finds its own prompt cached, which is no merit of the client's."""
        self.num_reasoning_tokens: int | None = None
        """None: reasoning is not told apart."""
        self.finish_reason: str | None = None

    def push(self, token: TokenOutput) -> Piece:
        """A token that stops the sequence counts, but is neither text nor log-probability."""
        if self.num_tokens == 0:
            self.num_cached_tokens = max(0, token.num_cached_tokens)
        self.num_tokens += 1
        if token.finish is FinishReason.STOP:
            return Piece("", token.token_id, None)
        text = self._detokenizer.push(token.token_id)
        if self.num_tokens > self._min_tokens:
            text = self._stop.push(text)
            if self._stop.is_found:
                self.finish_reason = "stop"
        return Piece(text, token.token_id, token.logprobs)

    def are_plain(self, tokens: list[TokenOutput]) -> bool:
        """All that these have to show is their text: no log-probabilities, no stop string to look for, no token that is no text."""
        return bool(tokens) and not (self._stop.is_needed or tokens[0].logprobs is not None or tokens[-1].finish is FinishReason.STOP)

    def push_plain(self, tokens: list[TokenOutput]) -> list[str]:
        """The text of each, which may be empty. Precondition: are_plain."""
        self._count(tokens)
        return self._detokenizer.push_each([token.token_id for token in tokens])

    def push_all(self, tokens: list[TokenOutput]) -> str:
        """The text of all. Precondition: are_plain."""
        self._count(tokens)
        return self._detokenizer.push_all([token.token_id for token in tokens])

    def _count(self, tokens: list[TokenOutput]) -> None:
        if self.num_tokens == 0:
            self.num_cached_tokens = max(0, tokens[0].num_cached_tokens)
        self.num_tokens += len(tokens)

    def finish(self, reason: FinishReason) -> str:
        """The rest of the text."""
        text = self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        self.finish_reason = "stop" if self._stop.is_found else reason.value
        return text

    def end(self, reason: FinishReason) -> list[Piece]:
        """finish(), as the pieces that are left to show."""
        text = self.finish(reason)
        return [Piece(text, -1, None)] if text else []


def chat_logprobs(codec: TextCodec, pieces: list[Piece]) -> ChatLogprobs:
    return ChatLogprobs(content=tuple(_named(codec, piece.token_id, piece.logprobs) for piece in pieces if piece.logprobs is not None))


def completion_logprobs(codec: TextCodec, pieces: list[Piece], offset: int) -> CompletionLogprobs:
    """`offset` is the number of characters sent before the first piece."""
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        if piece.logprobs is not None:
            tokens.append(_shown(codec, piece.token_id))
            values.append(_finite(piece.logprobs.chosen))
            best: dict[str, float] = {}
            for token_id, value in zip(piece.logprobs.top_ids, piece.logprobs.top, strict=True):
                best.setdefault(_shown(codec, token_id), _finite(value))
            tops.append(best)
            offsets.append(offset)
        offset += len(piece.text)
    return CompletionLogprobs(
        tokens=tuple(tokens),
        token_logprobs=tuple(values),
        top_logprobs=tuple(tops) if any(tops) else None,
        text_offset=tuple(offsets),
    )


def _named(codec: TextCodec, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
    top = tuple(
        TopLogprob(token=_shown(codec, top_id), logprob=_finite(value), bytes=tuple(codec.token_bytes(top_id)))
        for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True)
    )
    return TokenLogprob(
        token=_shown(codec, token_id), logprob=_finite(logprobs.chosen), bytes=tuple(codec.token_bytes(token_id)), top_logprobs=top
    )


def _shown(codec: TextCodec, token_id: int) -> str:
    return codec.token_bytes(token_id).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB
