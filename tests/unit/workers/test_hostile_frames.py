"""A worker's machine under frames and notices that nobody sensible sends: refused, and nothing is left when the link is gone."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_serve.errors import ProtocolError
from pd_serve.protocol.cache_events import CacheSnapshot
from pd_serve.protocol.link import Cancel, Failed, FailureReason, Open, Peers, Ping, Refused, Reserved, Role, Step, router_codec
from pd_serve.protocol.notify import Abandon, Completed, NoticeUnion, Quiesced, notice_codec
from pd_serve.transport.base import PeerJoined
from tests.hostile import each_replaced, mutated
from tests.machine_fakes import DECODE, LINK, PREFILL, Worker, completed, frames, open_frame, peer_info, prefill_frame, prompt
from workers.decode.machine import DecodeMachine
from workers.events import (
    Action,
    CloseWindow,
    FlushDone,
    FlushThenNotify,
    LinkClosed,
    NoticeArrived,
    Observe,
    OpenWindow,
    RunBatch,
    Tick,
    TransportReported,
    WindowClosed,
    WindowOpened,
)

BOTH = peer_info("both", Role.BOTH)
_router, _notice = router_codec(), notice_codec()
FRAMES = [
    _router.encode(frame)
    for frame in (
        Peers((PREFILL, DECODE)),
        open_frame(1, prompt(9)),
        open_frame(2, prompt(6), writer=None),
        open_frame(3, prompt(9), outputs=2),
        prefill_frame(4, prompt(9)),
        prefill_frame(5, prompt(9), lease_id=2, num_cached=4),
        Cancel(1),
        Ping(7),
        CacheSnapshot(),
    )
]
MANY = settings(max_examples=400, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class Harness(Worker):
    """Carries out what the machine asks for: windows open and close, flushes succeed, steps give token 5."""

    def __init__(self) -> None:
        super().__init__(BOTH)
        self.frame(Peers((PREFILL, DECODE)))
        for info in (PREFILL, DECODE):
            self.do(TransportReported(PeerJoined(info.peer, "lane", True, 1e9, 1e-5)))
        self.reserved: list[Reserved] = []
        self.samples: list[str] = []

    def obey(self, actions: tuple[Action, ...]) -> None:
        todo = list(actions)
        for _ in range(1000):
            if not todo:
                break
            action = todo.pop(0)
            self.reserved += frames(Reserved, (action,))
            match action:
                case OpenWindow(window):
                    todo += self.do(WindowOpened(window.lease_id))
                case CloseWindow(lease_id):
                    todo += self.do(WindowClosed(lease_id, True))
                case FlushThenNotify():
                    todo += self.do(FlushDone(action.token, True, ""))
                case RunBatch(batch):
                    todo += self.finish_step(batch, 5)
                case Observe(sample):
                    assert math.isfinite(sample.value)
                    self.samples.append(sample.metric)
        deadline = self.machine.next_deadline()
        assert deadline is None or math.isfinite(deadline)
        counts = self.machine.pool.counts()
        assert counts.free + counts.cached + counts.held == counts.total

    def end(self) -> None:
        """The router goes; whoever may still write says that it has stopped. Then nothing is held."""
        self.obey(self.do(LinkClosed(LINK)))
        for _ in range(5):
            self.now += 1000.0
            self.obey(self.do(Tick()))
        assert self.machine.is_idle, (self.machine.leases_by_state(), self.machine.scheduler.num_running)
        assert self.num_held_blocks == 0


@MANY
@given(st.lists(mutated(FRAMES), min_size=1, max_size=4))
def test_frames_of_a_hostile_router_break_nothing_and_leave_nothing(payloads: list[bytes]) -> None:
    play(payloads)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda payload: type(_router.decode(payload)).__name__)
def test_no_part_of_a_frame_can_be_anything(frame: bytes) -> None:
    """Each on its own; then come attempts that may be the same ones."""
    for payload in each_replaced(frame):
        try:
            play([payload, *FRAMES[1:3]])
        except Exception as error:
            error.add_note(f"after {msgspec.msgpack.decode(payload)}")
            raise


def play(payloads: list[bytes]) -> None:
    worker = Harness()
    for payload in payloads:
        try:
            frame = _router.decode(payload)
        except ProtocolError:
            continue
        worker.obey(worker.frame(frame))
    worker.end()


def waiting() -> tuple[Harness, Completed]:
    """A worker with one lease that prefill may still fill, and the record that fits it."""
    worker = Harness()
    frame = open_frame(1, prompt(9))
    worker.obey(worker.frame(frame))
    target = worker.reserved.pop().target
    assert target is not None
    return worker, completed(target, frame)


def notices_for(record: Completed) -> list[bytes]:
    quiesced, abandon = Quiesced(record.lease_id, record.epoch, 0), Abandon(record.lease_id, record.epoch)
    return [_notice.encode(notice) for notice in (record, quiesced, abandon)]


FITTING = ("lease_id", "epoch", "attempt_id", "contributor", "num_contributors", "num_tokens", "num_layers", "nbytes")
"""What must be right for a record to end a transfer."""


@MANY
@given(st.data())
def test_notices_of_a_hostile_peer_fill_no_lease_and_are_counted(data: st.DataObject) -> None:
    worker, record = waiting()
    for payload in data.draw(st.lists(mutated(notices_for(record)), min_size=1, max_size=3)):
        try:
            notice: NoticeUnion = _notice.decode(payload)
        except ProtocolError:
            continue
        was_waiting, num_stale = 1 in worker.machine.decode, worker.samples.count("pd_serve_stale_records_total")
        actions = worker.do(NoticeArrived(PREFILL.peer, notice))
        worker.obey(actions)
        if not was_waiting or isinstance(notice, Abandon):
            continue
        is_its_lease = (notice.lease_id, notice.epoch) == (record.lease_id, record.epoch)
        if not is_its_lease:
            assert 1 in worker.machine.decode, "the lease is still waited for"
            assert worker.samples.count("pd_serve_stale_records_total") == num_stale + 1
        elif isinstance(notice, Completed) and any(getattr(notice, name) != getattr(record, name) for name in FITTING):
            assert not frames(Step, actions)
            failed = [frame.reason for frame in frames(Failed, actions)] == [FailureReason.TRANSFER]
            assert failed or worker.samples.count("pd_serve_stale_records_total") == num_stale + 1
    worker.end()


def test_the_record_that_fits_fills_the_lease() -> None:
    worker, record = waiting()
    actions = worker.do(NoticeArrived(PREFILL.peer, record))
    assert frames(Step, actions)[0].outputs[0].token_id == record.first_token
    worker.obey(actions)
    worker.end()


BAD_SAMPLINGS: list[dict[str, object]] = [
    {"max_tokens": 0},
    {"temperature": math.nan},
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"top_k": -1},
    {"min_p": math.inf},
    {"seed": 2**63},
    {"repetition_penalty": 0.0},
    {"presence_penalty": math.nan},
    {"logit_bias": ((100, 1.0),)},
    {"logit_bias": ((1, math.inf),)},
    {"stop_token_ids": (-1,)},
    {"num_logprobs": 101},
    {"min_tokens": -1},
]


@pytest.mark.parametrize("fields", BAD_SAMPLINGS, ids=str)
def test_sampling_that_would_break_a_step_is_refused(fields: dict[str, object]) -> None:
    worker = Harness()
    for frame in (with_sampling(open_frame(1, prompt(9), writer=None), fields), with_sampling(open_frame(1, prompt(9)), fields)):
        assert len(frames(Refused, worker.frame(frame))) == 1
    prefill = prefill_frame(4, prompt(9))
    sampling = msgspec.structs.replace(prefill.sampling, **fields)
    assert len(frames(Failed, worker.frame(msgspec.structs.replace(prefill, sampling=sampling)))) == 1
    worker.end()


def with_sampling(frame: Open, fields: dict[str, object]) -> Open:
    return msgspec.structs.replace(frame, sampling=msgspec.structs.replace(frame.sampling, **fields))


PLANTED = {
    "timeout": msgspec.structs.replace(open_frame(1, prompt(9)), timeout_s=math.nan),
    "no prompt": msgspec.structs.replace(open_frame(1, ()), writer=None),
}


@pytest.mark.parametrize("frame", PLANTED.values(), ids=PLANTED.keys())
def test_a_check_that_is_missing_is_noticed(frame: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    play([_router.encode(frame)])
    monkeypatch.setattr(DecodeMachine, "_refusal", lambda self, frame, is_joined: None)
    with pytest.raises(Exception):  # noqa: B017 - whatever breaks
        play([_router.encode(frame)])
