from __future__ import annotations

import msgspec
import pytest

from pd_serve.ids import AttemptId, Epoch, LinkId, RouterId
from pd_serve.protocol.link import (
    Cancel,
    Closed,
    Failed,
    FailureReason,
    FinishReason,
    Open,
    RefusalReason,
    Refused,
    Reserved,
    Step,
    Target,
)
from pd_serve.protocol.notify import Abandon, Quiesced
from pd_serve.transport.base import PeerFenced, PeerLost
from tests.machine_fakes import (
    DECODE,
    EOS,
    LINK,
    PREFILL,
    Worker,
    all_of,
    batch_of,
    completed,
    frames,
    only,
    only_frame,
    open_frame,
    peer_id,
    prompt,
    replies,
)
from workers.events import (
    CloseWindow,
    DrainRequested,
    FrameReceived,
    HardFence,
    LinkClosed,
    LinkOpened,
    NoticeArrived,
    Observe,
    OpenWindow,
    RunBatch,
    SendNotice,
    StepFailed,
    Tick,
    TransportReported,
    WindowClosed,
    WindowOpened,
)


@pytest.fixture
def worker() -> Worker:
    worker = Worker(DECODE)
    worker.join(PREFILL)
    return worker


def _target(worker: Worker, frame: Open) -> Target:
    target = only_frame(Reserved, worker.reserve(frame)).target
    assert target is not None
    return target


def _arrive(worker: Worker, notice: object) -> tuple[object, ...]:
    return worker.do(NoticeArrived(PREFILL.peer, notice))  # type: ignore[arg-type]


def _num_stale(actions: tuple[object, ...]) -> int:
    return sum(1 for a in actions if isinstance(a, Observe) and a.sample.metric == "pd_serve_stale_records_total")


def test_the_writer_hears_of_a_lease_only_after_its_window_is_open(worker: Worker) -> None:
    opening = worker.frame(open_frame(1, prompt(6)))
    window = only(OpenWindow, opening).window
    assert replies(opening) == []
    assert window.writer == PREFILL.peer
    reserved = only_frame(Reserved, worker.do(WindowOpened(window.lease_id)))
    assert reserved.target is not None
    assert len(reserved.target.blocks) == 2
    assert int((window.ends - window.starts).sum()) == 6 * DECODE.layout.bytes_per_token


def test_a_window_that_opens_after_the_cancel_is_not_announced(worker: Worker) -> None:
    window = only(OpenWindow, worker.frame(open_frame(1, prompt(6)))).window
    worker.frame(Cancel(AttemptId(1)))
    assert replies(worker.do(WindowOpened(window.lease_id))) == []


def test_completion_emits_the_first_token_and_joins_the_next_step(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    target = _target(worker, frame)
    actions = _arrive(worker, completed(target, frame, 42, num_cached_tokens=4))
    assert only(CloseWindow, actions).lease_id == target.lease.lease_id
    (output,) = only_frame(Step, actions).outputs
    assert (output.token_id, output.finish, output.num_cached_tokens) == (42, None, 4)
    (entry,) = batch_of(actions).entries
    assert (entry.token_ids, entry.start, entry.block_table) == ((42,), 6, target.blocks)
    assert len(worker.machine.leases) == 0


@pytest.mark.parametrize(("first", "max_tokens", "finish"), [(42, 1, FinishReason.LENGTH), (EOS, 4, FinishReason.STOP)])
def test_a_first_token_that_ends_the_answer_leaves_only_cached_blocks(
    worker: Worker, first: int, max_tokens: int, finish: FinishReason
) -> None:
    frame = open_frame(1, prompt(6), max_tokens=max_tokens)
    actions = _arrive(worker, completed(_target(worker, frame), frame, first))
    assert [output.finish for output in only_frame(Step, actions).outputs] == [finish]
    assert all_of(RunBatch, actions) == []
    assert (worker.machine.is_idle, worker.num_held_blocks) == (False, 2)
    worker.do(WindowClosed(only(CloseWindow, actions).lease_id, fenced=False))
    assert worker.machine.is_idle
    assert (worker.num_held_blocks, worker.machine.pool.counts().cached) == (0, 1)


@pytest.mark.parametrize("first", [42, EOS])
def test_an_answer_that_prefill_had_to_cut_is_not_whole(worker: Worker, first: int) -> None:
    """As where one worker does both: its grammar could be kept no further, and the end was sampled for want of anything else."""
    frame = open_frame(1, prompt(6))
    actions = _arrive(worker, completed(_target(worker, frame), frame, first, is_cut=True))
    assert [output.finish for output in only_frame(Step, actions).outputs] == [FinishReason.LENGTH]
    assert all_of(RunBatch, actions) == []


def test_a_second_completion_is_stale(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    notice = completed(_target(worker, frame), frame)
    _arrive(worker, notice)
    again = _arrive(worker, notice)
    assert _num_stale(again) == 1
    assert frames(Step, again) == []


@pytest.mark.parametrize("changes", [{"epoch": Epoch(5)}, {"lease_id": 99}, {"attempt_id": AttemptId(2)}, {"contributor": 1}])
def test_a_completion_of_another_identity_is_dropped_and_counted(worker: Worker, changes: dict[str, object]) -> None:
    frame = open_frame(1, prompt(6))
    target = _target(worker, frame)
    assert _num_stale(_arrive(worker, completed(target, frame, **changes))) == 1
    assert frames(Step, _arrive(worker, completed(target, frame))) != []


def test_a_completion_by_another_peer_is_dropped(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    notice = completed(_target(worker, frame), frame)
    assert _num_stale(worker.do(NoticeArrived(peer_id("other"), notice))) == 1


@pytest.mark.parametrize(
    "changes",
    [{"nbytes": 1}, {"num_tokens": 5}, {"num_layers": 1}, {"num_contributors": 2}, {"first_token": 100}, {"num_cached_tokens": 6}],
)
def test_a_damaged_completion_fails_the_attempt_and_frees_nothing(worker: Worker, changes: dict[str, object]) -> None:
    frame = open_frame(1, prompt(6))
    target = _target(worker, frame)
    actions = _arrive(worker, completed(target, frame, **changes))
    assert only_frame(Failed, actions).reason is FailureReason.TRANSFER
    assert isinstance(only(SendNotice, actions).notice, Abandon)
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert worker.num_held_blocks == 2
    _arrive(worker, Quiesced(target.lease.lease_id, target.lease.epoch, 0))
    assert worker.num_held_blocks == 0


def test_a_deadline_answers_the_client_and_keeps_the_blocks(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    target = _target(worker, frame)
    worker.now += 5.0
    assert worker.machine.decode.next_deadline() == pytest.approx(worker.now)
    actions = worker.do(Tick())
    assert only_frame(Failed, actions).reason is FailureReason.TIMEOUT
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    for _ in range(3):
        worker.now += 1.0
        assert isinstance(only(SendNotice, worker.do(Tick())).notice, Abandon)
    assert worker.num_held_blocks == 2
    assert dict(worker.machine.leases_by_state())["quarantined"] == 1


def test_an_abandoned_lease_is_freed_by_a_late_completion(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    target = _target(worker, frame)
    assert replies(worker.frame(Cancel(AttemptId(1)))) == [Closed(AttemptId(1))]
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    actions = _arrive(worker, completed(target, frame))
    assert replies(actions) == []
    assert worker.machine.is_idle
    assert worker.num_held_blocks == 0


def test_closing_the_window_of_a_checked_lane_frees_an_abandoned_lease(worker: Worker) -> None:
    target = _target(worker, open_frame(1, prompt(6)))
    worker.frame(Cancel(AttemptId(1)))
    worker.do(WindowClosed(target.lease.lease_id, fenced=True))
    assert worker.num_held_blocks == 0


def test_quiesced_before_completion_fails_the_attempt_and_frees(worker: Worker) -> None:
    target = _target(worker, open_frame(1, prompt(6)))
    actions = _arrive(worker, Quiesced(target.lease.lease_id, target.lease.epoch, 0))
    assert only_frame(Failed, actions).reason is FailureReason.TRANSFER
    assert worker.num_held_blocks == 2
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert worker.num_held_blocks == 0


def test_a_lost_writer_keeps_the_blocks_until_it_is_fenced(worker: Worker) -> None:
    target = _target(worker, open_frame(1, prompt(6)))
    actions = worker.do(TransportReported(PeerLost(PREFILL.peer, "gone", fenced=False)))
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert only_frame(Failed, actions).reason is FailureReason.PEER_LOST
    assert worker.num_held_blocks == 2
    worker.do(TransportReported(PeerFenced(PREFILL.peer)))
    assert worker.num_held_blocks == 0
    assert worker.machine.is_idle


def test_a_lost_writer_does_not_touch_what_it_has_handed_over(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    _arrive(worker, completed(_target(worker, frame), frame))
    actions = worker.do(TransportReported(PeerLost(PREFILL.peer, "gone", fenced=True)))
    assert replies(actions) == []
    assert len(worker.machine.decode) == 1


def test_a_silent_writer_is_fenced_by_force_and_again_later(worker: Worker) -> None:
    _target(worker, open_frame(1, prompt(6)))
    worker.frame(Cancel(AttemptId(1)))
    worker.now += 9.0
    assert all_of(HardFence, worker.do(Tick())) == []
    worker.now += 1.0
    assert only(HardFence, worker.do(Tick())).peer == PREFILL.peer
    worker.now += 1.0
    assert all_of(HardFence, worker.do(Tick())) == []
    worker.now += 9.0
    assert only(HardFence, worker.do(Tick())).peer == PREFILL.peer


def test_a_writer_that_quarantines_most_of_the_pool_is_fenced_after_one_retry(worker: Worker) -> None:
    _target(worker, open_frame(1, prompt(31), max_tokens=1))
    worker.frame(Cancel(AttemptId(1)))
    worker.now += 1.0
    assert only(HardFence, worker.do(Tick())).peer == PREFILL.peer


def test_admission_counts_headroom_of_sequences_whose_kv_is_in_flight(worker: Worker) -> None:
    for attempt in (1, 2):
        _target(worker, open_frame(attempt, prompt(8, 10 * attempt), max_tokens=8))
    actions = worker.frame(open_frame(3, prompt(8, 30), max_tokens=8))
    assert only_frame(Refused, actions).reason is RefusalReason.NO_CAPACITY
    assert worker.machine.pool.num_allocatable == 4
    _target(worker, open_frame(4, prompt(4, 40), max_tokens=4))


def test_a_moved_request_is_let_in_only_where_it_can_get_on_by_as_much_as_it_lost(worker: Worker) -> None:
    _target(worker, open_frame(1, prompt(8, 10), max_tokens=12))
    for outputs, max_tokens, is_let_in in ((0, 12, True), (8, 12, False), (8, 2, True)):
        attempt = 10 * outputs + max_tokens
        actions = worker.frame(open_frame(attempt, prompt(12, 40), max_tokens=max_tokens, outputs=outputs))
        assert (not frames(Refused, actions)) is is_let_in, (outputs, max_tokens)
        if is_let_in:
            worker.frame(Cancel(AttemptId(attempt)))
            lease_id = only(OpenWindow, actions).window.lease_id
            worker.do(WindowClosed(lease_id, fenced=True))


def test_a_cached_prefix_is_reserved_but_not_written(worker: Worker) -> None:
    first = open_frame(1, prompt(9), max_tokens=1)
    _arrive(worker, completed(_target(worker, first), first))
    second = open_frame(2, prompt(9), max_tokens=1)
    opening = worker.frame(second)
    window = only(OpenWindow, opening).window
    target = only_frame(Reserved, worker.do(WindowOpened(window.lease_id))).target
    assert target is not None
    assert target.num_cached_tokens == 8
    assert int((window.ends - window.starts).sum()) == DECODE.layout.bytes_per_token
    assert frames(Step, _arrive(worker, completed(target, second))) != []


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (open_frame(1, prompt(6), writer=peer_id("stranger")), RefusalReason.NOT_JOINED),
        (open_frame(1, prompt(6), writer=DECODE.peer), RefusalReason.INVALID),
        (open_frame(1, prompt(29)), RefusalReason.TOO_LONG),
        (open_frame(1, ()), RefusalReason.INVALID),
        (open_frame(1, (100,)), RefusalReason.INVALID),
        (open_frame(1, prompt(6), max_tokens=0), RefusalReason.INVALID),
        (open_frame(1, prompt(6), outputs=6), RefusalReason.INVALID),
        (msgspec.structs.replace(open_frame(1, prompt(6)), timeout_s=float("nan")), RefusalReason.INVALID),
        (msgspec.structs.replace(open_frame(1, prompt(6)), timeout_s=float("inf")), RefusalReason.INVALID),
    ],
)
def test_a_bad_open_is_refused_and_holds_nothing(worker: Worker, frame: Open, reason: RefusalReason) -> None:
    assert only_frame(Refused, worker.frame(frame)).reason is reason
    assert worker.machine.is_idle


def test_an_attempt_is_opened_once(worker: Worker) -> None:
    _target(worker, open_frame(1, prompt(6)))
    assert only_frame(Refused, worker.frame(open_frame(1, prompt(6)))).reason is RefusalReason.DUPLICATE


def test_cancel_is_answered_even_for_an_unknown_attempt(worker: Worker) -> None:
    assert replies(worker.frame(Cancel(AttemptId(77)))) == [Closed(AttemptId(77))]


def test_another_router_cannot_cancel_an_attempt(worker: Worker) -> None:
    other = LinkId(2)
    worker.do(LinkOpened(other, RouterId("other")))
    _target(worker, open_frame(1, prompt(6)))
    worker.do(FrameReceived(other, Cancel(AttemptId(1))))
    assert AttemptId(1) in worker.machine.decode


def test_tokens_of_one_step_for_one_router_share_a_frame(worker: Worker) -> None:
    actions = worker.frame(open_frame(1, prompt(6), writer=None))
    worker.frame(open_frame(2, prompt(6, 20), writer=None))
    actions = worker.finish_step(batch_of(actions), 50)
    assert [output.attempt_id for output in only_frame(Step, actions).outputs] == [1]
    actions = worker.finish_step(batch_of(actions), 51)
    assert {output.attempt_id for output in only_frame(Step, actions).outputs} == {1, 2}


def test_a_cancelled_sequence_keeps_its_blocks_until_its_step_has_ended(worker: Worker) -> None:
    batch = batch_of(worker.frame(open_frame(1, prompt(6), writer=None)))
    worker.frame(Cancel(AttemptId(1)))
    assert worker.num_held_blocks == 2
    actions = worker.finish_step(batch, 50)
    assert frames(Step, actions) == []
    assert worker.num_held_blocks == 0


def test_a_lost_link_ends_its_attempts_unanswered(worker: Worker) -> None:
    target = _target(worker, open_frame(1, prompt(6)))
    actions = worker.do(LinkClosed(LINK))
    assert replies(actions) == []
    worker.do(WindowClosed(target.lease.lease_id, fenced=True))
    assert worker.machine.is_idle


def test_an_engine_fault_fails_the_attempts_of_its_step_only(worker: Worker) -> None:
    batch = batch_of(worker.frame(open_frame(1, prompt(6), writer=None)))
    waiting = open_frame(2, prompt(6, 20))
    target = _target(worker, waiting)
    failed = only_frame(Failed, worker.do(StepFailed(batch.step_id, "boom")))
    assert (failed.attempt_id, failed.reason) == (1, FailureReason.ENGINE)
    assert frames(Step, _arrive(worker, completed(target, waiting))) != []


def test_drain_refuses_new_work_and_fails_the_rest_at_its_deadline(worker: Worker) -> None:
    target = _target(worker, open_frame(1, prompt(6)))
    worker.do(DrainRequested(2.0))
    assert only_frame(Refused, worker.frame(open_frame(2, prompt(6)))).reason is RefusalReason.DRAINING
    worker.now += 2.0
    assert only_frame(Failed, worker.do(Tick())).reason is FailureReason.DRAINING
    worker.do(WindowClosed(target.lease.lease_id, fenced=True))
    assert worker.machine.is_idle


def test_kv_that_arrived_damaged_is_not_taken(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    record = completed(_target(worker, frame), frame)
    actions = worker.do(NoticeArrived(PREFILL.peer, record, "not what was sent"))
    assert not frames(Step, actions)
    failed = only_frame(Failed, actions)
    assert (failed.reason, "not what was sent" in failed.detail) == (FailureReason.TRANSFER, True)


def test_hand_over_is_timed_from_the_end_of_compute_to_the_first_decode_step(worker: Worker) -> None:
    frame = open_frame(1, prompt(6))
    actions = _arrive(worker, completed(_target(worker, frame), frame, compute_to_notice_s=0.25))
    assert not _handovers(actions)
    batch = batch_of(actions)
    worker.now += 0.5
    actions = worker.finish_step(batch, token_id=7)
    assert _handovers(actions) == [0.75]
    assert not _handovers(worker.finish_step(batch_of(actions), token_id=7))


def _handovers(actions: tuple[object, ...]) -> list[float]:
    return [a.sample.value for a in actions if isinstance(a, Observe) and a.sample.metric == "pd_serve_handover_seconds"]
