"""However an answer comes in pieces, it is read as it would be in one; whatever it is, nothing of it is lost and nothing raises."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from router.tools.reasoning import ReasoningSplitter
from router.tools.registry import FORMATS
from tests.unit.router.tools.answers import RECORDED, read

_WORDS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "\n", " ", ";", ","),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "function",
        "```json",
        "```",
    ),
    *(
        '{"name": "add"',
        '"arguments": ',
        '"parameters": ',
        "{",
        "}",
        "[",
        "]",
        '{"a": 1}',
        '"x',
        '"',
        "\\",
        "add",
        "1",
        "tru",
        "é",
        "<",
        "tool_call>",
    ),
)
JUMBLES = st.lists(st.sampled_from(_WORDS), max_size=25).map("".join)
ANSWERS = st.one_of(JUMBLES, st.sampled_from([recorded.text for recorded in RECORDED.values()]))


@st.composite
def split(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=100, deadline=None)
@given(given_split=split(ANSWERS), form=st.sampled_from(sorted(FORMATS)), max_calls=st.integers(0, 1))
def test_calls_are_read_the_same_however_they_come(given_split: tuple[str, list[str]], form: str, max_calls: int) -> None:
    text, pieces = given_split
    whole = read(form, [text], max_calls)
    assert read(form, pieces, max_calls) == whole
    if not whole.calls:
        assert whole.content == text
    letters = iter(text)
    assert all(ch in letters for ch in whole.content), "in the order in which they were written"


SCALARS = st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=30, deadline=None)
@given(form=st.sampled_from(["hermes", "mistral", "deepseek"]), value=st.dictionaries(st.text(), VALUES), data=st.data())
def test_any_arguments_arrive(form: str, value: dict[str, object], data: st.DataObject) -> None:
    written = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 2])))
    frames = {
        "hermes": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
        "mistral": "[TOOL_CALLS]add%s",
        "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    }
    _, pieces = data.draw(split(st.just(frames[form] % written)))
    answer = read(form, pieces)
    assert (answer.content, answer.calls[0].arguments) == ("", written)


def thought(pieces: list[str], is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open)
    told = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(reasoning for reasoning, _ in told), "".join(answer for _, answer in told)


@settings(max_examples=100, deadline=None)
@given(given_split=split(JUMBLES), is_open=st.booleans())
def test_reasoning_is_read_the_same_however_it_comes(given_split: tuple[str, list[str]], is_open: bool) -> None:
    text, pieces = given_split
    whole = thought([text], is_open)
    assert thought(pieces, is_open) == whole
    without = text.replace("<think>", "", 1)
    possible = [text, without, text.replace("</think>", "", 1), without.replace("</think>", "", 1)]
    assert visible("".join(whole)) in map(visible, possible), "but for the marks nothing is lost"


def visible(text: str) -> str:
    return "".join(text.split())


def test_reasoning_in_all_its_shapes() -> None:
    assert thought(["<think>\nHm.\n\n</think>\n\nYes."], is_open=False) == ("Hm.", "Yes.")
    assert thought(["\nHm.\n</think>\nYes."], is_open=True) == ("Hm.", "Yes.")
    assert thought(["<think>Hm.</think>Yes."], is_open=True) == ("Hm.", "Yes.")
    assert thought(["<think>\n\n</think>\n\nYes."], is_open=False) == ("", "Yes.")
    assert thought(["Yes, <think> it </think> is."], is_open=False) == ("", "Yes, <think> it </think> is.")
    assert thought(["<think>\nCut in the mid\n"], is_open=False) == ("Cut in the mid\n", "")
    assert thought(["<thin"], is_open=False) == ("", "<thin")
    assert thought(["  "], is_open=False) == ("", "  ")
    assert thought(["a </thin"], is_open=True) == ("a </thin", "")
