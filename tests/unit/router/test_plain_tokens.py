"""Tokens taken several at a time show what they show one by one: text, events and counts."""

from __future__ import annotations

import random

import pytest

from pd_serve.ids import AttemptId
from pd_serve.protocol.link import FinishReason, TokenOutput
from pd_serve.protocol.sampling import TokenLogprobs
from router.choice import ChoiceText
from router.sse import ChatEvents, CompletionEvents, EventWriter, event_head
from router.tokenizer import FolderTokenizer
from tests.fakes import write_tokenizer

HEAD = event_head("cmpl-1", "text_completion", 1, "tiny")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    return FolderTokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


def tokens_of(seed: int, count: int = 60) -> list[TokenOutput]:
    """Bytes in any order: many are parts of characters, whole or broken."""
    rng = random.Random(seed)
    return [TokenOutput(AttemptId(1), rng.randrange(3, 260), num_cached_tokens=7 if place == 0 else -1) for place in range(count)]


def writers(codec: FolderTokenizer) -> tuple[EventWriter, EventWriter]:
    return CompletionEvents(codec, HEAD, False, ("",)), ChatEvents(codec, HEAD, True)


@pytest.mark.parametrize("seed", range(10))
def test_several_at_a_time_are_the_same_events(codec: FolderTokenizer, seed: int) -> None:
    tokens = tokens_of(seed)
    for together, single in zip(writers(codec), writers(codec), strict=True):
        many, one = ChoiceText(codec, (), 0), ChoiceText(codec, (), 0)
        shown = b"".join(together.texts(0, many.push_plain(tokens[first : first + 7])) for first in range(0, len(tokens), 7))
        assert shown == b"".join(single.piece(0, one.push(token)) for token in tokens)
        assert (many.num_tokens, many.num_cached_tokens) == (one.num_tokens, one.num_cached_tokens) == (60, 7)
        assert many.finish(FinishReason.LENGTH) == one.finish(FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(10))
def test_all_at_once_are_the_same_text(codec: FolderTokenizer, seed: int) -> None:
    tokens = tokens_of(seed)
    whole, one = ChoiceText(codec, (), 0), ChoiceText(codec, (), 0)
    text = whole.push_all(tokens[:33]) + whole.push_all(tokens[33:]) + whole.finish(FinishReason.LENGTH)
    assert text == "".join(one.push(token).text for token in tokens) + one.finish(FinishReason.LENGTH)


def test_what_must_be_looked_at_one_by_one_is_not_plain(codec: FolderTokenizer) -> None:
    tokens = tokens_of(1)
    plain = ChoiceText(codec, (), 0)
    stopping = TokenOutput(AttemptId(1), 0, FinishReason.STOP)
    with_logprobs = TokenOutput(AttemptId(1), 5, None, TokenLogprobs(-0.5))
    assert plain.are_plain(tokens)
    assert not plain.are_plain([])
    assert not plain.are_plain([*tokens, stopping])
    assert not plain.are_plain([with_logprobs, with_logprobs])
    assert not ChoiceText(codec, ("stop",), 0).are_plain(tokens)
