"""A worker that does not know the texts of its tokens says so at once to whoever asks for an answer of a form, and takes nothing on."""

from __future__ import annotations

import msgspec

from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.protocol.link import Failed, FailureReason, Open, Prefill, RefusalReason, Refused, Reserved
from tests.machine_fakes import DECODE, PREFILL, Worker, only_frame, open_frame, prefill_frame, prompt, replies


def formed(frame: Open | Prefill) -> Open | Prefill:
    sampling = msgspec.structs.replace(frame.sampling, grammar=Grammar(GrammarKind.REGEX, "a+"))
    return msgspec.structs.replace(frame, sampling=sampling)


def test_decode_refuses_it_by_name_and_holds_nothing() -> None:
    worker = Worker(DECODE, has_grammars=False)
    worker.join(PREFILL)
    for attempt, writer in ((1, PREFILL.peer), (2, None)):
        actions = worker.frame(formed(open_frame(attempt, prompt(6), writer=writer)))
        refused = only_frame(Refused, actions)
        assert refused.reason is RefusalReason.INVALID
        assert "tokenizer.json" in refused.detail
        assert replies(actions) == [refused]
    assert worker.machine.is_idle
    assert worker.num_held_blocks == 0
    assert only_frame(Reserved, worker.frame(open_frame(3, prompt(6), writer=None))).attempt_id == 3


def test_prefill_fails_it_by_name_and_holds_nothing() -> None:
    """Decode may know them: it has taken the attempt, and hears of the end from the router."""
    worker = Worker(PREFILL, has_grammars=False)
    worker.join(DECODE)
    actions = worker.frame(formed(prefill_frame(1, prompt(6))))
    failed = only_frame(Failed, actions)
    assert failed.reason is FailureReason.REFUSED
    assert "tokenizer.json" in failed.detail
    assert replies(actions) == [failed]
    assert worker.machine.is_idle
    assert worker.num_held_blocks == 0
