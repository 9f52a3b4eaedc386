from __future__ import annotations

import pytest

from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.protocol.sampling import SamplingParams
from tests.fakes import peer_info
from workers.settings import MachineSettings


@pytest.mark.parametrize(("has_grammars", "words"), [(True, ""), (False, "tokenizer.json")])
def test_a_worker_that_does_not_know_its_tokens_takes_no_grammar(has_grammars: bool, words: str) -> None:
    settings = MachineSettings(peer_info(), 100, 64, 4, 8, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, has_grammars=has_grammars)
    held = SamplingParams(max_tokens=1, grammar=Grammar(GrammarKind.REGEX, "a"))
    assert words in settings.problem_of(held)
    assert bool(settings.problem_of(held)) is not has_grammars
    assert settings.problem_of(SamplingParams(max_tokens=1)) == ""
    assert settings.problem_of(SamplingParams(max_tokens=0))
