"""A prompt computed for another worker never waits for KV from others: two workers that each wait for the other's would wait for ever."""

from __future__ import annotations

import pytest

from pd_serve.ids import AttemptId
from pd_serve.kv.lease import LeaseTable
from pd_serve.protocol.link import Failed, FailureReason, RefusalReason, Refused, Reserved, Role
from tests.machine_fakes import Worker, batch_of, completed, frames, only_frame, open_frame, peer_info, prefill_frame, prompt
from workers.events import Action, NoticeArrived, RunBatch, WindowClosed

OTHER = peer_info("other", Role.BOTH)


def _worker() -> Worker:
    """Eight blocks of four tokens; computes for the other, which computes for it."""
    worker = Worker(peer_info("worker", Role.BOTH), prefill_chunk=4)
    worker.join(OTHER)
    return worker


def _end_step(worker: Worker, actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return worker.finish_step(batch_of(actions), 7)


def test_a_prompt_with_no_room_beside_awaited_kv_is_given_up() -> None:
    worker = _worker()
    worker.reserve(open_frame(1, prompt(20), OTHER.peer))
    actions = worker.frame(prefill_frame(2, prompt(13, 40), holder=OTHER))
    while not frames(Failed, actions):
        actions = _end_step(worker, actions)
    failed = only_frame(Failed, actions)
    assert (failed.attempt_id, failed.reason) == (2, FailureReason.PREEMPTED)
    assert worker.num_held_blocks == 5 + 3, "what was computed is being flushed"


def test_one_with_room_beside_it_is_computed() -> None:
    worker = _worker()
    worker.reserve(open_frame(1, prompt(20), OTHER.peer))
    actions = worker.frame(prefill_frame(2, prompt(12, 40), holder=OTHER))
    for _ in range(3):
        actions = _end_step(worker, actions)
    assert frames(Failed, actions) == []
    assert not len(worker.machine.scheduler)


def test_the_youngest_is_given_up_where_two_lack_blocks() -> None:
    """Either has room alone."""
    worker = _worker()
    worker.reserve(open_frame(1, prompt(20), OTHER.peer))
    actions = worker.frame(prefill_frame(2, prompt(12, 40), holder=OTHER))
    worker.frame(prefill_frame(3, prompt(12, 60), lease_id=2, holder=OTHER))
    given_up = []
    while any(isinstance(action, RunBatch) for action in actions):
        actions = _end_step(worker, actions)
        given_up += [frame.attempt_id for frame in frames(Failed, actions)]
    assert given_up == [3]
    assert worker.machine.scheduler.get(AttemptId(2)) is not None, "it goes on once the flush of the other has ended"


def test_other_holders_are_waited_for() -> None:
    """Here a window that is being closed: its blocks come back whatever happens."""
    worker = _worker()
    frame = open_frame(1, prompt(20), OTHER.peer, max_tokens=1)
    target = only_frame(Reserved, worker.reserve(frame)).target
    assert target is not None
    worker.do(NoticeArrived(OTHER.peer, completed(target, frame)))
    assert worker.num_held_blocks == 5
    actions = worker.frame(prefill_frame(2, prompt(16, 40), holder=OTHER))
    for _ in range(3):
        actions = _end_step(worker, actions)
    assert frames(Failed, actions) == []
    actions = worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert [entry.attempt_id for entry in batch_of(actions).entries] == [2]


def test_where_nobody_waits_awaited_kv_is_waited_for() -> None:
    """What decodes here stays."""
    worker = _worker()
    actions = worker.frame(open_frame(1, prompt(4), None, max_tokens=24))
    worker.reserve(open_frame(2, prompt(12, 40), OTHER.peer))
    while any(isinstance(action, RunBatch) for action in actions):
        actions = _end_step(worker, actions)
        assert frames(Failed, actions) == []
    assert worker.num_held_blocks == 8
    assert len(worker.machine.scheduler) == 1


def test_a_lease_is_not_granted_out_of_what_such_a_prompt_will_need() -> None:
    worker = _worker()
    worker.frame(prefill_frame(1, prompt(16), holder=OTHER))
    assert worker.num_held_blocks == 1
    assert only_frame(Refused, worker.frame(open_frame(2, prompt(17, 40), OTHER.peer))).reason is RefusalReason.NO_CAPACITY


def test_no_circle_of_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _num_stuck_in_a_circle() == 0
    monkeypatch.setattr(LeaseTable, "granted_blocks", lambda self: set())
    assert _num_stuck_in_a_circle() == 2


def _num_stuck_in_a_circle() -> int:
    """Of two workers that each have reserved for what the other is to compute: those that neither compute it nor give it up."""
    left, right = peer_info("left", Role.BOTH), peer_info("right", Role.BOTH)
    num_stuck = 0
    for own, other in ((left, right), (right, left)):
        worker = Worker(own)
        worker.join(other)
        worker.reserve(open_frame(1, prompt(20), other.peer))
        actions = worker.frame(prefill_frame(2, prompt(20, 40), holder=other))
        num_stuck += not frames(Failed, actions) and not any(isinstance(action, RunBatch) for action in actions)
    return num_stuck
