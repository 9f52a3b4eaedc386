"""A decode leg whose KV is written by two ranks of a prefill worker: it starts with both, and its blocks wait for both (F7)."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.ids import AttemptId
from pd_serve.protocol.link import Cancel, Failed, FailureReason, Open, Reserved, Step, Target
from pd_serve.protocol.notify import Abandon, Completed, Quiesced
from pd_serve.transport.base import PeerFenced, PeerLost
from tests.machine_fakes import DECODE, PREFILL, Worker, all_of, completed, frames, only, only_frame, open_frame, prompt, replies
from workers.events import Action, CloseWindow, NoticeArrived, Observe, SendNotice, Tick, TransportReported, WindowClosed

FRAME = open_frame(1, prompt(6))


@pytest.fixture
def worker() -> Worker:
    """Of one rank with two KV heads; the writer's two ranks have one each."""
    layout = msgspec.structs.replace(DECODE.layout, num_kv_heads=2)
    worker = Worker(msgspec.structs.replace(DECODE, layout=layout))
    worker.join(msgspec.structs.replace(PREFILL, transport_metadata=(b"", b""), total_kv_heads=2))
    return worker


def reserve(worker: Worker, frame: Open = FRAME) -> Target:
    target = only_frame(Reserved, worker.reserve(frame)).target
    assert target is not None
    return target


def part(target: Target, contributor: int, **changes: object) -> Completed:
    """The record of one of two ranks, each of which owes half of the bytes."""
    half = completed(target, FRAME).nbytes
    return completed(target, FRAME, **{"contributor": contributor, "num_contributors": 2, "nbytes": half} | changes)


def arrive(worker: Worker, notice: Completed | Quiesced) -> tuple[Action, ...]:
    return worker.do(NoticeArrived(PREFILL.peer, notice))


def num_stale(actions: tuple[Action, ...]) -> int:
    return sum(1 for action in all_of(Observe, actions) if action.sample.metric == "pd_serve_stale_records_total")


def test_decode_starts_with_the_last_part_whichever_that_is(worker: Worker) -> None:
    target = reserve(worker)
    assert replies(arrive(worker, part(target, 1))) == []
    assert num_stale(arrive(worker, part(target, 1))) == 1, "the same part twice is not two parts"
    actions = arrive(worker, part(target, 0))
    assert len(frames(Step, actions)) == 1
    assert only(CloseWindow, actions).lease_id == target.lease.lease_id


@pytest.mark.parametrize("ending", ["quiesced", "completed"])
@pytest.mark.parametrize("first", [0, 1])
def test_failure_of_one_rank_frees_nothing_while_the_other_may_write(worker: Worker, first: int, ending: str) -> None:
    target = reserve(worker)
    lease = target.lease
    actions = arrive(worker, Quiesced(lease.lease_id, lease.epoch, first))
    assert only_frame(Failed, actions).reason is FailureReason.TRANSFER
    assert only(SendNotice, actions).notice == Abandon(lease.lease_id, lease.epoch)
    worker.do(WindowClosed(lease.lease_id, fenced=False))
    assert worker.num_held_blocks == 2
    assert num_stale(arrive(worker, Quiesced(lease.lease_id, lease.epoch, first))) == 1
    worker.now += 1.0
    assert isinstance(only(SendNotice, worker.do(Tick())).notice, Abandon)
    assert worker.num_held_blocks == 2
    last = 1 - first
    arrive(worker, Quiesced(lease.lease_id, lease.epoch, last) if ending == "quiesced" else part(target, last))
    assert worker.num_held_blocks == 0
    assert worker.machine.is_idle


def test_a_damaged_part_counts_for_nothing(worker: Worker) -> None:
    target = reserve(worker)
    arrive(worker, part(target, 0))
    actions = arrive(worker, part(target, 1, nbytes=1))
    assert only_frame(Failed, actions).reason is FailureReason.TRANSFER
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert worker.num_held_blocks == 2
    arrive(worker, Quiesced(target.lease.lease_id, target.lease.epoch, 1))
    assert worker.num_held_blocks == 0


def test_parts_that_came_before_a_cancel_need_not_be_asked_for_again(worker: Worker) -> None:
    target = reserve(worker)
    arrive(worker, part(target, 0))
    worker.frame(Cancel(AttemptId(1)))
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert worker.num_held_blocks == 2
    arrive(worker, part(target, 1))
    assert worker.num_held_blocks == 0


@pytest.mark.parametrize("first", [0, 1])
def test_after_a_cancel_each_rank_is_waited_for(worker: Worker, first: int) -> None:
    lease = reserve(worker).lease
    worker.frame(Cancel(AttemptId(1)))
    worker.do(WindowClosed(lease.lease_id, fenced=False))
    for contributor, num_held in ((first, 2), (1 - first, 0)):
        arrive(worker, Quiesced(lease.lease_id, lease.epoch, contributor))
        assert worker.num_held_blocks == num_held
    assert worker.machine.is_idle


def test_the_end_of_the_process_is_the_end_of_both_ranks(worker: Worker) -> None:
    target = reserve(worker)
    arrive(worker, part(target, 0))
    worker.do(TransportReported(PeerLost(PREFILL.peer, "gone", fenced=False)))
    worker.do(WindowClosed(target.lease.lease_id, fenced=False))
    assert worker.num_held_blocks == 2
    worker.do(TransportReported(PeerFenced(PREFILL.peer)))
    assert worker.num_held_blocks == 0
    assert worker.machine.is_idle
