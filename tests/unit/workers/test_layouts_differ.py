"""What the machines plan and owe where the pools of the two workers are not alike."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.kv.digest import TokenSpan
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.protocol.link import PeerInfo, Reserved, Role, Step
from pd_serve.protocol.notify import Completed
from tests.machine_fakes import (
    DECODE,
    PREFILL,
    Worker,
    all_of,
    batch_of,
    completed,
    frames,
    layout,
    only,
    only_frame,
    open_frame,
    peer_info,
    prefill_frame,
    prompt,
)
from workers.events import FlushDone, FlushThenNotify, NoticeArrived, OpenWindow, PushNow, PushPlan, RunBatch, WindowOpened

LARGE = msgspec.structs.replace(layout(4, block_size=8), order=KVOrder.HEAD_MAJOR, dtype=KVDtype.FLOAT32)


def with_layout(info: PeerInfo, geometry: KVLayout) -> PeerInfo:
    return msgspec.structs.replace(info, layout=geometry)


HOLDER = with_layout(DECODE, LARGE)


def run(worker: Worker, attempt: int, tokens: tuple[int, ...], num_cached: int, holder: PeerInfo) -> tuple[list[PushPlan], Completed]:
    """(everything pushed, the record that follows); the flush is answered."""
    plans: list[PushPlan] = []
    actions = worker.frame(prefill_frame(attempt, tokens, attempt, num_cached, holder))
    while True:
        plans += [action.plan for action in all_of(PushNow, actions)]
        plans += [plan for action in all_of(RunBatch, actions) for plan in action.pushes]
        flushes = all_of(FlushThenNotify, actions)
        if flushes:
            worker.do(FlushDone(flushes[0].token, ok=True))
            assert isinstance(flushes[0].notice, Completed)
            return plans, flushes[0].notice
        actions = worker.finish_step(batch_of(actions), 42)


@pytest.mark.parametrize("num_cached", [0, 8])
def test_other_layouts_are_packed_from_what_the_holder_is_missing_on(num_cached: int) -> None:
    worker = Worker(PREFILL, prefill_chunk=6)
    worker.join(HOLDER)
    plans, record = run(worker, 1, prompt(21), num_cached, HOLDER)
    packings = [packing for plan in plans for packing in plan.packings]
    tokens = [token for packing in packings for token in range(packing.start_token, packing.end_token)]
    assert tokens == list(range(num_cached, 21)), "each once, in order"
    assert all(len(plan.ranges) == 0 and plan.span is None for plan in plans)
    assert {plan.remote_layer_stride for plan in plans} == {LARGE.layer_nbytes}
    assert record.nbytes == sum(plan.nbytes for plan in plans) == (21 - num_cached) * LARGE.bytes_per_token


def test_equal_layouts_are_never_packed() -> None:
    worker = Worker(PREFILL, prefill_chunk=6)
    larger_pool = with_layout(DECODE, layout(num_blocks=30))
    worker.join(larger_pool)
    plans, record = run(worker, 1, prompt(14), 4, larger_pool)
    assert all(plan.packings == () and len(plan.ranges) for plan in plans)
    assert [(plan.span.start_token, plan.span.end_token) for plan in plans if plan.span] == [(4, 6), (6, 12), (12, 14)]
    assert record.nbytes == sum(plan.nbytes for plan in plans) == 10 * layout().bytes_per_token


def test_a_prefix_cached_here_is_sent_from_where_the_holders_blocks_begin() -> None:
    worker = Worker(PREFILL)
    worker.join(HOLDER)
    run(worker, 1, prompt(21), 0, HOLDER)
    plans, record = run(worker, 2, prompt(22), 16, HOLDER)
    spans = [(packing.start_token, packing.end_token) for plan in plans for packing in plan.packings]
    assert spans == [(16, 20), (20, 22)], "20 tokens in blocks of 4 are cached here, 16 in blocks of 8 there"
    assert record.num_cached_tokens == 20
    assert record.nbytes == 6 * LARGE.bytes_per_token


def test_decode_is_owed_bytes_of_its_own_layout_from_a_writer_of_another() -> None:
    info = with_layout(peer_info("decode", Role.DECODE), LARGE)
    worker = Worker(info)
    worker.join(PREFILL)
    for nbytes, is_taken in ((6 * LARGE.bytes_per_token, True), (6 * layout().bytes_per_token, False)):
        frame = open_frame(int(is_taken) + 1, prompt(6))
        opening = only(OpenWindow, worker.frame(frame))
        target = only_frame(Reserved, worker.do(WindowOpened(opening.window.lease_id))).target
        assert target is not None
        assert opening.span == TokenSpan(target.blocks, 0, 6)
        actions = worker.do(NoticeArrived(PREFILL.peer, completed(target, frame, nbytes=nbytes)))
        assert bool(frames(Step, actions)) is is_taken
