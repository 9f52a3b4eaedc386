from __future__ import annotations

import msgspec
import pytest

from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.protocol.link import Cancel, Closed, Failed, FailureReason, Prefill, PrefillDone
from pd_serve.protocol.notify import ALL_CONTRIBUTORS, Abandon, Completed, Quiesced
from pd_serve.transport.base import PeerLost
from tests.machine_fakes import (
    DECODE,
    LINK,
    PREFILL,
    Worker,
    all_of,
    batch_of,
    only,
    only_frame,
    prefill_frame,
    prompt,
    replies,
)
from workers.events import (
    FlushDone,
    FlushThenNotify,
    LinkClosed,
    NoticeArrived,
    PushNow,
    RemovePeer,
    RunBatch,
    StepFailed,
    StopPush,
    Tick,
    TransportReported,
)
from workers.prefill.spent import SpentLeases


@pytest.fixture
def worker() -> Worker:
    worker = Worker(PREFILL, prefill_chunk=4)
    worker.join(DECODE)
    return worker


def _run_to_flush(worker: Worker, frame: Prefill) -> FlushThenNotify:
    """Compute the whole prompt."""
    actions = worker.frame(frame)
    while True:
        flushes = all_of(FlushThenNotify, actions)
        if flushes:
            return flushes[0]
        actions = worker.finish_step(batch_of(actions), 42)


def test_each_chunk_is_pushed_as_far_as_it_was_computed(worker: Worker) -> None:
    actions = worker.frame(prefill_frame(1, prompt(6)))
    first = only(RunBatch, actions)
    actions = worker.finish_step(first.batch, 42)
    second = only(RunBatch, actions)
    (plan_one,), (plan_two,) = first.pushes, second.pushes
    assert [plan_one.chunk_index, plan_two.chunk_index] == [0, 1]
    assert plan_one.nbytes == 4 * DECODE.layout.bytes_per_token
    assert plan_two.nbytes == 2 * DECODE.layout.bytes_per_token
    assert first.batch.has_push


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["with the step", "after it"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_decode_is_told_of_an_answer_that_had_to_be_cut(num_ranks: int, is_cut: bool) -> None:
    model_heads = PREFILL.layout.num_kv_heads * num_ranks
    worker = Worker(msgspec.structs.replace(PREFILL, transport_metadata=(b"m",) * num_ranks, total_kv_heads=model_heads))
    holder = msgspec.structs.replace(DECODE, transport_metadata=(b"m",) * num_ranks, total_kv_heads=model_heads)
    worker.join(holder)
    actions = worker.frame(prefill_frame(1, prompt(6), holder=holder))
    flushes = all_of(FlushThenNotify, worker.finish_step(batch_of(actions), 42, is_cut))
    assert len(flushes) == num_ranks
    for flush in flushes:
        assert isinstance(flush.notice, Completed)
        assert (flush.notice.first_token, flush.notice.is_cut) == (42, is_cut)


def test_completion_follows_the_flush_and_source_blocks_stay_until_then(worker: Worker) -> None:
    flush = _run_to_flush(worker, prefill_frame(1, prompt(6)))
    assert isinstance(flush.notice, Completed)
    assert (flush.peer, flush.compute_ended_at) == (DECODE.peer, worker.now)
    assert (flush.notice.first_token, flush.notice.num_tokens) == (42, 6)
    assert flush.notice.nbytes == 6 * DECODE.layout.bytes_per_token
    assert worker.num_held_blocks == 2
    actions = worker.do(FlushDone(flush.token, True))
    assert replies(actions) == [PrefillDone(AttemptId(1), 6, 0)]
    assert worker.machine.is_idle
    assert (worker.num_held_blocks, worker.machine.pool.counts().cached) == (0, 1)


def test_a_failed_flush_is_a_failed_transfer(worker: Worker) -> None:
    flush = _run_to_flush(worker, prefill_frame(1, prompt(6)))
    assert only_frame(Failed, worker.do(FlushDone(flush.token, False, "reset"))).reason is FailureReason.TRANSFER
    assert worker.machine.is_idle


@pytest.mark.parametrize("num_cached", [0, 4, 8])
def test_what_decode_has_is_not_sent(worker: Worker, num_cached: int) -> None:
    flush = _run_to_flush(worker, prefill_frame(1, prompt(9), num_cached=num_cached))
    assert isinstance(flush.notice, Completed)
    assert flush.notice.nbytes == (9 - num_cached) * DECODE.layout.bytes_per_token


def test_a_prefix_cached_here_only_is_pushed_at_once(worker: Worker) -> None:
    worker.do(FlushDone(_run_to_flush(worker, prefill_frame(1, prompt(9))).token, True))
    actions = worker.frame(prefill_frame(2, prompt(9), lease_id=2, num_cached=4))
    assert only(PushNow, actions).plan.nbytes == 4 * DECODE.layout.bytes_per_token
    (plan,) = only(RunBatch, actions).pushes
    assert plan.nbytes == DECODE.layout.bytes_per_token
    flush = only(FlushThenNotify, worker.finish_step(batch_of(actions), 42))
    assert isinstance(flush.notice, Completed)
    assert (flush.notice.num_cached_tokens, flush.notice.nbytes) == (8, 5 * DECODE.layout.bytes_per_token)


def test_cancel_stops_the_push_and_frees_after_flush_and_step(worker: Worker) -> None:
    frame = prefill_frame(1, prompt(6))
    batch = batch_of(worker.frame(frame))
    actions = worker.frame(Cancel(AttemptId(1)))
    assert replies(actions) == [Closed(AttemptId(1))]
    order = [type(action) for action in actions if isinstance(action, StopPush | FlushThenNotify)]
    assert order == [StopPush, FlushThenNotify]
    flush = only(FlushThenNotify, actions)
    assert flush.notice == Quiesced(frame.target.lease.lease_id, frame.target.lease.epoch, 0)
    assert replies(worker.do(FlushDone(flush.token, True))) == []
    assert worker.num_held_blocks == 1
    worker.finish_step(batch, 42)
    assert worker.num_held_blocks == 0
    assert worker.machine.is_idle


def test_the_step_may_end_before_the_flush(worker: Worker) -> None:
    batch = batch_of(worker.frame(prefill_frame(1, prompt(6))))
    flush = only(FlushThenNotify, worker.frame(Cancel(AttemptId(1))))
    worker.finish_step(batch, 42)
    assert worker.num_held_blocks == 1
    worker.do(FlushDone(flush.token, False))
    assert worker.num_held_blocks == 0


def test_a_cancel_while_flushing_lets_the_completion_go(worker: Worker) -> None:
    flush = _run_to_flush(worker, prefill_frame(1, prompt(6)))
    actions = worker.frame(Cancel(AttemptId(1)))
    assert replies(actions) == [Closed(AttemptId(1))]
    assert all_of(FlushThenNotify, actions) == []
    assert replies(worker.do(FlushDone(flush.token, True))) == []
    assert worker.machine.is_idle


def test_the_answer_to_a_completion_may_come_before_the_end_of_its_step(worker: Worker) -> None:
    step = only(RunBatch, worker.frame(prefill_frame(1, prompt(4))))
    (flush,) = step.completions
    assert replies(worker.do(FlushDone(flush.token, True))) == []
    assert worker.num_held_blocks == 1
    assert replies(worker.finish_step(step.batch, 42)) == [PrefillDone(AttemptId(1), 4, 0)]
    assert worker.machine.is_idle
    assert worker.num_held_blocks == 0


def test_only_the_last_chunk_brings_a_completion(worker: Worker) -> None:
    step = only(RunBatch, worker.frame(prefill_frame(1, prompt(6))))
    assert step.completions == ()
    (completion,) = only(RunBatch, worker.finish_step(step.batch, 42)).completions
    assert isinstance(completion.notice, Completed)
    assert completion.notice.nbytes == 6 * DECODE.layout.bytes_per_token


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_cancel_during_the_last_step_is_answered_by_quiesced_alone(worker: Worker, is_answered: bool) -> None:
    """The completion may have gone out, or be held back by StopPush: it is not waited for."""
    step = only(RunBatch, worker.frame(prefill_frame(1, prompt(4))))
    (completion,) = step.completions
    if is_answered:
        worker.do(FlushDone(completion.token, True))
    quiesced = only(FlushThenNotify, worker.frame(Cancel(AttemptId(1))))
    assert isinstance(quiesced.notice, Quiesced)
    worker.finish_step(step.batch, 42)
    if not is_answered:
        assert replies(worker.do(FlushDone(completion.token, False, "the push was stopped"))) == []
    assert worker.num_held_blocks == 1
    assert replies(worker.do(FlushDone(quiesced.token, True))) == []
    assert worker.machine.is_idle
    assert worker.num_held_blocks == 0


def test_completions_of_a_failed_step_are_void(worker: Worker) -> None:
    step = only(RunBatch, worker.frame(prefill_frame(1, prompt(4))))
    actions = worker.do(StepFailed(step.batch.step_id, "planted"))
    assert only_frame(Failed, actions).reason is FailureReason.ENGINE
    quiesced = only(FlushThenNotify, actions)
    assert isinstance(quiesced.notice, Quiesced)
    worker.do(FlushDone(quiesced.token, True))
    assert worker.machine.is_idle


def test_abandon_of_a_running_job_tells_the_router_and_quiesces(worker: Worker) -> None:
    frame = prefill_frame(1, prompt(6))
    worker.frame(frame)
    actions = worker.do(NoticeArrived(DECODE.peer, Abandon(frame.target.lease.lease_id, frame.target.lease.epoch)))
    assert only_frame(Failed, actions).reason is FailureReason.REFUSED
    assert isinstance(only(FlushThenNotify, actions).notice, Quiesced)


def test_a_prefill_that_its_abandon_has_overtaken_is_refused(worker: Worker) -> None:
    frame = prefill_frame(1, prompt(6))
    lease = frame.target.lease
    actions = worker.do(NoticeArrived(DECODE.peer, Abandon(lease.lease_id, lease.epoch)))
    assert only(FlushThenNotify, actions).notice == Quiesced(lease.lease_id, lease.epoch, ALL_CONTRIBUTORS)
    assert only_frame(Failed, worker.frame(frame)).reason is FailureReason.REFUSED
    assert len(worker.machine.prefill) == 0


def test_abandon_is_answered_again_when_its_answer_was_lost(worker: Worker) -> None:
    abandon = Abandon(LeaseId(7), Epoch(1))
    flush = only(FlushThenNotify, worker.do(NoticeArrived(DECODE.peer, abandon)))
    assert all_of(FlushThenNotify, worker.do(NoticeArrived(DECODE.peer, abandon))) == []
    worker.do(FlushDone(flush.token, True))
    assert isinstance(only(FlushThenNotify, worker.do(NoticeArrived(DECODE.peer, abandon))).notice, Quiesced)


def test_a_lease_is_used_once(worker: Worker) -> None:
    worker.do(FlushDone(_run_to_flush(worker, prefill_frame(1, prompt(6))).token, True))
    assert only_frame(Failed, worker.frame(prefill_frame(2, prompt(6)))).reason is FailureReason.REFUSED


def test_a_lost_holder_fails_the_job(worker: Worker) -> None:
    worker.frame(prefill_frame(1, prompt(6)))
    actions = worker.do(TransportReported(PeerLost(DECODE.peer, "gone", fenced=True)))
    assert only_frame(Failed, actions).reason is FailureReason.PEER_LOST
    assert only(StopPush, actions).lease.lease_id == 1


def test_a_lost_link_stops_its_jobs_unanswered(worker: Worker) -> None:
    worker.frame(prefill_frame(1, prompt(6)))
    actions = worker.do(LinkClosed(LINK))
    assert replies(actions) == []
    assert isinstance(only(FlushThenNotify, actions).notice, Quiesced)


def test_an_unjoined_holder_is_refused() -> None:
    assert only_frame(Failed, Worker(PREFILL).frame(prefill_frame(1, prompt(6)))).reason is FailureReason.PEER_LOST


@pytest.mark.parametrize(
    "changes", [{"blocks": (0,)}, {"blocks": (0, 8)}, {"blocks": (0, -1)}, {"num_cached_tokens": 3}, {"num_cached_tokens": 8}]
)
def test_a_target_outside_the_holders_pool_is_refused(worker: Worker, changes: dict[str, object]) -> None:
    frame = prefill_frame(1, prompt(6))
    frame = msgspec.structs.replace(frame, target=msgspec.structs.replace(frame.target, **changes))
    assert only_frame(Failed, worker.frame(frame)).reason is FailureReason.REFUSED
    assert worker.machine.is_idle


def test_a_flush_that_does_not_end_lets_go_of_its_peer(worker: Worker) -> None:
    worker.frame(prefill_frame(1, prompt(6)))
    worker.frame(Cancel(AttemptId(1)))
    worker.now += 29.9
    assert all_of(RemovePeer, worker.do(Tick())) == []
    worker.now += 0.1
    assert only(RemovePeer, worker.do(Tick())).peer == DECODE.peer


def test_spent_leases_stay_spent_in_bounded_memory() -> None:
    spent = SpentLeases(keep_per_holder=10)
    for number in range(1, 1000):
        spent.add(DECODE.peer, LeaseId(number))
    assert all(spent.contains(DECODE.peer, LeaseId(number)) for number in range(1, 1000))
    assert not spent.contains(DECODE.peer, LeaseId(1000))
    assert not spent.contains(PREFILL.peer, LeaseId(1))
    assert sum(len(leases) for leases in spent._spent.values()) <= 10
