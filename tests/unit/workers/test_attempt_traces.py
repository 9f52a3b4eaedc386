"""When attempts passed through a worker, as told by the events and actions of its control loop."""

from __future__ import annotations

import pytest

from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampledToken, StepResult
from pd_serve.ids import AttemptId, Epoch, LeaseId, LinkId
from pd_serve.protocol.link import Closed, Failed, FailureReason, Lease, Open, Prefill, Reserved, Target, WorkerFrame
from pd_serve.protocol.notify import Completed
from pd_serve.protocol.traces import AttemptTrace
from tests.fakes import peer_id, sampling
from workers.attempt_traces import AttemptTraces
from workers.events import FrameReceived, NoticeArrived, RunBatch, SendFrame, StepDone, Tick

LINK = LinkId(1)
TARGET = Target(Lease(LeaseId(1), Epoch(1), peer_id()), (0,), 0)


def open_frame(attempt: int) -> FrameReceived:
    return FrameReceived(LINK, Open(AttemptId(attempt), (1, 2, 3), 0, sampling(), peer_id("prefill-0"), 10.0))


def prefill_frame(attempt: int) -> FrameReceived:
    return FrameReceived(LINK, Prefill(AttemptId(attempt), (1, 2, 3), 0, sampling(), TARGET))


def run(*attempts: int) -> RunBatch:
    entries = tuple(BatchEntry(AttemptId(attempt), Phase.PREFILL, (1,), 0, (0,), None) for attempt in attempts)
    return RunBatch(Batch(1, entries), ())


def done(started_at: float, ended_at: float, *sampled: int) -> StepDone:
    return StepDone(StepResult(1, tuple(SampledToken(AttemptId(attempt), 5, None) for attempt in sampled), started_at, ended_at))


def record(attempt: int) -> NoticeArrived:
    return NoticeArrived(peer_id("prefill-0"), Completed(LeaseId(1), Epoch(1), AttemptId(attempt), 0, 1, 5, None, 3, 1, 96, 0, 0.0))


def test_a_decode_leg_is_told_from_its_open_to_its_first_step() -> None:
    traces = AttemptTraces(8)
    traces.observe(open_frame(7), (), 1.0)
    traces.observe(Tick(), (SendFrame(LINK, Reserved(AttemptId(7), TARGET, 0)),), 2.0)
    traces.observe(record(7), (run(7),), 3.0)
    assert traces.recent(8) == ()
    traces.observe(done(3.5, 4.0, 7), (run(7),), 4.5)
    traces.observe(done(5.0, 6.0, 7), (), 6.0)
    assert traces.recent(8) == (AttemptTrace(AttemptId(7), False, 1.0, 2.0, 3.0, 3.5, 4.0),)


def test_a_prefill_leg_is_told_from_the_first_of_its_chunks_to_the_last() -> None:
    traces = AttemptTraces(8)
    traces.observe(prefill_frame(7), (run(7, 3),), 1.0)
    traces.observe(done(1.5, 2.0), (run(7),), 2.0)
    traces.observe(done(2.5, 3.0, 7), (), 3.0)
    assert traces.recent(8) == (AttemptTrace(AttemptId(7), True, 1.0, None, None, 1.5, 3.0),)


def test_only_the_latest_are_kept() -> None:
    traces = AttemptTraces(2)
    for attempt in range(4):
        traces.observe(prefill_frame(attempt), (run(attempt),), 1.0)
        traces.observe(done(2.0, 3.0, attempt), (), 3.0)
    assert [trace.attempt_id for trace in traces.recent(8)] == [2, 3]
    assert [trace.attempt_id for trace in traces.recent(1)] == [3]
    assert traces.recent(0) == ()


@pytest.mark.parametrize("end", [Closed(AttemptId(7)), Failed(AttemptId(7), FailureReason.TIMEOUT, "")])
def test_an_attempt_that_ends_early_leaves_nothing(end: WorkerFrame) -> None:
    traces = AttemptTraces(8)
    traces.observe(open_frame(7), (run(7),), 1.0)
    traces.observe(Tick(), (SendFrame(LINK, end),), 2.0)
    traces.observe(done(2.5, 3.0, 7), (), 3.0)
    assert traces.recent(8) == ()
    assert not traces._under_way


def test_nothing_is_kept_where_no_traces_are_wanted() -> None:
    traces = AttemptTraces(0)
    traces.observe(open_frame(7), (run(7),), 1.0)
    traces.observe(done(2.5, 3.0, 7), (), 3.0)
    assert traces.recent(8) == ()
    assert not traces._under_way
