"""Invariants, checked after every event. Each raises ViolationError with what is wrong; each is seen failing in test_planted_bugs.py.

White box on purpose: holders of blocks are counted from the machines' own tables and compared with the pool's reference counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pd_serve.ids import AttemptId, LinkId, PeerId
from pd_serve.kv.lease import LeaseState
from pd_serve.protocol.link import Cancel, Closed, Failed, Open, Prefill, PrefillDone, Refused, Step
from router.lifecycle import Action as LifecycleAction
from router.lifecycle import Event as LifecycleEvent
from router.lifecycle import FrameArrived, Send, TokenArrived, WorkerLost
from tests.sim.core import ViolationError
from tests.sim.fabric import Write
from workers.events import Action, Event, FrameReceived, LinkClosed, SendFrame
from workers.machine import WorkerMachine


def check_machine(machine: WorkerMachine) -> None:
    """Conservation, reference counts and single ownership of writable blocks."""
    pool = machine.pool
    try:
        pool.check()
    except AssertionError as error:
        raise ViolationError(f"pool: {error}") from error
    holders: Counter[int] = Counter()
    exclusive: Counter[int] = Counter()
    for sequence in machine.scheduler:
        holders.update(sequence.block_table)
        exclusive.update(sequence.block_table[sequence.num_computed_tokens // pool.block_size :])
    for job in machine.prefill._jobs.values():
        if machine.scheduler.get(job.attempt_id) is None:
            holders.update(job.sequence.block_table)
    for lease in machine.leases:
        holders.update(lease.blocks if lease.state is LeaseState.GRANTED else lease.writable_blocks)
        exclusive.update(lease.writable_blocks)
    holders.update(machine.scheduler._deferred)
    closing: Counter[int] = Counter()
    for blocks in machine.decode._closing.values():
        closing.update(blocks)
    holders.update(closing)
    refs = pool._refs
    if refs != dict(holders):
        wrong = {
            block: (refs.get(block, 0), holders.get(block, 0)) for block in refs | dict(holders) if refs.get(block) != holders.get(block)
        }
        raise ViolationError(f"blocks whose references differ from their holders, block: (references, holders): {wrong}")
    shared = [block for block in exclusive if refs[block] - closing[block] != 1]
    if shared:
        raise ViolationError(f"blocks {shared} may be written by one holder and have several")
    for attempt in machine.decode._attempts.values():
        if attempt.lease_id is not None and machine.leases.get(attempt.lease_id) is None:
            raise ViolationError(f"attempt {attempt.sequence.attempt_id} waits under lease {attempt.lease_id}, which is over")


def check_write(name: str, machine: WorkerMachine, writer: PeerId, write: Write, data: bytes, memory: bytes) -> None:
    """A remote write lands: inside the writable blocks of a live lease of its writer, or a second time and harmless.

    `memory`: what the target held before.
    """
    lease = machine.leases.get(write.lease_id)
    layout = machine._settings.layout
    first = write.target % layout.layer_nbytes // layout.block_nbytes
    last = (write.target + write.nbytes - 1) % layout.layer_nbytes // layout.block_nbytes
    if lease is None and data == memory and set(range(first, last + 1)) <= set(machine.decode._closing.get(write.lease_id, ())):
        return
    if lease is None or lease.writer != writer or lease.epoch != write.epoch:
        raise ViolationError(f"{name}: {writer} writes under lease {write.lease_id}, which is over or not its own")
    foreign = [block for block in range(first, last + 1) if block not in lease.writable_blocks]
    if foreign:
        raise ViolationError(f"{name}: {writer} writes into blocks {foreign}, lease {write.lease_id} has {lease.writable_blocks}")
    for block in range(first, last + 1):
        if machine.pool.ref_count(block) != 1:
            raise ViolationError(f"{name}: leased block {block} has {machine.pool.ref_count(block)} holders while it is written")


def check_source_held(name: str, machine: WorkerMachine, write: Write) -> None:
    layout = machine._settings.layout
    first = write.source % layout.layer_nbytes // layout.block_nbytes
    last = (write.source + write.nbytes - 1) % layout.layer_nbytes // layout.block_nbytes
    for block in range(first, last + 1):
        if not machine.pool.ref_count(block):
            raise ViolationError(f"{name}: block {block} was given back while it is still being read by a transfer")


class LegChecker:
    """One terminal frame per leg, nothing after it, and one Closed per Cancel, of one worker incarnation."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended: set[tuple[LinkId, AttemptId]] = set()
        self._cancels: Counter[tuple[LinkId, AttemptId]] = Counter()
        self._closed_links: set[LinkId] = set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, FrameReceived) and isinstance(event.frame, Cancel):
            self._cancels[event.link_id, event.frame.attempt_id] += 1
        if isinstance(event, LinkClosed):
            self._closed_links.add(event.link_id)

    def on_actions(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, SendFrame):
                self._on_frame(action)

    def _on_frame(self, action: SendFrame) -> None:
        link_id, frame = action.link_id, action.frame
        if link_id in self._closed_links:
            raise ViolationError(f"{self._name}: {frame} goes to a closed link")
        match frame:
            case Closed(attempt_id):
                self._cancels[link_id, attempt_id] -= 1
                if self._cancels[link_id, attempt_id] < 0:
                    raise ViolationError(f"{self._name}: Closed for attempt {attempt_id} that nobody cancelled")
                self._ended.add((link_id, attempt_id))
            case Refused(attempt_id) | Failed(attempt_id) | PrefillDone(attempt_id):
                self._end(link_id, attempt_id, frame)
            case Step(outputs):
                for output in outputs:
                    if (link_id, output.attempt_id) in self._ended:
                        raise ViolationError(f"{self._name}: a token after the end of attempt {output.attempt_id}")
                    if output.finish is not None:
                        self._end(link_id, output.attempt_id, frame)
            case _:
                pass

    def _end(self, link_id: LinkId, attempt_id: AttemptId, frame: object) -> None:
        if (link_id, attempt_id) in self._ended:
            raise ViolationError(f"{self._name}: a second terminal frame for attempt {attempt_id}: {frame}")
        self._ended.add((link_id, attempt_id))

    def check_all_closed(self) -> None:
        open_cancels = [key for key, count in self._cancels.items() if count > 0 and key[0] not in self._closed_links]
        if open_cancels:
            raise ViolationError(f"{self._name}: cancels never answered: {open_cancels}")


class LegTracker:
    """What workers may still hold for a router's attempts: an attempt that is left must be cancelled on every leg that is held (F27)."""

    def __init__(self) -> None:
        self._held: dict[AttemptId, set[PeerId]] = {}
        self._prefill: dict[AttemptId, PeerId] = {}

    def on_event(self, event: LifecycleEvent) -> None:
        match event:
            case FrameArrived(peer, Refused(attempt_id) | Failed(attempt_id) | PrefillDone(attempt_id) | Closed(attempt_id)):
                self._held.get(attempt_id, set()).discard(peer)
            case TokenArrived(peer, token):
                self._held.get(token.attempt_id, set()).discard(self._prefill.get(token.attempt_id, peer))
                if token.finish is not None:
                    self._held.get(token.attempt_id, set()).discard(peer)
            case WorkerLost(peer):
                for held in self._held.values():
                    held.discard(peer)
            case _:
                pass

    def on_actions(self, actions: Iterable[LifecycleAction]) -> None:
        for action in actions:
            match action:
                case Send(peer, Open(attempt_id)):
                    self._held[attempt_id] = {peer}
                case Send(peer, Prefill(attempt_id)):
                    self._held[attempt_id].add(peer)
                    self._prefill[attempt_id] = peer
                case Send(peer, Cancel(attempt_id)):
                    self._held[attempt_id].discard(peer)
                case _:
                    pass

    def check(self, current: AttemptId | None, attempts: list[AttemptId]) -> None:
        """`attempts`: all of one request, the current one last."""
        for attempt_id in attempts:
            if attempt_id == current:
                continue
            held = self._held.pop(attempt_id, None)
            if held:
                raise ViolationError(f"attempt {attempt_id} was left and is still held by {sorted(peer.worker_id for peer in held)}")
