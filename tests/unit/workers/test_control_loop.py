"""Real threads, a real socket and the loopback transport around a fake runner; the test plays the front."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pd_serve.ids import AttemptId, Incarnation, PeerId, WorkerId
from pd_serve.protocol.link import (
    Cancel,
    Closed,
    Drain,
    Failed,
    FailureReason,
    Fatal,
    FinishReason,
    GetTrace,
    LinkDown,
    Open,
    Prefill,
    PrefillDone,
    RefusalReason,
    Refused,
    Report,
    Reserved,
    Role,
    SetRole,
    Step,
    Stop,
)
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.protocol.traces import Traces
from pd_serve.transport.base import EventSink, Transport, TransportSettings, WriteBatch
from pd_serve.transport.loopback_fabric import LoopbackFabric
from pd_serve.transport.registry import TransportFactory
from tests.fake_engine import VOCAB_SIZE, expected_tokens, small_layout
from tests.rank_driver import join, open_local, open_pair, run_pair, tokens_of
from tests.whole_rank import Rank, start_rank, wait_idle
from workers.engine_thread import MAX_FAILED_STEPS

PROMPT = tuple(range(10, 29))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank]]:
    fabric = LoopbackFabric()
    lanes = getattr(request, "param", "shm")
    prefill, decode = start_rank("p", fabric, lanes), start_rank("d", fabric, lanes)
    join(prefill.driver, decode.driver)
    yield prefill, decode
    prefill.close()
    decode.close()


@pytest.fixture
def gated() -> Iterator[tuple[Rank, Rank, threading.Event]]:
    """The prefill rank computes a layer only while the gate is open."""
    fabric, gate = LoopbackFabric(), threading.Event()
    prefill, decode = start_rank("p", fabric, "shm", gate), start_rank("d", fabric, "shm")
    join(prefill.driver, decode.driver)
    yield prefill, decode, gate
    gate.set()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
def test_pushed_attempt_gives_the_tokens_of_a_local_one(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    tokens = run_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    assert [t.token_id for t in tokens] == expected_tokens(PROMPT, 6)
    assert [t.finish for t in tokens] == [None] * 5 + [FinishReason.LENGTH]
    open_local(decode.driver, 2, PROMPT, GREEDY)
    assert [t.token_id for t in tokens_of(decode.driver, AttemptId(2))] == expected_tokens(PROMPT, 6)
    for rank in pair:
        report = wait_idle(rank)
        assert report.load.blocks.total == report.load.blocks.free + report.load.blocks.cached


def test_prefix_known_to_decode_is_not_sent_again(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    run_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    longer = (*PROMPT, 40, 41, 42)
    reserved = open_pair(prefill.driver, decode.driver, 2, longer, GREEDY)
    assert reserved.num_cached_tokens == 16
    assert [t.token_id for t in tokens_of(decode.driver, AttemptId(2))] == expected_tokens(longer, 6)


@pytest.mark.parametrize("num_warm", range(20))
@pytest.mark.parametrize("is_prefill_warm", [False, True])
def test_only_the_suffix_that_decode_lacks_is_moved(pair: tuple[Rank, Rank], num_warm: int, is_prefill_warm: bool) -> None:
    prefill, decode = pair
    one = SamplingParams(max_tokens=1, temperature=0.0)
    if num_warm:
        open_local(decode.driver, 1, PROMPT[:num_warm], one)
        tokens_of(decode.driver, AttemptId(1))
    if is_prefill_warm:
        open_local(prefill.driver, 2, PROMPT[:10], one)
        tokens_of(prefill.driver, AttemptId(2))
    tokens = run_pair(prefill.driver, decode.driver, 3, PROMPT, GREEDY)
    assert [t.token_id for t in tokens] == expected_tokens(PROMPT, 6)
    num_known = min(num_warm, len(PROMPT) - 1) // 4 * 4
    prefill.driver.send(GetTrace(1))
    (trace,) = prefill.driver.wait_rank(Traces).traces
    assert sum(layer.nbytes for layer in trace.layers) == (len(PROMPT) - num_known) * small_layout().bytes_per_token


@pytest.mark.parametrize(("push_nbytes", "writes_per_chunk"), [(0, small_layout().num_layers), (1 << 20, 1)])
def test_layers_that_go_out_together_bring_the_same_kv_in_fewer_writes(push_nbytes: int, writes_per_chunk: int) -> None:
    fabric, writes = LoopbackFabric(), list[WriteBatch]()

    def recording(inner: TransportFactory) -> TransportFactory:
        def make(settings: TransportSettings, sink: EventSink) -> Transport:
            transport = inner(settings, sink)
            write = transport.write
            transport.write = lambda batch: (writes.append(batch), write(batch))[1]  # type: ignore[method-assign, func-returns-value]
            return transport

        return make

    prefill = start_rank("p", fabric, "shm", make=recording, push_nbytes=push_nbytes)
    decode = start_rank("d", fabric, "shm")
    join(prefill.driver, decode.driver)
    tokens = run_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    assert [t.token_id for t in tokens] == expected_tokens(PROMPT, 6)
    num_chunks = 3
    assert len(writes) == num_chunks * writes_per_chunk
    assert sum(int(batch.ops[:, 2].sum()) for batch in writes) == len(PROMPT) * small_layout().bytes_per_token
    prefill.close()
    decode.close()


def test_many_attempts_at_once_keep_their_tokens_apart(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    prompts = {attempt: tuple((attempt * 13 + i) % VOCAB_SIZE for i in range(3 + attempt)) for attempt in range(1, 7)}
    for attempt, prompt in prompts.items():
        if attempt % 2:
            open_pair(prefill.driver, decode.driver, attempt, prompt, GREEDY)
        else:
            open_local(decode.driver, attempt, prompt, GREEDY)
    for attempt, prompt in prompts.items():
        assert [t.token_id for t in tokens_of(decode.driver, AttemptId(attempt))] == expected_tokens(prompt, 6)


def test_time_between_steps_that_follow_each_other_is_compute(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    run_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    for rank, label, num_steps in ((prefill, "prefill", 3), (decode, "decode", 5)):
        steps: list[float] = []
        compute_s = 0.0
        while len(steps) < num_steps:
            samples = rank.driver.wait_rank(Report).samples
            steps += [sample.value for sample in samples if sample.metric == "pd_serve_step_seconds"]
            compute_s += sum(
                sample.value for sample in samples if (sample.metric, sample.label) == ("pd_serve_compute_seconds_total", label)
            )
        assert compute_s > sum(steps), "chunks, and tokens, that begin with the end of those before them"


def test_report_carries_samples_and_traces_are_kept(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    run_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    names = set()
    while "pd_serve_kv_transfer_bytes_total" not in names:
        names |= {sample.metric for sample in prefill.driver.wait_rank(Report).samples}
    assert {"pd_serve_step_seconds", "pd_serve_computed_tokens_total", "pd_serve_kv_overlap_ratio"} <= names
    prefill.driver.send(GetTrace(5))
    told = prefill.driver.wait_rank(Traces)
    (trace,), (leg,) = told.traces, told.attempts
    assert trace.attempt_id == leg.attempt_id == 1
    assert len(trace.layers) == 9, "three chunks of three layers"
    decode.driver.send(GetTrace(5))
    (other,) = decode.driver.wait_rank(Traces).attempts
    moments = (other.received_s, other.reserved_s, leg.received_s, leg.step_started_s, trace.origin_s, leg.step_ended_s)
    passage = [moment for moment in (*moments, other.record_s, other.step_started_s, other.step_ended_s) if moment is not None]
    assert len(passage) == 9
    assert passage == sorted(passage), "both ranks of one host, on one clock"
    assert decode.driver.wait_rank(Report, lambda report: bool(report.peers)).peers[0].joined


def test_cancel_between_layers_closes_both_legs_and_leaves_nothing(gated: tuple[Rank, Rank, threading.Event]) -> None:
    prefill, decode, gate = gated
    open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    for rank in (prefill, decode):
        rank.driver.tell(Cancel(AttemptId(1)))
        rank.driver.wait(Closed)
    assert wait_idle(decode).load.blocks.free == 32, "the writer has let go, though its step still runs"
    prefill.driver.reports.clear()
    held = prefill.driver.wait_rank(Report).load.blocks
    assert held.total > held.free + held.cached, "the running step still writes into the source blocks"
    gate.set()
    for rank in (prefill, decode):
        report = wait_idle(rank)
        assert report.load.leases == 0
        assert report.load.blocks.total == report.load.blocks.free + report.load.blocks.cached
    assert [t.token_id for t in run_pair(prefill.driver, decode.driver, 2, PROMPT, GREEDY)] == expected_tokens(PROMPT, 6)


def test_lost_link_cancels_what_its_router_asked_for(gated: tuple[Rank, Rank, threading.Event]) -> None:
    prefill, decode, gate = gated
    open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    for rank in (prefill, decode):
        rank.driver.send(LinkDown(1))
    gate.set()
    for rank in (prefill, decode):
        assert wait_idle(rank).load.leases == 0


def test_failed_step_fails_its_attempts_and_the_worker_goes_on(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    prefill.runner.fail_next = 1
    open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    failed = prefill.driver.wait(Failed)
    assert (failed.attempt_id, failed.reason) == (1, FailureReason.ENGINE)
    decode.driver.tell(Cancel(AttemptId(1)))
    decode.driver.wait(Closed)
    assert wait_idle(decode).load.leases == 0
    assert [t.token_id for t in run_pair(prefill.driver, decode.driver, 2, PROMPT, GREEDY)] == expected_tokens(PROMPT, 6)


def test_engine_that_keeps_failing_ends_the_rank_with_one_line(pair: tuple[Rank, Rank]) -> None:
    _, decode = pair
    decode.runner.fail_next = MAX_FAILED_STEPS
    for attempt in range(1, MAX_FAILED_STEPS + 1):
        decode.driver.tell(Open(AttemptId(attempt), PROMPT, 0, GREEDY, None, 30.0))
        decode.driver.wait(Failed)
    assert "steps in a row" in decode.driver.wait_rank(Fatal).message
    assert decode.join() == 1


def test_drain_refuses_new_work_finishes_the_old_and_reports_idle_at_once(gated: tuple[Rank, Rank, threading.Event]) -> None:
    prefill, decode, gate = gated
    open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    for rank in (prefill, decode):
        rank.driver.send(Drain(20.0))
    decode.driver.tell(Open(AttemptId(2), PROMPT, 0, GREEDY, None, 30.0))
    assert decode.driver.wait(Refused).reason is RefusalReason.DRAINING
    gate.set()
    assert [t.token_id for t in tokens_of(decode.driver, AttemptId(1))] == expected_tokens(PROMPT, 6)
    prefill.driver.wait(PrefillDone)
    for rank in (prefill, decode):
        assert wait_idle(rank).load.draining
        rank.driver.send(Stop())
        assert rank.join() == 0


def test_role_is_reported_after_it_was_set(pair: tuple[Rank, Rank]) -> None:
    _, decode = pair
    decode.driver.send(SetRole(Role.DECODE, 30.0))
    decode.driver.wait_rank(Report, lambda report: report.load.role is Role.DECODE)


def test_end_of_the_front_ends_the_rank(pair: tuple[Rank, Rank]) -> None:
    _, decode = pair
    decode.near.shutdown(socket.SHUT_RDWR)
    assert decode.join() == 1


def test_prefill_for_an_unknown_holder_is_refused(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    reserved_by = open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    tokens_of(decode.driver, AttemptId(1))
    assert isinstance(reserved_by, Reserved)
    assert reserved_by.target is not None
    stranger = PeerId(WorkerId("x"), Incarnation(1))
    lease = type(reserved_by.target.lease)(reserved_by.target.lease.lease_id, reserved_by.target.lease.epoch, stranger)
    target = type(reserved_by.target)(lease, reserved_by.target.blocks, 0)
    prefill.driver.tell(Prefill(AttemptId(9), PROMPT, 0, GREEDY, target))
    assert prefill.driver.wait(Failed).reason is FailureReason.PEER_LOST


def test_planted_wrong_kv_changes_the_tokens(pair: tuple[Rank, Rank]) -> None:
    """Else the comparisons with expected_tokens would prove nothing: one byte of the received prompt is changed before decode reads it."""
    prefill, decode = pair
    gate = threading.Event()
    decode.runner.gate = gate
    reserved = open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    prefill.driver.wait(PrefillDone)
    assert reserved.target is not None
    decode.runner.slots[1, reserved.target.blocks[2], 0, 1, 0] ^= 1
    gate.set()
    assert [t.token_id for t in tokens_of(decode.driver, AttemptId(1))] != expected_tokens(PROMPT, 6)


def test_push_that_skips_a_layer_is_never_reported_complete(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair
    execute = prefill.runner.execute

    def without_last_layer(batch: object, on_layer: object) -> object:
        result = execute(batch, None)  # type: ignore[arg-type]
        assert callable(on_layer)
        for layer in range(2):
            on_layer(layer)
        return result

    monkeypatch.setattr(prefill.runner, "execute", without_last_layer)
    open_pair(prefill.driver, decode.driver, 1, PROMPT, GREEDY)
    assert prefill.driver.wait(Failed).reason is FailureReason.TRANSFER
    decode.driver.tell(Cancel(AttemptId(1)))
    decode.driver.wait(Closed)
    assert not [frame for frame in decode.driver.frames if isinstance(frame, Step)]
