"""Forms of answers, from the request to the worker, and those that are turned away."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import router.grammars
from pd_serve.config import OverloadConfig, StructuredConfig
from pd_serve.errors import InvalidRequestError, OverloadedError
from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.protocol.link import Open, Prefill, Role
from pd_serve.protocol.openai_formats import AskedForm
from router.grammars import GrammarChecks
from tests.fakes_worker import Board, mock_worker
from tests.unit.router.cluster import cluster

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def regex(text: str) -> AskedForm:
    return AskedForm(Grammar(GrammarKind.REGEX, text), "guided_regex")


async def test_both_workers_hear_of_the_form_and_other_requests_have_none(tmp_path: Path) -> None:
    board = Board()
    prefill, decode = mock_worker("prefill-0", Role.PREFILL, board=board), mock_worker("decode-0", Role.DECODE, board=board)
    async with cluster(tmp_path, prefill, decode) as c:
        for stream in (False, True):  # the second time its form is known
            assert (await c.chat(response_format=STRICT, stream=stream)).status_code == 200
        assert (await c.complete(guided_choice=["a", "b"], n=2)).status_code == 200
        assert (await c.chat(response_format={"type": "text"})).status_code == 200
    for frames in (decode.of(Open), prefill.of(Prefill)):
        kinds = [frame.sampling.grammar and frame.sampling.grammar.kind for frame in frames if isinstance(frame, Open | Prefill)]
        assert kinds[:2] == [GrammarKind.JSON_SCHEMA] * 2
        assert GrammarKind.CHOICE in kinds[2:]
        assert kinds[-1] is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {**STRICT, "json_schema": {"name": "x", "schema": {"type": "objec"}}}}, "response_format", "objec"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"structured_outputs": {"regex": "x" * 70_000}}, "structured_outputs.regex", "65536"),
    ],
)
async def test_a_form_that_cannot_be_kept_is_refused_before_any_worker_hears_of_it(
    tmp_path: Path, fields: dict[str, object], param: str, words: str
) -> None:
    worker = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, worker) as c:
        for reply in (await c.chat(**fields), await c.complete(**fields)):
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == param
            assert words in error["message"]
    assert not worker.of(Open)


async def test_without_the_tokens_texts_no_form_is_taken() -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        await GrammarChecks(StructuredConfig(), has_vocabulary=False).check(regex("a"))


async def test_what_takes_too_long_is_refused_and_what_waits_for_it_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def compile_until(grammar: Grammar) -> str:
        go_on.wait(30)
        return ""

    monkeypatch.setattr(router.grammars, "problem_of", compile_until)
    checks = GrammarChecks(StructuredConfig(compile_timeout_s=0.05), has_vocabulary=True)
    try:
        slow, behind = await asyncio.gather(checks.check(regex("a")), checks.check(regex("b")), return_exceptions=True)
        assert isinstance(slow, InvalidRequestError)
        assert slow.param == "guided_regex"
        assert isinstance(behind, OverloadedError)
        monkeypatch.setattr(router.grammars, "MAX_WAITING", 1)
        with pytest.raises(OverloadedError):
            await checks.check(regex("c"))
    finally:
        go_on.set()
    assert not checks.knows(regex("a"))


async def test_only_so_many_forms_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.grammars, "NUM_REMEMBERED", 2)
    checks = GrammarChecks(StructuredConfig(), has_vocabulary=True)
    for text in ("a", "b", "a", "c"):
        await checks.check(regex(text))
    assert [checks.knows(regex(text)) for text in "abc"] == [True, False, True]


async def test_a_form_that_could_not_be_looked_at_does_not_count_against_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.grammars, "MAX_WAITING", 0)
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), overload=OverloadConfig(requests_per_minute=1)) as c:
        refused = await c.chat(response_format=STRICT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert (await c.chat()).status_code == 200
        assert (await c.chat()).json()["error"]["code"] == "rate_limit_exceeded"
