"""A worker that changes its role: routers hear of it and the new work is taken at once, the old work goes on until the deadline."""

from __future__ import annotations

import pytest

from pd_serve.protocol.link import Failed, FailureReason, Load, Reserved, Role, Step
from tests.machine_fakes import DECODE, PREFILL, Worker, batch_of, frames, only_frame, open_frame, prefill_frame, prompt
from workers.events import RoleSet, Tick


@pytest.fixture
def decode() -> Worker:
    worker = Worker(DECODE)
    worker.join(PREFILL)
    return worker


def test_routers_hear_of_it_at_once_and_once(decode: Worker) -> None:
    assert only_frame(Load, decode.do(RoleSet(Role.PREFILL, 5.0))).role is Role.PREFILL
    assert frames(Load, decode.do(RoleSet(Role.PREFILL, 5.0))) == []


def test_old_work_goes_on_and_is_given_back_at_the_deadline(decode: Worker) -> None:
    batch = batch_of(decode.frame(open_frame(1, prompt(6), writer=None)))
    decode.do(RoleSet(Role.PREFILL, 5.0))
    assert only_frame(Step, decode.finish_step(batch, 7)).outputs, "it decodes on"
    decode.now += 4.9
    assert frames(Failed, decode.do(Tick())) == []
    assert decode.machine.next_deadline() == pytest.approx(105.0, abs=0.2)
    decode.now += 0.2
    assert only_frame(Failed, decode.do(Tick())).reason is FailureReason.DRAINING
    assert frames(Failed, decode.do(Tick())) == []


def test_work_of_both_roles_is_taken_at_any_time(decode: Worker) -> None:
    """A router may not have heard yet."""
    decode.do(RoleSet(Role.PREFILL, 5.0))
    late = decode.frame(open_frame(1, prompt(6), writer=None))
    assert only_frame(Reserved, late).attempt_id == 1
    assert frames(Failed, decode.frame(prefill_frame(2, prompt(6), holder=PREFILL))) == []


def test_one_that_changes_back_in_time_gives_nothing_back(decode: Worker) -> None:
    decode.frame(open_frame(1, prompt(6), writer=None))
    decode.do(RoleSet(Role.PREFILL, 5.0))
    decode.do(RoleSet(Role.BOTH, 5.0))
    decode.now += 60.0
    assert frames(Failed, decode.do(Tick())) == []


def test_prompts_computed_for_others_are_given_back_by_one_that_decodes_now() -> None:
    worker = Worker(PREFILL)
    worker.join(DECODE)
    worker.frame(prefill_frame(1, prompt(6)))
    worker.frame(open_frame(2, prompt(6, 20), writer=None))
    worker.do(RoleSet(Role.DECODE, 0.0))
    assert only_frame(Failed, worker.do(Tick())).attempt_id == 1
