"""The transport thread over every implementation: real threads, layers in, KV and record out, quiet in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.contract.implementations import IMPLEMENTATIONS, Implementation
from tests.rank_threads import NUM_LAYERS, STOP_S, Pair, Rank, is_idle
from tests.transport_nodes import Nodes, ops, peer_id
from workers.events import (
    AddPeer,
    CloseWindow,
    FlushDone,
    FlushThenNotify,
    NoticeArrived,
    PushNow,
    PushPlan,
    TransportReported,
    WindowClosed,
)
from workers.transport_commands import BeginStep, LayerReady, StepEnded

NUM_ROUNDS = 20


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    implementation: Implementation = request.param
    try:
        factory = implementation.factory()
        ranks = [Rank(name, factory, implementation.lanes) for name in ("prefill", "decode")]
    except (ImportError, TransportUnavailableError) as error:
        pytest.skip(f"{implementation.name}: {error}")
    yield Pair(*ranks)
    for rank in ranks:
        assert rank.thread.stop(STOP_S)


def test_records_arrive_after_their_layers_round_after_round(pair: Pair) -> None:
    for number in range(1, NUM_ROUNDS + 1):
        pair.open(number)
        pair.source.memory[:] = number
        plan = pair.plan(number)
        pair.source.thread.submit(BeginStep(number, (plan,)))
        for layer in range(NUM_LAYERS):
            pair.source.thread.submit(LayerReady(number, layer, time.monotonic()))
        pair.source.thread.submit(StepEnded(number))
        done = pair.finish(plan, token=number)
        assert done.ok, done.detail
        arrived = pair.target.expect(NoticeArrived)
        assert isinstance(arrived.notice, Completed)
        assert arrived.notice.attempt_id == number
        assert pair.landed() == [True] * NUM_LAYERS
        pair.target.thread.submit(CloseWindow(plan.lease.lease_id))
        pair.target.expect(WindowClosed)
    assert len(pair.source.thread.recent_traces(100)) == min(NUM_ROUNDS, 16)


@pytest.mark.usefixtures("pair")
def test_two_idle_threads_use_under_two_percent_of_a_core_each() -> None:
    assert is_idle(2 * 0.02)


def test_a_peer_that_stands_still_costs_next_to_nothing(nodes: Nodes) -> None:
    """Writes and a flush that nobody takes, or that are long done: either way the thread sleeps, and the flush ends when the peer moves."""
    rank = Rank("prefill", nodes.factory, nodes.lanes)
    frozen = nodes.make(peer_id("decode"))
    frozen.open_window(rank.peer, lease=LeaseId(1), epoch=Epoch(5))
    rank.thread.submit(AddPeer(frozen.peer, (frozen.metadata,)))
    frozen.transport.add_peer(rank.peer, rank.ready.metadata)
    nodes.pump(lambda: frozen.has_joined(rank.peer) and any(isinstance(o, TransportReported) for o in rank.pending()), "both join")
    plan = PushPlan(AttemptId(1), Lease(LeaseId(1), Epoch(5), frozen.peer), ops((0, 0, 250_000)), 262_144, 262_144, NUM_LAYERS, 0)
    rank.thread.submit(PushNow(plan))
    rank.thread.submit(FlushThenNotify(frozen.peer, 1, None, None))
    time.sleep(0.05)
    assert is_idle(0.1)
    nodes.pump(lambda: any(isinstance(o, FlushDone) for o in (*rank.pending(), *rank.seen)), "the flush ends")
    assert next(output for output in rank.seen if isinstance(output, FlushDone)) == FlushDone(1, True)
    assert rank.thread.stop(STOP_S)


class Restless(LoopbackTransport):
    """PLANTED: always says that it needs progress."""

    def busy(self) -> bool:
        return True

    def arm(self) -> bool:
        return True


class Sleepless(Restless):
    """PLANTED: and never lets its owner sleep."""

    def arm(self) -> bool:
        return False


def test_the_thread_naps_where_a_transport_stays_busy_and_the_suite_catches_one_that_cannot_sleep() -> None:
    for transport, share, num_windows, can_sleep in ((Restless, 0.3, 8, True), (Sleepless, 0.04, 2, False)):
        rank = Rank("prefill", partial(transport, fabric=LoopbackFabric()), "tcp")
        assert is_idle(share, num_windows) is can_sleep
        assert rank.thread.stop(3.0)
