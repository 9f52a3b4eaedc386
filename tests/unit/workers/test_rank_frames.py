"""What ranks of one worker tell each other survives the socket."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec, StepResult
from pd_serve.errors import ProtocolError
from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import Fatal, Lease, Sample, Stop
from pd_serve.protocol.notify import Completed
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.transport.base import PeerJoined, WriteWindow
from workers.events import AddPeer, FlushThenNotify, NoticeArrived, OpenWindow, PushNow, PushPlan, StepDone
from workers.rank_frames import FOLLOWER_TYPES, LEADER_TYPES, FollowerSocket, FrameCodec, LeaderSocket, RunStep
from workers.transport_commands import SamplesObserved

PEER = PeerId(WorkerId("p"), Incarnation(1))
LEASE = Lease(LeaseId(2), Epoch(3), PEER)
COMPLETED = Completed(LEASE.lease_id, LEASE.epoch, AttemptId(1), 1, 2, 5, None, 4, 1, 8, 0, 0.0)


def plan() -> PushPlan:
    source = KVLayout(2, 2, 4, 4, 8, KVDtype.FLOAT32)
    target = KVLayout(2, 1, 4, 8, 8, KVDtype.BFLOAT16)
    packings = tuple(plan_packings(source, target, HeadSlice(1, 0, 1), (0, 3), (5,), 0, 7, 1 << 12))
    return PushPlan(AttemptId(1), LEASE, np.arange(6).reshape(2, 3), 8, 16, 2, 0, packings, 1, 0)


def batch() -> Batch:
    sample = SampleSpec(SamplingParams(max_tokens=3, temperature=0.5, seed=7), 4, 1, (1, 2), (3,), True)
    entry = BatchEntry(AttemptId(1), Phase.PREFILL, (5, 6, 7), 1, (0, 4), sample)
    return Batch(9, (entry,), True)


@pytest.fixture
def ends() -> tuple[FollowerSocket, LeaderSocket]:
    near, far = socket.socketpair()
    return FollowerSocket(near, 1), LeaderSocket(far)


def test_commands_and_batches_reach_a_rank_as_they_were(ends: tuple[FollowerSocket, LeaderSocket]) -> None:
    follower, leader = ends
    window = WriteWindow(LEASE.lease_id, LEASE.epoch, PEER, np.array([0, 8]), np.array([4, 12]), (PEER,))
    flush = FlushThenNotify(PEER, 4, COMPLETED, 1.5, 1, 0)
    for frame in (AddPeer(PEER, (b"m",)), OpenWindow(window), PushNow(plan()), flush, RunStep(batch(), (plan(),)), Stop()):
        follower.send(frame)
    follower.flush()
    add, opened, now, flushed, step, stop = leader.receive()
    assert (add, flushed, stop) == (AddPeer(PEER, (b"m",)), flush, Stop())
    assert isinstance(opened, OpenWindow)
    assert opened.window.writers == (PEER, PEER)
    assert opened.window.starts.tolist() == [0, 8]
    assert isinstance(step, RunStep)
    assert step.batch == batch()
    assert isinstance(now, PushNow)
    for arrived in (now.plan, *step.pushes):
        assert arrived.ranges.tolist() == plan().ranges.tolist()
        assert arrived.lease == LEASE
        assert [packing.ranges.tolist() for packing in arrived.packings] == [packing.ranges.tolist() for packing in plan().packings]
        assert arrived.nbytes == plan().nbytes
    follower.close()
    leader.close()


def test_outputs_reach_rank_0_as_they_were(ends: tuple[FollowerSocket, LeaderSocket]) -> None:
    follower, leader = ends
    frames = [
        PeerJoined(PEER, "posix", True, 1.0, 2.0),
        NoticeArrived(PEER, COMPLETED, "damaged"),
        SamplesObserved((Sample("m", 1.0),)),
        StepDone(StepResult(1, (), 0.0, 1.0)),
        Fatal("no memory"),
    ]
    for frame in frames:
        leader.send(frame)
    leader.flush()
    assert follower.receive() == frames
    leader.close()
    assert follower.receive() == []
    assert follower.closed
    follower.close()


@pytest.mark.parametrize("data", [b"", b"\x92\xa4Nope\xc0", b"\x92\xa7AddPeer\x91\x01", b"\xc1", b"\x92\xa4Stop\xc0"])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameCodec(LEADER_TYPES).decode(data)


def test_an_array_that_does_not_fit_its_shape_is_refused() -> None:
    codec = FrameCodec(LEADER_TYPES)
    data = codec.encode(PushNow(PushPlan(AttemptId(1), LEASE, np.zeros((2, 3), np.int64), 1, 1, 1, 0)))
    with pytest.raises(ProtocolError):
        codec.decode(data.replace(b"\x92\x02\x03", b"\x92\x02\x04"))


def test_names_of_frames_are_different() -> None:
    for types in (LEADER_TYPES, FOLLOWER_TYPES):
        assert len({kind.__name__ for kind in types}) == len(types)
