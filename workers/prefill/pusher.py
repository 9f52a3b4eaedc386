"""Issues the writes of a step layer by layer and measures them. Used by the transport thread only.

The layers of one push (grouping.py) are one write per attempt and one flush per peer over all of them; the flush's answer is when they have
arrived. That makes the measure honest on every lane: a queued write returns long before its bytes are anywhere.

    engine   |-- layer 0 --|-- layer 1 --|-- layer 2 --|            compute_end
    pushed      |~~ 0 ~~|       |~~ 1 ~~|     |~~~~~~ 2 ~~~~~~|     arrived
                                                       ^ only these bytes are not hidden

KV for a pool of another layout is packed first, into a slot of the staging ring (staging.py), on this thread, a few pieces of each peer per
turn (advance()), so that nothing else the thread does waits for long. What has no slot yet waits in its peer's queue, and flushes asked for
later wait behind it: source blocks stay until those have ended.

Seconds are the time the link to the peer was at work for the attempt: what is in flight to one peer is served in order, so a flush's own
time is from its issue, or from the end of the one before it, to its end; attempts that share a flush share its time by bytes. Bytes and
seconds are reported together, once per attempt that completed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import TransportError
from pd_serve.ids import PeerId
from pd_serve.kv.conversion import Packing
from pd_serve.kv.digest import KVDigest
from pd_serve.kv.layout import KVLayout
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import Transport, WriteBatch
from workers.events import PushPlan
from workers.prefill.staging import StagingRing
from workers.prefill.transfers import Finished, Piece, Transfer, measure

_SLOTS_PER_TURN = 4
"""Packed pieces of a peer that share a flush; then it is the others' turn, while these slots are on their way back."""
_MAX_STOPPED = 16384
"""Stopped leases remembered; the machine names none again after the step that was running."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One packing of one layer that has no slot yet."""

    plan: PushPlan
    layer: int
    packing: Packing
    written_at: float


@dataclass(slots=True)
class _Flight:
    """One flush and the pieces it covers."""

    peer: PeerId
    started_at: float
    pieces: list[Piece]
    slots: list[int] = field(default_factory=list)
    """Of the staging ring, free again when the flush is answered."""


@dataclass(slots=True)
class _Step:
    step_id: int
    plans: tuple[PushPlan, ...]
    issued: set[int] = field(default_factory=set)


class Packer(Protocol):
    def pack(self, layer: int, packing: Packing, at: int) -> None:
        """Put the packed bytes of a layer, whose KV is in the pool, at that offset of the registered region; they are there on return."""
        ...


class Pusher:
    """`next_token` gives flush tokens that nobody else uses; the owner hands every Flushed of one of them to on_flushed()."""

    def __init__(self, transport: Transport, next_token: Callable[[], int], now: Callable[[], float]) -> None:
        self._transport = transport
        self._next_token = next_token
        self._now = now
        self._step: _Step | None = None
        self._transfers: dict[Lease, Transfer] = {}
        self._flights: dict[int, _Flight] = {}
        self._last_end: dict[PeerId, float] = {}
        self._stopped: OrderedDict[Lease, None] = OrderedDict()
        self._packer: Packer | None = None
        self._ring = StagingRing(0, 0, 1)
        self._queues: dict[PeerId, deque[_Waiting | Callable[[], None]]] = {}
        """By peer, in order: packings, and what is to be done once those before it have been issued."""
        self._pool: tuple[NDArray[np.uint8], KVLayout] | None = None
        """Where transfers have a digest."""

    def use_packer(self, packer: Packer, ring: StagingRing) -> None:
        """For plans with packings. Call once, before the first of them."""
        self._packer, self._ring = packer, ring

    def digest_writes(self, memory: NDArray[np.uint8], layout: KVLayout) -> None:
        """From now on every transfer has a digest. `memory` [nbytes]: the registered region, a pool of `layout` at its beginning. Call
        before the first push."""
        self._pool = memory, layout

    @property
    def num_transfers(self) -> int:
        """Attempts with bytes pushed and neither completed nor stopped."""
        return len(self._transfers)

    @property
    def num_in_flight(self) -> int:
        """Flushes not yet answered, and peers that something waits to be packed for."""
        return len(self._flights) + len(self._queues)

    def when_issued(self, peer: PeerId, act: Callable[[], None]) -> None:
        """Call `act` once everything that was to be pushed to the peer has been issued: at once, unless something waits to be packed."""
        if peer in self._queues:
            self._queues[peer].append(act)
        else:
            act()

    def begin_step(self, step_id: int, plans: tuple[PushPlan, ...]) -> None:
        """Plans of an earlier step are void: one step runs at a time."""
        self._step = _Step(step_id, plans)

    def layer_ready(self, step_id: int, layer: int, written_at: float, held: tuple[float, ...] = ()) -> None:
        """Issue that layer of every plan of the step, at once, and with it those before it that were held back, written at those times. A
        layer is issued once, however often it is told."""
        step = self._step
        if step is None or step.step_id != step_id:
            return
        told = enumerate((*held, written_at), layer - len(held))
        layers = [(index, moment) for index, moment in told if index not in step.issued]
        step.issued.update(index for index, _ in layers)
        self._issue([(plan, [entry for entry in layers if entry[0] < plan.num_layers]) for plan in step.plans])

    def end_step(self, step_id: int) -> None:
        if self._step is not None and self._step.step_id == step_id:
            self._step = None

    def push_now(self, plan: PushPlan) -> None:
        """All layers at once: the KV is already in the pool."""
        written_at = self._now()
        self._issue([(plan, [(layer, written_at) for layer in range(plan.num_layers)])])

    def stop(self, lease: Lease) -> None:
        """Issue nothing of the lease any more, whatever the running step still brings."""
        self._stopped[lease] = None
        if len(self._stopped) > _MAX_STOPPED:
            self._stopped.popitem(last=False)
        self._transfers.pop(lease, None)
        queue = self._queues.get(lease.holder)
        if queue is not None:
            self._queues[lease.holder] = deque(item for item in queue if not isinstance(item, _Waiting) or item.plan.lease != lease)

    def drop_peer(self, peer: PeerId) -> None:
        """The peer is gone: its transfers will not complete."""
        for lease in [lease for lease in self._transfers if lease.holder == peer]:
            del self._transfers[lease]
        for token in [token for token, flight in self._flights.items() if flight.peer == peer]:
            # Nothing of these transfers will be taken for complete, whatever a late put still reads there.
            self._ring.give_back(peer, self._flights.pop(token).slots)
        self._last_end.pop(peer, None)
        for item in self._queues.pop(peer, ()):
            if not isinstance(item, _Waiting):
                item()

    def advance(self) -> bool:
        """Pack and issue a little of what waits, for every peer. Call once per turn; True when something was done: call again."""
        happened = False
        for peer in tuple(self._queues):
            happened |= self._pack_some(peer)
        return happened

    def on_flushed(self, token: int, ok: bool, detail: str) -> None:
        flight = self._flights.pop(token, None)
        if flight is None:
            return
        now = self._now()
        service_s = now - max(flight.started_at, self._last_end.get(flight.peer, flight.started_at))
        self._last_end[flight.peer] = now
        total = sum(piece.nbytes for piece in flight.pieces) or 1
        for piece in flight.pieces:
            if piece.ended_at is None:
                piece.ended_at = now
            piece.transfer.service_s += service_s * piece.nbytes / total
            if not ok:
                piece.transfer.problem = piece.transfer.problem or detail or "flush failed"
        self._ring.give_back(flight.peer, flight.slots)

    def problem_of(self, peer: PeerId, notice: Completed) -> str:
        """Why `notice` must not be sent although the last flush was ok; empty if it may: every byte it claims has been written."""
        lease = Lease(notice.lease_id, notice.epoch, peer)
        if lease in self._stopped:
            return "the push was stopped"
        transfer = self._transfers.get(lease)
        if transfer is not None and transfer.problem:
            return transfer.problem
        pushed = 0 if transfer is None else sum(piece.nbytes for piece in transfer.pieces)
        return "" if pushed == notice.nbytes else f"pushed {pushed} of {notice.nbytes} bytes"

    def digest_of(self, peer: PeerId, notice: Completed) -> bytes:
        """Of everything pushed under the notice's lease; empty where transfers are not verified."""
        transfer = self._transfers.get(Lease(notice.lease_id, notice.epoch, peer))
        return b"" if transfer is None or transfer.digest is None else transfer.digest.to_bytes()

    def finish(self, peer: PeerId, notice: Completed, compute_ended_at: float, lane: str) -> Finished | None:
        """Close the transfer that `notice` completes, now; None if it moved no bytes."""
        transfer = self._transfers.pop(Lease(notice.lease_id, notice.epoch, peer), None)
        if transfer is None or not transfer.pieces:
            return None
        return measure(transfer, notice, compute_ended_at, self._now(), lane)

    def abort(self, peer: PeerId, notice: Completed) -> None:
        """The attempt's last flush failed: forget its transfer."""
        self._transfers.pop(Lease(notice.lease_id, notice.epoch, peer), None)

    def _issue(self, pushes: list[tuple[PushPlan, list[tuple[int, float]]]]) -> None:
        """Of each plan its (layer, written at)."""
        flights: dict[PeerId, _Flight] = {}
        for plan, layers in pushes:
            if plan.lease in self._stopped or not layers:
                continue
            peer = plan.lease.holder
            if plan.packings:
                waiting = self._queues.setdefault(peer, deque())
                waiting.extend(_Waiting(plan, layer, packing, moment) for layer, moment in layers for packing in plan.packings)
            nbytes = int(plan.ranges[:, 2].sum())
            if nbytes == 0:
                continue
            transfer = self._transfer_of(plan)
            started_at = self._now()
            if self._write(plan, _ops_of(plan, [layer for layer, _ in layers]), transfer):
                pieces = [Piece(transfer, plan.chunk_index, layer, moment, started_at, nbytes) for layer, moment in layers]
                transfer.pieces += pieces
                flights.setdefault(peer, _Flight(peer, started_at, [])).pieces += pieces
                if transfer.digest is not None and self._pool is not None and plan.span is not None:
                    for layer, _ in layers:
                        transfer.digest.add_pool(*self._pool, plan.span, layer)
        for flight in flights.values():
            self._fly(flight)

    def _transfer_of(self, plan: PushPlan) -> Transfer:
        transfer = self._transfers.get(plan.lease)
        if transfer is None:
            transfer = self._transfers[plan.lease] = Transfer(plan.attempt_id)
            transfer.digest = None if self._pool is None else KVDigest()
        return transfer

    def _write(self, plan: PushPlan, ops: NDArray[np.int64], transfer: Transfer) -> bool:
        try:
            self._transport.write(WriteBatch(plan.lease.holder, plan.lease.lease_id, plan.lease.epoch, ops))
        except TransportError as error:
            transfer.problem = transfer.problem or str(error)
            return False
        return True

    def _fly(self, flight: _Flight) -> None:
        token = self._next_token()
        self._flights[token] = flight
        self._transport.flush(flight.peer, token)

    # ---- what is packed

    def _pack_some(self, peer: PeerId) -> bool:
        """Pack what the peer's queue begins with, as long as there are slots and it is its turn; then do what was waiting for just that."""
        queue = self._queues[peer]
        flight = _Flight(peer, self._now(), [])
        while queue and isinstance(item := queue[0], _Waiting) and len(flight.slots) < _SLOTS_PER_TURN:
            slot = self._ring.take(peer)
            if slot is None:
                break
            queue.popleft()
            flight.slots.append(slot)
            self._pack(item, slot, flight)
        happened = bool(flight.slots)
        if happened:
            self._fly(flight)
        while queue and not isinstance(act := queue[0], _Waiting):
            queue.popleft()
            act()
            happened = True
        if not queue:
            del self._queues[peer]
        return happened

    def _pack(self, item: _Waiting, slot: int, flight: _Flight) -> None:
        plan, packing = item.plan, item.packing
        transfer = self._transfer_of(plan)
        if packing.nbytes > self._ring.slot_nbytes:
            transfer.problem = transfer.problem or f"{packing.nbytes} packed bytes for a slot of {self._ring.slot_nbytes}"
            return
        assert self._packer is not None, "a plan that packs, but nothing to pack with"
        started_at = self._now()
        self._packer.pack(item.layer, packing, slot)
        packed_at = self._now()
        transfer.pack_s += packed_at - started_at
        if not flight.pieces:
            flight.started_at = packed_at
        ops = packing.ranges + np.array([slot, item.layer * plan.remote_layer_stride, 0], np.int64)
        if self._write(plan, ops, transfer):
            if transfer.digest is not None and self._pool is not None:
                transfer.digest.add_packed(self._pool[0][slot : slot + packing.nbytes], packing, item.layer)
            piece = Piece(transfer, plan.chunk_index, item.layer, item.written_at, started_at, packing.nbytes)
            transfer.pieces.append(piece)
            transfer.packed_nbytes += packing.nbytes
            flight.pieces.append(piece)


def _ops_of(plan: PushPlan, layers: list[int]) -> NDArray[np.int64]:
    """[len(layers) * n, 3]: the plan's ranges in each of those layers."""
    strides = np.array([plan.local_layer_stride, plan.remote_layer_stride, 0], np.int64)
    return (plan.ranges + np.multiply.outer(np.array(layers, np.int64), strides)[:, None]).reshape(-1, 3)
