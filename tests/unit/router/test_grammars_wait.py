"""Grammars that wait behind others' for the thread that looks at them."""

from __future__ import annotations

import asyncio
import threading

import pytest

import router.grammars
from pd_serve.config import StructuredConfig
from pd_serve.errors import OverloadedError
from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.protocol.openai_formats import AskedForm
from router.grammars import GrammarChecks


def regex(text: str) -> AskedForm:
    return AskedForm(Grammar(GrammarKind.REGEX, text), "guided_regex")


async def test_who_waited_and_then_had_little_time_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = {"a": threading.Event(), "b": threading.Event()}
    has_begun = {"a": threading.Event(), "b": threading.Event()}
    texts = iter("ab")

    def compile_until(grammar: Grammar) -> str:
        has_begun[grammar.text].set()
        go_on[grammar.text].wait(30)
        return ""

    async def time_is_over_once_it_has_begun(compiling: asyncio.Future[str], _limit_s: float) -> str:
        if (text := next(texts)) == "a":
            return await compiling
        go_on["a"].set()
        await asyncio.to_thread(has_begun[text].wait, 30)
        raise TimeoutError

    monkeypatch.setattr(router.grammars, "problem_of", compile_until)
    monkeypatch.setattr(asyncio, "wait_for", time_is_over_once_it_has_begun)
    checks = GrammarChecks(StructuredConfig(compile_timeout_s=60), has_vocabulary=True)
    try:
        good, behind = await asyncio.gather(checks.check(regex("a")), checks.check(regex("b")), return_exceptions=True)
    finally:
        go_on["b"].set()
    assert good is None
    assert isinstance(behind, OverloadedError)
