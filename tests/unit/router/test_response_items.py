"""Items of a response: in the order in which the model said them, streamed or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.protocol.openai_response_api import ResponseRequest
from pd_serve.protocol.sampling import TokenLogprobs
from router.choice import Piece
from router.response_draft import ResponseDraft
from router.response_events import ResponseEvents
from router.tokenizer import FolderTokenizer
from router.tools.parts import CallArguments, CallBegun, Content, ParsedPiece, Part, Reasoning
from router.whole import UsageCounts
from tests.fakes import byte_ids, write_tokenizer

(TOKEN,) = byte_ids("a")
LOGPROBS = TokenLogprobs(-1.0, (), ())
DRAFT = ResponseDraft(
    "key", 1, "m", ResponseRequest.model_validate({"model": "m", "input": "x", "include": ["message.output_text.logprobs"]})
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("model"))
    return FolderTokenizer(folder)


def said(*parts: Part) -> ParsedPiece:
    return ParsedPiece("a", TOKEN, LOGPROBS, parts)


def call(index: int) -> tuple[Part, ...]:
    return CallBegun(index, f"call_{index}", "f"), CallArguments(index, "{}")


def whole(codec: FolderTokenizer, pieces: list[Piece], reason: str) -> list[dict[str, object]]:
    return [json.loads(item.model_dump_json()) for item in DRAFT.items(codec, pieces, reason == "length")]


def streamed(codec: FolderTokenizer, pieces: list[Piece], reason: str) -> list[dict[str, object]]:
    events = ResponseEvents(codec, DRAFT)
    events.begin(0)
    for piece in pieces:
        events.piece(0, piece)
    events.finish(0, reason)
    last = json.loads(events.usage(UsageCounts(1, 1, 0)).split(b"data: ")[1])
    items: list[dict[str, object]] = last["response"]["output"]
    return items


ANSWERS: dict[str, list[Piece]] = {
    "nothing": [],
    "plain": [Piece("a", TOKEN, LOGPROBS), Piece("", TOKEN, LOGPROBS)],
    "reasoning": [said(Reasoning("r")), said(Content("a"))],
    "call and text": [said(Content("a")), said(*call(0)), said(Content("b"))],
    "calls": [said(*call(0)), said(*call(1))],
    "all of one token": [said(Content("a"), *call(0), Content("b"), Content("c"))],
}


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("pieces", ANSWERS.values(), ids=ANSWERS.keys())
def test_whole_answers_have_the_items_of_streamed_ones(codec: FolderTokenizer, pieces: list[Piece], reason: str) -> None:
    assert whole(codec, pieces, reason) == streamed(codec, pieces, reason)


def test_a_call_that_text_follows_is_complete(codec: FolderTokenizer) -> None:
    items = whole(codec, ANSWERS["call and text"], "length")
    assert [(item["type"], item["status"]) for item in items] == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]


def test_a_token_shows_its_log_probabilities_once(codec: FolderTokenizer) -> None:
    events = ResponseEvents(codec, DRAFT)
    events.begin(0)
    lines = events.piece(0, said(Content("a"), *call(0), Content("b"))).splitlines()
    told = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
    assert [len(event["logprobs"]) for event in told if event["type"] == "response.output_text.delta"] == [1, 0]
