from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pd_serve.config import StructuredConfig
from pd_serve.errors import InvalidRequestError
from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.grammar.compiler import problem_of
from pd_serve.grammar.gbnf import as_lark
from pd_serve.protocol.openai_formats import AskedForm
from router.grammars import GrammarChecks


def test_rules_are_named_as_lark_wants_them() -> None:
    text = """
root ::= "n" num-x+ (fooBar | loop)* # the whole
num-x ::= digit
digit ::= [0-9]
fooBar ::= "(" root ")"
loop ::= "l" loop?
"""
    head, _, rules = as_lark(text).partition("\n\n")
    assert head == "%llguidance {}"
    assert rules.splitlines() == [
        'start: "n" NUM_X+ ((foo_bar | loop))*',
        "NUM_X: DIGIT",
        "DIGIT: /[0-9]/",
        'foo_bar: "(" start ")"',
        'loop: "l" loop?',
    ]
    assert not problem_of(Grammar(GrammarKind.GRAMMAR, text))


@pytest.mark.parametrize("text", ['start: "a"', 'x: "a"\n  start : x', '%llguidance {}\nstart: "a"'])
def test_lark_stays_as_it_is(text: str) -> None:
    assert as_lark(text) == text


WRONG = [
    ('foo ::= "a"', "no 'root' rule"),
    ("root ::= nowhere", "'nowhere'"),
    ('root ::= "a', "end of input"),
    ('root ::= "a\\', "escape"),
    ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "too much alike"),
    ("root ::= start\nstart ::= root", "too much alike"),
    ('root ::= "a"{' + "9" * 5_000 + "}", "digits"),
    ("root ::= " + "(" * 5_000, "nested"),
    ("$", "name"),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=lambda each: each[:12])
async def test_what_clients_get_wrong_is_a_bad_request_that_names_the_field(text: str, words: str) -> None:
    checks, form = (
        GrammarChecks(StructuredConfig(compile_timeout_s=30), True),
        AskedForm(Grammar(GrammarKind.GRAMMAR, text), "guided_grammar"),
    )
    with pytest.raises(InvalidRequestError, match=words) as raised:
        await checks.check(form)
    assert raised.value.param == "guided_grammar"


def chain(size: int) -> str:
    """Each rule needs the next: in the order that a search for terminals likes least."""
    return "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(size)) + f'a{size} ::= "x"\n'


def lines(size: int) -> str:
    return "\n" * size + chain(1)


def calls_of(text: str) -> int:
    """Functions of Python that are begun, or gone on with, on the way to Lark."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        as_lark(text)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("make", [chain, lines])
def test_twice_the_text_is_twice_the_work(make: Callable[[int], str]) -> None:
    assert calls_of(make(160)) < 2.5 * calls_of(make(80))


def test_blank_lines_are_not_read_again_at_each_of_them() -> None:
    """The expression of llguidance needs minutes for these, and holds the interpreter."""
    assert as_lark("\n" * 65_000 + 'start: "a"').endswith('start: "a"')
    assert as_lark("\n" * 65_000 + 'root ::= "a"').endswith('start: "a"\n')
