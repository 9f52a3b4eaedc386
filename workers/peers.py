"""Which other workers this one has joined, wants to join, or must not forget yet. Pure; owned by WorkerMachine.

    wanted (named in a router's Peers) -> JOINING -> JOINED -> LOST (-> fenced) -> removed -> JOINING again while wanted
                                             '-> REFUSED ------------^
    incompatible peers are never joined, and say why

A peer is removed from the transport only when nothing is held for it: after a removal the transport reports nothing of it any more, not
even that it died, so a quarantined lease of a removed peer would wait for ever. A new incarnation waits until the old one is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from pd_serve.ids import LinkId, PeerId
from pd_serve.kv.routes import rank_heads
from pd_serve.protocol.exchange import differences
from pd_serve.protocol.link import PeerInfo, PeerState
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from workers.events import Action, AddPeer, HardFence, RemovePeer
from workers.rank_group import RANK_MARK

_HEARTBEATS_OF_A_NEW_ROUTER = 5
"""Intervals of registration after which a router that has just begun to speak has heard of every worker."""


class _State(Enum):
    JOINING = auto()
    JOINED = auto()
    LOST = auto()
    INCOMPATIBLE = auto()


@dataclass(slots=True)
class _Entry:
    info: PeerInfo
    state: _State
    lane: str = ""
    one_sided: bool = False
    bandwidth: float = 0.0
    detail: str = ""
    look_at: float | None = None
    """When to try to remove (and join again, or fence) it; None: nothing to do until something happens."""


class PeerTable:
    def __init__(self, info: PeerInfo, rejoin_after_s: float) -> None:
        self._info = info
        self._rejoin_after_s = rejoin_after_s
        self._named: dict[LinkId, dict[PeerId, PeerInfo]] = {}
        """Peers by the link whose router named them. The last router's word stands until another one has had time to hear of everybody."""
        self._closed_links: dict[LinkId, float] = {}
        """When the word of a router that is gone ends; infinity until another one speaks."""
        self._entries: dict[PeerId, _Entry] = {}

    # ---- what is known

    def joined(self, peer: PeerId) -> PeerInfo | None:
        """The peer's info if KV and records can be exchanged with it now, and a router still names it."""
        entry = self._entries.get(peer)
        return entry.info if entry and entry.state is _State.JOINED and self.is_wanted(peer) else None

    def states(self) -> tuple[PeerState, ...]:
        """Every known peer, in order of its id."""
        return tuple(
            PeerState(peer, entry.state is _State.JOINED, entry.lane, entry.one_sided, entry.bandwidth, entry.detail)
            for peer, entry in sorted(self._entries.items())
        )

    def next_deadline(self) -> float | None:
        times = [entry.look_at for entry in self._entries.values() if entry.look_at is not None]
        return min([*times, *(ends_at for ends_at in self._closed_links.values() if ends_at < inf)], default=None)

    # ---- what happens

    def set_named(self, link_id: LinkId, peers: tuple[PeerInfo, ...], now: float) -> None:
        """A router says which workers there are. One that has just started does not know all of them yet."""
        for closed in self._closed_links:
            self._closed_links[closed] = min(self._closed_links[closed], now + _HEARTBEATS_OF_A_NEW_ROUTER * self._rejoin_after_s)
        self._named[link_id] = {info.peer: info for info in peers if info.peer != self._info.peer}

    def link_closed(self, link_id: LinkId) -> None:
        if link_id in self._named:
            self._closed_links[link_id] = inf

    def on_report(self, event: PeerJoined | PeerRefused | PeerLost | PeerFenced, now: float) -> None:
        entry = self._entries.get(event.peer)
        if entry is None:
            return
        match event:
            case PeerJoined():
                entry.state, entry.detail, entry.look_at = _State.JOINED, "", None
                entry.lane, entry.one_sided, entry.bandwidth = event.lane, event.one_sided, event.bandwidth
            case PeerRefused() | PeerLost():
                entry.state, entry.detail, entry.look_at = _State.LOST, event.detail, now + self._rejoin_after_s
                entry.lane, entry.one_sided, entry.bandwidth = "", False, 0.0
            case PeerFenced():
                pass

    def reconcile(self, now: float, is_busy: Callable[[PeerId], bool]) -> list[Action]:
        """Remove, then add, what can be. `is_busy`: a lease or a push still depends on news of the peer."""
        actions: list[Action] = []
        for link_id, ends_at in tuple(self._closed_links.items()):
            if now >= ends_at:
                del self._closed_links[link_id]
                del self._named[link_id]
        wanted = self._wanted()
        for peer, entry in tuple(self._entries.items()):
            is_wanted = peer in wanted
            if entry.state is _State.INCOMPATIBLE:
                if not is_wanted:
                    del self._entries[peer]
                continue
            if is_wanted and entry.state is not _State.LOST:
                entry.look_at = None
                continue
            if is_wanted and entry.look_at is not None and now < entry.look_at:
                continue
            if is_busy(peer):
                if entry.look_at is None or now >= entry.look_at:
                    entry.look_at = now + self._rejoin_after_s
                    actions += self._fence_superseded(peer, wanted)
                continue
            actions.append(RemovePeer(peer))
            del self._entries[peer]
        for peer, info in wanted.items():
            if peer not in self._entries and not self._has_other_incarnation(peer):
                actions += self._add(info)
        return actions

    def remove_stuck(self, peer: PeerId, now: float) -> list[Action]:
        """Let go of a peer whose flush does not end; it is joined again later. Precondition: no lease was granted to it."""
        entry = self._entries.get(peer)
        if entry is None or entry.state is _State.INCOMPATIBLE:
            return []
        entry.state, entry.detail, entry.look_at = _State.LOST, "a flush did not end", now + self._rejoin_after_s
        return [RemovePeer(peer)]

    # ---- inside

    def _wanted(self) -> dict[PeerId, PeerInfo]:
        """Of a worker that was started anew since a router went, what the others say counts."""
        wanted = {peer: info for link_id, named in self._named.items() if link_id not in self._closed_links for peer, info in named.items()}
        known = {peer.worker_id for peer in wanted}
        for link_id in self._closed_links:
            wanted |= {peer: info for peer, info in self._named[link_id].items() if peer.worker_id not in known}
        return wanted

    def is_wanted(self, peer: PeerId) -> bool:
        """A router names it."""
        if any(peer in named for link_id, named in self._named.items() if link_id not in self._closed_links):
            return True
        return bool(self._closed_links) and peer in self._wanted()

    def _has_other_incarnation(self, peer: PeerId) -> bool:
        return any(known.worker_id == peer.worker_id for known in self._entries)

    def _add(self, info: PeerInfo) -> list[Action]:
        problem = self._incompatibility(info)
        if problem:
            self._entries[info.peer] = _Entry(info, _State.INCOMPATIBLE, detail=problem)
            return []
        self._entries[info.peer] = _Entry(info, _State.JOINING)
        return [AddPeer(info.peer, info.transport_metadata)]

    def _incompatibility(self, info: PeerInfo) -> str:
        """Why KV cannot be exchanged, with both values; empty if it can."""
        if problem := _contradiction(info):
            return problem
        return "; ".join(f"{what} {theirs}, here {own}" for what, theirs, own in differences(info, self._info))

    def _fence_superseded(self, peer: PeerId, wanted: dict[PeerId, PeerInfo]) -> list[Action]:
        """A worker that was started anew while the old process still holds something here: end the old one."""
        is_superseded = peer not in wanted and any(other.worker_id == peer.worker_id for other in wanted)
        return [HardFence(peer)] if is_superseded else []


def _contradiction(info: PeerInfo) -> str:
    """What is wrong in what a worker says of itself: by its heads and ranks, transfers to and from it are planned."""
    if RANK_MARK in info.peer.worker_id:
        return f"a worker's id has no {RANK_MARK}"
    try:
        num_expected = len(rank_heads(info.num_model_kv_heads, info.num_ranks, 0))
    except ValueError as error:
        return str(error)
    num_held = info.layout.num_kv_heads
    return "" if num_held == num_expected else f"{num_held} KV heads in each rank's pool, {num_expected} expected"
