"""The transport thread with loopback transports: two workers' threads in one process, real clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pytest

from pd_serve.engine.batch import SampledToken, StepResult
from pd_serve.errors import TransportError
from pd_serve.ids import Epoch, LeaseId
from pd_serve.protocol.link import Sample
from pd_serve.protocol.notify import Abandon, Completed, Quiesced
from pd_serve.protocol.sampling import TokenLogprobs
from pd_serve.transport.base import EventSink, PeerJoined, PeerLost, PeerRefused, TransportSettings, WriteWindow
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.patience import PATIENCE_S, Waiting
from tests.rank_threads import CHUNK, NUM_LAYERS, STOP_S, Pair, Rank, is_idle
from tests.transport_nodes import POOL_NBYTES, peer_id, settings_for
from workers.events import (
    AddPeer,
    CloseWindow,
    FlushDone,
    FlushThenNotify,
    HardFence,
    NoticeArrived,
    OpenWindow,
    PushNow,
    RemovePeer,
    SendNotice,
    StopPush,
    TransportReported,
    WindowClosed,
)
from workers.transport_commands import (
    AllocatePool,
    BeginStep,
    LayerReady,
    RegisterPool,
    SamplesObserved,
    StepEnded,
    StepSampled,
    TransportFailed,
)
from workers.transport_thread import TransportThread


@pytest.fixture(params=["shm", "tcp"])
def lanes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(lanes: str) -> Iterator[Pair]:
    factory = partial(LoopbackTransport, fabric=LoopbackFabric())
    ranks = [Rank("prefill", factory, lanes), Rank("decode", factory, lanes)]
    yield Pair(*ranks)
    for rank in ranks:
        assert rank.thread.stop(STOP_S)


def wait_until(condition: Callable[[], bool]) -> None:
    waiting = Waiting(PATIENCE_S, 0.002)
    while not condition():
        assert not waiting.is_over()
        time.sleep(0.002)


def test_layers_land_while_the_step_runs_and_the_record_comes_after_them(pair: Pair) -> None:
    pair.open()
    plan = pair.plan()
    pair.source.thread.submit(BeginStep(1, (plan,)))
    for layer in range(NUM_LAYERS):
        pair.source.thread.submit(LayerReady(1, layer, time.monotonic()))
        wait_until(lambda layer=layer: pair.landed()[layer])
        assert pair.landed() == [other <= layer for other in range(NUM_LAYERS)]
    pair.source.thread.submit(StepEnded(1))
    compute_ended_at = time.monotonic()
    assert pair.finish(plan, compute_ended_at=compute_ended_at).ok
    arrived = pair.target.expect(NoticeArrived)
    assert isinstance(arrived.notice, Completed)
    assert arrived.peer == pair.source.peer
    assert 0 < arrived.notice.compute_to_notice_s < time.monotonic() - compute_ended_at


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_completion_goes_out_as_the_step_ends_unless_the_push_was_stopped(pair: Pair, is_stopped: bool) -> None:
    pair.open()
    plan = pair.plan()
    flush = FlushThenNotify(pair.target.peer, 7, msgspec.structs.replace(pair.completed(plan), first_token=-1), None)
    pair.source.thread.submit(BeginStep(1, (plan,), (flush,)))
    for layer in range(NUM_LAYERS):
        pair.source.thread.submit(LayerReady(1, layer, time.monotonic()))
    if is_stopped:
        pair.source.thread.submit(StopPush(plan.lease))
    logprobs = TokenLogprobs(-0.5)
    ended_at = time.monotonic()
    pair.source.thread.submit(StepSampled(StepResult(1, (SampledToken(plan.attempt_id, 42, logprobs),), ended_at - 1, ended_at)))
    assert pair.source.expect(FlushDone) == FlushDone(7, not is_stopped, "the push was stopped" if is_stopped else "")
    if not is_stopped:
        record = pair.target.expect(NoticeArrived).notice
        assert isinstance(record, Completed)
        assert (record.first_token, record.logprobs) == (42, logprobs)
        assert 0 < record.compute_to_notice_s < time.monotonic() - ended_at


def test_a_layer_is_issued_only_when_the_device_has_written_it(pair: Pair) -> None:
    pair.open()
    written = threading.Event()
    pair.source.thread.submit(BeginStep(1, (pair.plan(),)))

    def ready() -> None:
        assert written.wait(PATIENCE_S)

    pair.source.thread.submit(LayerReady(1, 0, time.monotonic(), ready))
    time.sleep(0.05)
    assert not pair.landed()[0]
    written.set()
    wait_until(lambda: pair.landed()[0])


def test_the_record_is_withheld_when_a_layer_was_never_handed_over(pair: Pair) -> None:
    pair.open()
    plan = pair.plan()
    pair.source.thread.submit(BeginStep(1, (plan,)))
    pair.source.thread.submit(LayerReady(1, 0, time.monotonic()))
    done = pair.finish(plan)
    assert not done.ok
    assert done.detail == f"pushed {CHUNK} of {plan.nbytes} bytes"
    pair.source.thread.submit(SendNotice(pair.target.peer, Quiesced(LeaseId(1), Epoch(5), 0)))
    assert isinstance(pair.target.expect(NoticeArrived).notice, Quiesced)


def test_stop_push_then_quiesced_means_no_later_write(pair: Pair) -> None:
    pair.open()
    plan = pair.plan()
    pair.source.thread.submit(BeginStep(1, (plan,)))
    pair.source.thread.submit(LayerReady(1, 0, time.monotonic()))
    pair.source.thread.submit(StopPush(plan.lease))
    pair.source.thread.submit(LayerReady(1, 1, time.monotonic()))
    pair.source.thread.submit(FlushThenNotify(pair.target.peer, 4, Quiesced(LeaseId(1), Epoch(5), 0), None))
    assert pair.source.expect(FlushDone) == FlushDone(4, True)
    assert pair.target.expect(NoticeArrived).notice == Quiesced(LeaseId(1), Epoch(5), 0)
    for layer in (2, 3):
        pair.source.thread.submit(LayerReady(1, layer, time.monotonic()))
    pair.source.thread.submit(FlushThenNotify(pair.target.peer, 5, None, None))
    pair.source.expect(FlushDone)
    assert pair.landed() == [True, False, False, False]


def test_a_cached_prefix_goes_out_at_once(pair: Pair) -> None:
    pair.open()
    plan = pair.plan()
    pair.source.thread.submit(PushNow(plan))
    assert pair.finish(plan).ok
    assert pair.landed() == [True] * NUM_LAYERS


def test_measures_of_a_completed_transfer_are_reported_once(pair: Pair, lanes: str) -> None:
    pair.open()
    plan = pair.plan()
    pair.source.thread.submit(PushNow(plan))
    wait_until(lambda: all(pair.landed()))
    time.sleep(0.02)
    assert pair.finish(plan).ok
    samples = {sample.metric: sample for output in pair.source.seen if isinstance(output, SamplesObserved) for sample in output.samples}
    assert samples["pd_serve_kv_transfer_bytes_total"] == Sample("pd_serve_kv_transfer_bytes_total", plan.nbytes, f"loopback-{lanes}")
    assert samples["pd_serve_kv_transfer_seconds"].value > 0
    assert samples["pd_serve_kv_overlap_ratio"].value == 1.0
    (trace,) = pair.source.thread.recent_traces(8)
    assert [layer.layer for layer in trace.layers] == list(range(NUM_LAYERS))
    assert trace.overlap_ratio == 1.0


def test_only_the_latest_traces_are_kept(lanes: str) -> None:
    factory = partial(LoopbackTransport, fabric=LoopbackFabric())
    ranks = [Rank("prefill", factory, lanes, num_traces=2), Rank("decode", factory, lanes)]
    pair = Pair(*ranks)
    for lease_id in range(1, 5):
        pair.open(lease_id)
        plan = pair.plan(lease_id)
        pair.source.thread.submit(PushNow(plan))
        assert pair.finish(plan, token=lease_id).ok
    assert [trace.attempt_id for trace in pair.source.thread.recent_traces(8)] == [3, 4]
    assert [trace.attempt_id for trace in pair.source.thread.recent_traces(1)] == [4]
    for rank in ranks:
        assert rank.thread.stop(STOP_S)


def test_closing_a_window_says_whether_that_is_a_fence(pair: Pair, lanes: str) -> None:
    pair.open()
    pair.target.thread.submit(CloseWindow(LeaseId(1)))
    assert pair.target.expect(WindowClosed) == WindowClosed(LeaseId(1), fenced=lanes == "tcp")


def test_late_writes_of_a_closed_window_are_counted(pair: Pair, lanes: str) -> None:
    pair.open()
    pair.target.thread.submit(CloseWindow(LeaseId(1)))
    pair.target.expect(WindowClosed)
    pair.source.thread.submit(PushNow(pair.plan()))
    pair.source.thread.submit(FlushThenNotify(pair.target.peer, 1, None, None))
    pair.source.expect(FlushDone)
    if lanes == "tcp":
        observed = pair.target.expect(SamplesObserved)
        assert [sample.metric for sample in observed.samples] == ["pd_serve_refused_writes_total"]
        assert pair.target.memory.max() == 0


def test_flush_of_a_peer_that_is_removed_ends_badly_and_once(pair: Pair) -> None:
    plan = pair.plan()
    pair.source.thread.submit(PushNow(plan))
    pair.source.thread.submit(RemovePeer(pair.target.peer))
    assert not pair.finish(plan, token=3).ok
    lost = pair.target.expect(TransportReported)
    assert isinstance(lost.event, PeerLost)
    time.sleep(0.02)
    assert pair.source.pending() == []


def test_a_lost_peer_fails_the_flush_and_is_reported(pair: Pair) -> None:
    pair.source.thread.submit(HardFence(pair.target.peer))
    lost = pair.source.expect(TransportReported)
    assert isinstance(lost.event, PeerLost)
    assert lost.event.fenced
    plan = pair.plan()
    pair.source.thread.submit(PushNow(plan))
    assert not pair.finish(plan).ok


def test_notices_keep_their_order(pair: Pair) -> None:
    for number in range(300):
        pair.source.thread.submit(SendNotice(pair.target.peer, Abandon(LeaseId(number), Epoch(0))))
    assert [pair.target.expect(NoticeArrived).notice.lease_id for _ in range(300)] == list(range(300))


def test_a_malformed_notice_is_counted_and_dropped() -> None:
    fabric = LoopbackFabric()
    rank = Rank("decode", partial(LoopbackTransport, fabric=fabric), "tcp")
    stranger_id = peer_id("prefill")
    events: list[object] = []
    stranger = LoopbackTransport(settings_for(stranger_id, "tcp"), events.append, fabric)
    stranger.allocate_pool(64)
    rank.thread.submit(AddPeer(stranger_id, (stranger.export_metadata(),)))
    stranger.add_peer(rank.peer, rank.ready.metadata)

    def has_joined() -> bool:
        stranger.progress()
        return any(isinstance(event, PeerJoined) for event in events)

    wait_until(has_joined)
    stranger.notify(rank.peer, b"\xff\x00 no notice")
    observed = rank.expect(SamplesObserved)
    assert observed.samples == (Sample("pd_serve_malformed_notices_total", 1.0),)
    assert not any(isinstance(output, NoticeArrived) for output in rank.seen)
    stranger.close()
    assert rank.thread.stop(STOP_S)


def test_a_peer_that_never_answers_is_refused_by_the_deadline_of_the_sleeping_thread() -> None:
    fabric = LoopbackFabric()
    silent_id = peer_id("silent")
    silent = LoopbackTransport(settings_for(silent_id, "tcp"), lambda _: None, fabric)
    silent.allocate_pool(64)

    def factory(settings: TransportSettings, sink: EventSink) -> LoopbackTransport:
        return LoopbackTransport(settings_for(settings.self_id, "tcp", join_timeout_s=0.2), sink, fabric)

    rank = Rank("decode", factory, "tcp")
    started = time.monotonic()
    rank.thread.submit(AddPeer(silent_id, (silent.export_metadata(),)))
    refused = rank.expect(TransportReported)
    assert isinstance(refused.event, PeerRefused)
    assert time.monotonic() - started > 0.15
    silent.close()
    assert rank.thread.stop(STOP_S)


@pytest.mark.usefixtures("pair")
def test_an_idle_thread_with_peers_uses_no_processor_time() -> None:
    assert is_idle(0.02)


def test_stop_ends_within_its_time_even_with_a_flush_nobody_answers() -> None:
    fabric = LoopbackFabric()
    rank = Rank("prefill", partial(LoopbackTransport, fabric=fabric), "tcp")
    frozen = LoopbackTransport(settings_for(peer_id("decode"), "tcp"), lambda _: None, fabric)
    frozen.allocate_pool(POOL_NBYTES)
    rank.thread.submit(AddPeer(peer_id("decode"), (frozen.export_metadata(),)))
    frozen.add_peer(rank.peer, rank.ready.metadata)

    def has_joined() -> bool:
        frozen.progress()
        return any(isinstance(output, TransportReported) for output in rank.pending())

    wait_until(has_joined)
    rank.thread.submit(FlushThenNotify(peer_id("decode"), 1, None, None))
    assert rank.thread.stop(2.0)
    frozen.close()


def test_a_transport_that_cannot_be_made_fails_start() -> None:
    thread = TransportThread(LoopbackTransport, settings_for(peer_id("p"), "rdma"), lambda _: None)
    with pytest.raises(TransportError, match="rdma"):
        thread.start(AllocatePool(4096), PATIENCE_S)
    assert thread.stop(STOP_S)


def test_an_error_on_the_thread_is_reported_and_ends_it() -> None:
    class Broken(LoopbackTransport):
        def open_window(self, window: WriteWindow) -> None:
            raise RuntimeError("planted")

    rank = Rank("decode", partial(Broken, fabric=LoopbackFabric()), "tcp")
    empty = np.empty(0, np.int64)
    rank.thread.submit(OpenWindow(WriteWindow(LeaseId(1), Epoch(1), rank.peer, empty, empty)))
    assert rank.expect(TransportFailed).detail == "RuntimeError: planted"
    assert rank.thread.stop(STOP_S)


def test_memory_of_the_engine_can_be_registered_instead() -> None:
    memory = np.zeros(8192, np.uint8)
    thread = TransportThread(partial(LoopbackTransport, fabric=LoopbackFabric()), settings_for(peer_id("p"), "shm"), lambda _: None)
    ready = thread.start(RegisterPool(memory.ctypes.data, memory.nbytes, "cpu"), PATIENCE_S)
    assert (ready.region.address, ready.region.nbytes, ready.region.buffer) == (memory.ctypes.data, 8192, None)
    assert ready.lanes == ("loopback-shm",)
    assert thread.stop(STOP_S)
