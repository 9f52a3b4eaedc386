"""What WorkerMachine adds to its two machines: peers, load, steps."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.ids import AttemptId, LinkId, RouterId
from pd_serve.protocol.link import Cancel, Load, PeerInfo, Peers, PeerStatus, Ping, Pong, Role
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from tests.machine_fakes import (
    DECODE,
    LINK,
    PREFILL,
    Worker,
    all_of,
    batch_of,
    frames,
    only,
    only_frame,
    open_frame,
    peer_info,
    prompt,
)
from workers.events import (
    AddPeer,
    CloseWindow,
    FrameReceived,
    HardFence,
    LinkClosed,
    LinkOpened,
    RemovePeer,
    RunBatch,
    Tick,
    TransportReported,
    WindowClosed,
)

OTHER_LINK = LinkId(2)


@pytest.fixture
def worker() -> Worker:
    return Worker(DECODE)


def test_named_peers_are_joined_but_never_oneself(worker: Worker) -> None:
    actions = worker.frame(Peers((DECODE, PREFILL)))
    assert [action.peer for action in all_of(AddPeer, actions)] == [PREFILL.peer]
    assert all_of(AddPeer, worker.frame(Peers((DECODE, PREFILL)))) == []


@pytest.mark.parametrize(
    "changes",
    [{"protocol_version": 2}, {"model_fingerprint": "other"}, {"transport": "other"}, {"layout": peer_info("x", num_blocks=9).layout}],
)
def test_an_incompatible_peer_is_not_joined_and_says_why(worker: Worker, changes: dict[str, object]) -> None:
    if "layout" in changes:
        changes = {"layout": msgspec.structs.replace(PREFILL.layout, num_layers=9)}
    actions = worker.frame(Peers((msgspec.structs.replace(PREFILL, **changes),)))
    assert all_of(AddPeer, actions) == []
    (state,) = only_frame(PeerStatus, actions).states
    assert not state.joined
    assert "here" in state.detail


def test_pools_of_different_size_may_exchange_kv(worker: Worker) -> None:
    assert all_of(AddPeer, worker.frame(Peers((peer_info("prefill", num_blocks=99),)))) != []


@pytest.mark.parametrize("event", [PeerRefused(PREFILL.peer, "no"), PeerLost(PREFILL.peer, "gone", fenced=True)])
def test_a_refused_or_lost_peer_is_joined_again_later(worker: Worker, event: PeerRefused | PeerLost) -> None:
    worker.join(PREFILL)
    assert all_of(AddPeer, worker.do(TransportReported(event))) == []
    worker.now += 1.0
    actions = worker.do(Tick())
    assert [type(action) for action in actions if isinstance(action, RemovePeer | AddPeer)] == [RemovePeer, AddPeer]


def test_a_lost_peer_with_leases_is_not_removed_before_it_is_fenced(worker: Worker) -> None:
    worker.join(PREFILL)
    worker.reserve(open_frame(1, prompt(6)))
    actions = worker.do(TransportReported(PeerLost(PREFILL.peer, "gone", fenced=False)))
    worker.do(WindowClosed(only(CloseWindow, actions).lease_id, fenced=False))
    worker.now += 1.0
    assert all_of(RemovePeer, worker.do(Tick())) == []
    deadline = worker.machine.next_deadline()
    assert deadline is not None
    assert deadline > worker.now
    worker.do(TransportReported(PeerFenced(PREFILL.peer)))
    worker.now += 1.0
    assert only(RemovePeer, worker.do(Tick())).peer == PREFILL.peer


def _restarted() -> PeerInfo:
    return peer_info("prefill", Role.PREFILL, incarnation=2)


def test_a_new_incarnation_replaces_an_old_one_that_holds_nothing(worker: Worker) -> None:
    worker.join(PREFILL)
    actions = worker.frame(Peers((_restarted(),)))
    assert [action.peer for action in actions if isinstance(action, RemovePeer | AddPeer)] == [PREFILL.peer, _restarted().peer]


def test_a_new_incarnation_has_the_old_one_fenced_if_it_holds_a_lease(worker: Worker) -> None:
    worker.join(PREFILL)
    worker.reserve(open_frame(1, prompt(6)))
    closing = only(CloseWindow, worker.frame(Cancel(AttemptId(1))))
    worker.do(WindowClosed(closing.lease_id, fenced=False))
    actions = worker.frame(Peers((_restarted(),)))
    assert only(HardFence, actions).peer == PREFILL.peer
    assert all_of(AddPeer, actions) == []
    actions = worker.do(TransportReported(PeerLost(PREFILL.peer, "killed", fenced=True)))
    assert only(AddPeer, actions).peer == _restarted().peer


def test_peers_outlive_the_router_that_named_them_until_another_speaks(worker: Worker) -> None:
    worker.join(PREFILL)
    assert all_of(RemovePeer, worker.do(LinkClosed(LINK))) == []
    again = Worker(DECODE)
    again.join(PREFILL)
    assert only(RemovePeer, again.frame(Peers(()))).peer == PREFILL.peer


def test_a_router_that_has_just_started_does_not_part_those_whom_it_has_yet_to_hear_of(worker: Worker) -> None:
    """Workers register at it one after the other; dropped peers would have to join anew, and what runs between them would be lost."""
    second = peer_info("prefill-2", Role.PREFILL)
    worker.frame(Peers((PREFILL, second)))
    worker.do(LinkClosed(LINK))
    worker.do(LinkOpened(OTHER_LINK, RouterId("next")))
    assert all_of(RemovePeer, worker.do(FrameReceived(OTHER_LINK, Peers((PREFILL,))))) == []
    worker.now += 4.9
    assert all_of(RemovePeer, worker.do(Tick())) == []
    deadline = worker.machine.next_deadline()
    assert deadline is not None
    assert deadline <= worker.now + 0.2
    worker.now += 0.2
    assert only(RemovePeer, worker.do(Tick())).peer == second.peer, "nobody has named it since"


def test_what_a_new_router_says_of_a_worker_started_anew_counts_at_once(worker: Worker) -> None:
    worker.frame(Peers((PREFILL,)))
    worker.do(LinkClosed(LINK))
    worker.do(LinkOpened(OTHER_LINK, RouterId("next")))
    successor = peer_info("prefill", Role.PREFILL, incarnation=2)
    actions = worker.do(FrameReceived(OTHER_LINK, Peers((successor,))))
    assert only(RemovePeer, actions).peer == PREFILL.peer
    assert only(AddPeer, actions).peer == successor.peer


def test_a_change_of_peers_is_told_to_the_router(worker: Worker) -> None:
    worker.frame(Peers((PREFILL,)))
    actions = worker.do(TransportReported(PeerJoined(PREFILL.peer, "posix", True, 1e9, 1e-6)))
    (state,) = only_frame(PeerStatus, actions).states
    assert (state.joined, state.lane, state.one_sided) == (True, "posix", True)
    assert frames(PeerStatus, worker.do(Tick())) == []


def test_load_is_sent_when_it_changed_and_not_too_often(worker: Worker) -> None:
    worker.now += 0.05
    assert frames(Load, worker.frame(open_frame(1, prompt(6), writer=None))) == []
    due = worker.machine.next_deadline()
    assert due == pytest.approx(100.1)
    worker.now = due
    load = only_frame(Load, worker.do(Tick()))
    assert (load.waiting + load.running, load.seq) == (1, 2)
    worker.now += 0.2
    assert frames(Load, worker.do(Tick())) == []
    worker.now += 1000.0
    assert only_frame(Load, worker.do(Tick())).seq == 3


def test_one_step_runs_at_a_time(worker: Worker) -> None:
    batch = batch_of(worker.frame(open_frame(1, prompt(6), writer=None)))
    assert all_of(RunBatch, worker.frame(open_frame(2, prompt(6, 20), writer=None))) == []
    assert {entry.attempt_id for entry in batch_of(worker.finish_step(batch, 50)).entries} == {1, 2}


def test_ping_is_answered(worker: Worker) -> None:
    assert only_frame(Pong, worker.frame(Ping(5))).nonce == 5
