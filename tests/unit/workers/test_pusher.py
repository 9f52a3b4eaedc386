"""Pushing layer by layer over a loopback pair, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from pd_serve.clock import VirtualClock
from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import Flushed
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.transport_nodes import Node, Nodes, ops
from workers.events import PushPlan
from workers.prefill.pusher import Pusher
from workers.prefill.transfers import overlap_ratio

NUM_LAYERS = 4
CHUNK = 4096
LOCAL_STRIDE = 64 * 1024
REMOTE_STRIDE = 32 * 1024


@dataclass
class Bench:
    """A pusher on one node, the target on the other, flush answers held back until they are asked for."""

    nodes: Nodes
    source: Node
    target: Node
    clock: VirtualClock
    pusher: Pusher
    answered: int = 0

    def plan(self, lease_id: int = 1, at: int = 0, chunk: int = 0) -> PushPlan:
        rows = ops((at, at // 2, CHUNK), (at + 3 * CHUNK, at // 2 + 2 * CHUNK, CHUNK))
        return PushPlan(AttemptId(lease_id), self.lease(lease_id), rows, LOCAL_STRIDE, REMOTE_STRIDE, NUM_LAYERS, chunk)

    def lease(self, lease_id: int) -> Lease:
        return Lease(LeaseId(lease_id), Epoch(lease_id + 100), self.target.peer)

    def open(self, lease_id: int) -> None:
        self.target.open_window(self.source.peer, lease=LeaseId(lease_id), epoch=Epoch(lease_id + 100))

    def completed(self, lease_id: int, nbytes: int) -> Completed:
        return Completed(LeaseId(lease_id), Epoch(lease_id + 100), AttemptId(lease_id), 0, 1, 5, None, 32, NUM_LAYERS, nbytes, 0, 0.0)

    def settle(self) -> None:
        """Let everything arrive and hand the flush answers to the pusher, at the clock's time."""

        def answered() -> bool:
            flushed = self.source.of(Flushed)
            for event in flushed[self.answered :]:
                assert isinstance(event, Flushed)
                self.pusher.on_flushed(event.token, event.ok, event.detail)
            self.answered = len(flushed)
            return self.pusher.num_in_flight == 0

        self.nodes.pump(answered, "flushes are answered")

    def landed(self, plan: PushPlan, layer: int) -> bool:
        return all(
            np.array_equal(
                self.source.memory[local + layer * LOCAL_STRIDE :][:nbytes], self.target.memory[remote + layer * REMOTE_STRIDE :][:nbytes]
            )
            for local, remote, nbytes in plan.ranges.tolist()
        )


@pytest.fixture(params=["shm", "tcp"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    nodes = Nodes(partial(LoopbackTransport, fabric=LoopbackFabric()), request.param, request.param == "shm")
    source, target = nodes.joined("prefill", "decode")
    clock = VirtualClock(100.0)
    yield Bench(nodes, source, target, clock, Pusher(source.transport, itertools.count(1).__next__, clock.now))
    nodes.close()


def test_layers_land_one_by_one_in_the_order_they_are_ready(bench: Bench) -> None:
    bench.open(1)
    plan = bench.plan()
    bench.pusher.begin_step(3, (plan,))
    for layer in range(NUM_LAYERS):
        assert not bench.landed(plan, layer)
        bench.pusher.layer_ready(3, layer, bench.clock.now())
        bench.settle()
        assert [bench.landed(plan, other) for other in range(NUM_LAYERS)] == [other <= layer for other in range(NUM_LAYERS)]
    assert bench.target.memory.nonzero()[0].size == plan.nbytes


def test_push_now_moves_every_layer(bench: Bench) -> None:
    bench.open(1)
    plan = bench.plan()
    bench.pusher.push_now(plan)
    bench.settle()
    assert all(bench.landed(plan, layer) for layer in range(NUM_LAYERS))


def test_a_layer_is_issued_once_even_if_it_is_told_twice(bench: Bench) -> None:
    bench.open(1)
    bench.pusher.begin_step(1, (bench.plan(),))
    bench.pusher.layer_ready(1, 0, 0.0)
    bench.pusher.layer_ready(1, 0, 0.0)
    assert bench.source.transport.counters().bytes_written == 2 * CHUNK


def test_layers_held_back_go_out_with_the_one_that_is_told_as_one_push(bench: Bench) -> None:
    bench.open(1)
    plan = bench.plan()
    bench.pusher.begin_step(1, (plan,))
    bench.pusher.layer_ready(1, 0, 1.0)
    bench.settle()
    bench.pusher.layer_ready(1, 3, 4.0, held=(1.0, 2.0, 3.0))
    assert bench.pusher.num_in_flight == 1
    bench.settle()
    assert all(bench.landed(plan, layer) for layer in range(NUM_LAYERS))
    assert bench.source.transport.counters().bytes_written == plan.nbytes
    finished = bench.pusher.finish(bench.target.peer, bench.completed(1, plan.nbytes), bench.clock.now(), "lane")
    assert finished is not None
    assert [(layer.layer, layer.kv_written_s) for layer in finished.trace.layers] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_layers_of_another_step_issue_nothing(bench: Bench) -> None:
    bench.open(1)
    bench.pusher.begin_step(1, (bench.plan(),))
    bench.pusher.layer_ready(2, 0, 0.0)
    bench.pusher.end_step(1)
    bench.pusher.layer_ready(1, 0, 0.0)
    assert bench.source.transport.counters().writes == 0


def test_stop_issues_nothing_more_of_that_lease_only(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    stopped, other = bench.plan(1), bench.plan(2, at=8 * CHUNK)
    bench.pusher.begin_step(1, (stopped, other))
    bench.pusher.layer_ready(1, 0, 0.0)
    bench.pusher.stop(stopped.lease)
    for layer in range(1, NUM_LAYERS):
        bench.pusher.layer_ready(1, layer, 0.0)
    bench.pusher.push_now(stopped)
    bench.settle()
    assert [bench.landed(stopped, layer) for layer in range(NUM_LAYERS)] == [True, False, False, False]
    assert all(bench.landed(other, layer) for layer in range(NUM_LAYERS))
    assert bench.pusher.problem_of(bench.target.peer, bench.completed(1, stopped.nbytes)) == "the push was stopped"
    assert bench.pusher.problem_of(bench.target.peer, bench.completed(2, other.nbytes)) == ""
    assert bench.pusher.num_transfers == 1


def test_a_record_that_claims_more_than_was_pushed_is_not_sent(bench: Bench) -> None:
    bench.open(1)
    plan = bench.plan()
    bench.pusher.begin_step(1, (plan,))
    for layer in range(NUM_LAYERS - 1):
        bench.pusher.layer_ready(1, layer, 0.0)
    bench.settle()
    pushed = plan.nbytes * (NUM_LAYERS - 1) // NUM_LAYERS
    assert bench.pusher.problem_of(bench.target.peer, bench.completed(1, plan.nbytes)) == f"pushed {pushed} of {plan.nbytes} bytes"


def test_an_out_of_bounds_plan_spoils_its_attempt_only(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    good = bench.plan(2, at=8 * CHUNK)
    bad = PushPlan(AttemptId(1), bench.lease(1), ops((0, 1 << 40, CHUNK)), LOCAL_STRIDE, REMOTE_STRIDE, NUM_LAYERS, 0)
    bench.pusher.begin_step(1, (bad, good))
    for layer in range(NUM_LAYERS):
        bench.pusher.layer_ready(1, layer, 0.0)
    bench.settle()
    assert "remote offset" in bench.pusher.problem_of(bench.target.peer, bench.completed(1, 0))
    assert bench.pusher.problem_of(bench.target.peer, bench.completed(2, good.nbytes)) == ""


def test_a_failed_layer_flush_spoils_the_attempt(bench: Bench) -> None:
    plan = bench.plan()
    bench.pusher.begin_step(1, (plan,))
    bench.source.transport.remove_peer(bench.target.peer)
    for layer in range(NUM_LAYERS):
        bench.pusher.layer_ready(1, layer, 0.0)
    bench.settle()
    assert bench.pusher.problem_of(bench.target.peer, bench.completed(1, plan.nbytes)) != ""


def test_a_lost_peer_leaves_nothing_behind(bench: Bench) -> None:
    bench.open(1)
    bench.pusher.begin_step(1, (bench.plan(),))
    bench.pusher.layer_ready(1, 0, 0.0)
    bench.pusher.drop_peer(bench.target.peer)
    assert bench.pusher.num_transfers == 0
    assert bench.pusher.num_in_flight == 0


def test_trace_and_samples_are_of_the_same_transfer(bench: Bench) -> None:
    """Two chunks; each layer takes 1 s of compute, and arrives 0.25 s after it was ready; the last one after compute ended."""
    bench.open(1)
    first, second = bench.plan(at=0, chunk=0), bench.plan(at=8 * CHUNK, chunk=1)
    for step_id, plan in enumerate((first, second)):
        bench.pusher.begin_step(step_id, (plan,))
        for layer in range(NUM_LAYERS):
            bench.pusher.layer_ready(step_id, layer, bench.clock.now())
            is_last = plan is second and layer == NUM_LAYERS - 1
            if not is_last:
                bench.clock.advance(0.25)
                bench.settle()
                bench.clock.advance(0.75)
    compute_ended_at = bench.clock.now() + 0.125
    bench.clock.advance(0.25)
    bench.settle()
    bench.clock.advance(0.5)

    total = first.nbytes + second.nbytes
    finished = bench.pusher.finish(bench.target.peer, bench.completed(1, total), compute_ended_at, "lane")
    assert finished is not None
    assert {(sample.metric, sample.label): sample.value for sample in finished.samples} == {
        ("pd_serve_kv_transfer_bytes_total", "lane"): total,
        ("pd_serve_kv_transfer_seconds", ""): pytest.approx(8 * 0.25),
        ("pd_serve_kv_overlap_ratio", ""): pytest.approx(7 / 8),
    }
    trace = finished.trace
    assert [(layer.chunk, layer.layer) for layer in trace.layers] == [(chunk, layer) for chunk in (0, 1) for layer in range(NUM_LAYERS)]
    assert [layer.push_start_s for layer in trace.layers] == pytest.approx(range(8))
    assert [layer.push_end_s - layer.push_start_s for layer in trace.layers] == pytest.approx([0.25] * 8)
    assert sum(layer.nbytes for layer in trace.layers) == total
    assert (trace.compute_end_s, trace.flushed_s) == pytest.approx((7.125, 7.75))
    assert bench.pusher.num_transfers == 0


def test_attempts_that_share_a_link_share_its_time(bench: Bench) -> None:
    """Two attempts on a link that needs 1 s per layer of both: bytes over the sum of their seconds is the link's bandwidth."""
    bench.open(1)
    bench.open(2)
    plans = (bench.plan(1), bench.plan(2, at=8 * CHUNK))
    bench.pusher.begin_step(1, plans)
    for layer in range(NUM_LAYERS):
        bench.pusher.layer_ready(1, layer, bench.clock.now())
        bench.clock.advance(1.0)
        bench.settle()
    seconds = 0.0
    for plan in plans:
        finished = bench.pusher.finish(bench.target.peer, bench.completed(plan.lease.lease_id, plan.nbytes), bench.clock.now(), "lane")
        assert finished is not None
        seconds += next(sample.value for sample in finished.samples if sample.metric == "pd_serve_kv_transfer_seconds")
    assert seconds == pytest.approx(NUM_LAYERS)


@pytest.mark.parametrize(("ended", "expected"), [([], 0.0), ([(1.0, 10)], 1.0), ([(1.0, 30), (2.1, 10)], 0.75), ([(3.0, 5)], 0.0)])
def test_overlap_ratio_is_the_share_of_bytes_not_of_writes(ended: list[tuple[float, int]], expected: float) -> None:
    assert overlap_ratio(ended, 2.0) == expected
