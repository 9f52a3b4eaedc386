"""One worker, decided purely: events in, actions out. Owned by the rank's control thread, or by the simulator.

Composes the prefill and the decode machine over one scheduler, one block pool and one lease table, and adds what concerns both: links,
peers, the step loop, drain, load and peer reports. Who does what: docstrings of the two machines.

The executor calls handle() with every event in order, carries out the actions in order, and calls handle(Tick()) no later than
next_deadline(). `now` is monotonic seconds and never goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import assert_never

import msgspec

from pd_serve.engine.scheduler import Scheduler, SchedulerSettings
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.ids import Epoch, LinkId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.lease import LeaseTable
from pd_serve.protocol.cache_events import CacheSnapshot
from pd_serve.protocol.link import (
    BlockCounts,
    Cancel,
    Closed,
    Failed,
    FailureReason,
    Load,
    Open,
    Peers,
    PeerState,
    PeerStatus,
    Ping,
    Pong,
    Prefill,
    RefusalReason,
    Refused,
    Role,
    RouterFrame,
)
from pd_serve.protocol.notify import Abandon, Completed, Quiesced
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from workers.cache_feed import CacheFeed
from workers.decode.machine import DecodeMachine
from workers.events import (
    Action,
    DrainRequested,
    Event,
    FlushDone,
    FrameReceived,
    LinkClosed,
    LinkOpened,
    NoticeArrived,
    RemovePeer,
    RoleSet,
    RunBatch,
    SendFrame,
    StepDone,
    StepFailed,
    Tick,
    TransportReported,
    WindowClosed,
    WindowOpened,
)
from workers.peers import PeerTable
from workers.prefill.machine import PrefillMachine
from workers.settings import MachineSettings


class WorkerMachine:
    def __init__(
        self,
        settings: MachineSettings,
        scheduler: SchedulerSettings,
        new_epoch: Callable[[], Epoch],
        prefix_cache: bool = True,
    ) -> None:
        layout = settings.layout
        self._settings = settings
        self.pool = BlockPool(layout.num_blocks - settings.num_idle_blocks, layout.block_size, prefix_cache)
        self.leases = LeaseTable(self.pool, new_epoch)
        self.scheduler = Scheduler(scheduler, self.pool, self.leases.granted_blocks)
        self.prefill = PrefillMachine(settings, self.scheduler, self.pool)
        self.decode = DecodeMachine(settings, self.scheduler, self.pool, self.leases)
        self.peers = PeerTable(settings.info, settings.rejoin_after_s)
        self._role = settings.info.role
        self._links: dict[LinkId, None] = {}
        self._cache_feed = CacheFeed(self.pool.prefixes)
        self._next_step_id = 1
        self._drain_at: float | None = None
        self._is_drain_over = False
        self._role_ends_at: float | None = None
        """When what runs here in the role before this one is failed."""
        self._reported_peers: tuple[PeerState, ...] = ()
        self._reported_load: Load | None = None
        self._load_seq = 0
        self._load_changed = False
        self._load_sent_at = float("-inf")

    # ---- what is known

    @property
    def is_draining(self) -> bool:
        return self._drain_at is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is held for any attempt: no sequence, lease, push or step."""
        return self.prefill.is_idle and self.decode.is_idle and not len(self.scheduler) and not self.scheduler.step_in_flight

    def next_deadline(self) -> float | None:
        """When Tick is due at the latest; None: only events matter."""
        times = [self.decode.next_deadline(), self.prefill.next_deadline(), self.peers.next_deadline()]
        if self._drain_at is not None and not self._is_drain_over:
            times.append(self._drain_at)
        times.append(self._role_ends_at)
        if self._links:
            period = self._settings.load_interval_s if self._load_changed else self._settings.heartbeat_s
            times.append(self._load_sent_at + period)
        return min((time for time in times if time is not None), default=None)

    def load(self) -> Load:
        """As last reported if nothing has changed since, else with the next `seq`."""
        pool, leases = self.pool.counts(), self.leases
        return Load(
            seq=self._load_seq,
            role=self._role,
            draining=self.is_draining,
            blocks=BlockCounts(pool.total, pool.free, pool.cached, leases.num_leased_blocks, leases.num_quarantined_blocks),
            leases=len(leases),
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            prefill_queue_tokens=self.scheduler.prefill_queue_tokens,
            decode_context_tokens=self.scheduler.decode_context_tokens,
        )

    def leases_by_state(self) -> tuple[tuple[str, int], ...]:
        return self.leases.counts()

    def peer_states(self) -> tuple[PeerState, ...]:
        return self.peers.states()

    # ---- the one entry

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        actions = self._react(event, now)
        actions += self._run_next_step(now)
        actions += self._settle_peers(now)
        self._load_changed = self._load_changed or not isinstance(event, Tick)
        actions += self._report_load(now)
        return tuple(actions)

    def _react(self, event: Event, now: float) -> list[Action]:
        match event:
            case LinkOpened(link_id):
                self._links[link_id] = None
                self._cache_feed.opened(link_id)
                self._reported_load = None
                return [SendFrame(link_id, PeerStatus(self.peers.states()))]
            case LinkClosed(link_id):
                self._links.pop(link_id, None)
                self._cache_feed.closed(link_id)
                self.peers.link_closed(link_id)
                return self.decode.on_link_closed(link_id, now) + self.prefill.on_link_closed(link_id, now)
            case FrameReceived(link_id, frame):
                return self._on_frame(link_id, frame, now) if link_id in self._links else []
            case TransportReported(report):
                return self._on_report(report, now)
            case NoticeArrived():
                return self._on_notice(event, now)
            case FlushDone():
                return self.prefill.on_flush(event)
            case WindowOpened(lease_id):
                return self.decode.on_window_opened(lease_id)
            case WindowClosed(lease_id, fenced):
                self.decode.on_window_closed(lease_id, fenced)
                return []
            case StepDone(result):
                updates = self.scheduler.complete(result)
                actions: list[Action] = []
                for update in updates:
                    if update.sequence.kind is SequenceKind.PREFILL_ONLY:
                        actions += self.prefill.on_update(update, result.ended_at)
                others = (update for update in updates if update.sequence.kind is not SequenceKind.PREFILL_ONLY)
                return actions + self.decode.on_updates(others, result.started_at)
            case StepFailed(_, detail):
                failed = self.scheduler.abort_step()
                prompts, rest = _split(failed)
                return self.prefill.on_engine_failed(prompts, detail, now) + self.decode.on_engine_failed(rest, detail, now)
            case DrainRequested(deadline_s):
                self._drain_at = now + deadline_s
                return []
            case RoleSet(role, deadline_s):
                return self._set_role(role, now + deadline_s)
            case Tick():
                return self._on_tick(now)
        assert_never(event)

    def _on_frame(self, link_id: LinkId, frame: RouterFrame, now: float) -> list[Action]:
        match frame:
            case Open():
                if self.is_draining:
                    return [SendFrame(link_id, Refused(frame.attempt_id, RefusalReason.DRAINING, "the worker is being drained"))]
                if frame.attempt_id in self.prefill:
                    return [SendFrame(link_id, Refused(frame.attempt_id, RefusalReason.DUPLICATE, "attempt is here already"))]
                writer = None if frame.writer is None else self.peers.joined(frame.writer)
                return self.decode.open(link_id, frame, writer, now)
            case Prefill():
                if self.is_draining:
                    return [SendFrame(link_id, Failed(frame.attempt_id, FailureReason.DRAINING, "the worker is being drained"))]
                if frame.attempt_id in self.decode:
                    return [SendFrame(link_id, Failed(frame.attempt_id, FailureReason.REFUSED, "attempt is here already"))]
                return self.prefill.start(link_id, frame, self.peers.joined(frame.target.lease.holder))
            case Cancel(attempt_id):
                closed = SendFrame(link_id, Closed(attempt_id))
                return [closed, *self.decode.cancel(link_id, attempt_id, now), *self.prefill.cancel(link_id, attempt_id, now)]
            case Peers(peers):
                self.peers.set_named(link_id, peers, now)
                return []
            case Ping(nonce):
                return [SendFrame(link_id, Pong(nonce))]
            case CacheSnapshot():
                self._cache_feed.asked(link_id)
                return []
        assert_never(frame)

    def _on_report(self, report: PeerJoined | PeerRefused | PeerLost | PeerFenced, now: float) -> list[Action]:
        self.peers.on_report(report, now)
        match report:
            case PeerLost(peer, detail, fenced):
                return self.decode.on_peer_lost(peer, detail, fenced, now) + self.prefill.on_peer_lost(peer, detail, now)
            case PeerFenced(peer):
                return self.decode.on_peer_lost(peer, "fenced", True, now)
            case PeerJoined() | PeerRefused():
                return []
        assert_never(report)

    def _on_notice(self, event: NoticeArrived, now: float) -> list[Action]:
        peer, notice = event.peer, event.notice
        match notice:
            case Completed():
                return self.decode.on_completed(peer, notice, now, event.damage)
            case Quiesced():
                return self.decode.on_quiesced(peer, notice, now)
            case Abandon():
                return self.prefill.on_abandon(peer, notice, now)
        assert_never(notice)

    def _set_role(self, role: Role, ends_at: float) -> list[Action]:
        """Both phases can always be served here, so the new role's work is taken at once: routers only have to hear of it, without the
        wait that other loads have. Work of a phase that the new role lacks goes on until the deadline."""
        if role is not self._role:
            self._role = role
            self._reported_load = None
            self._role_ends_at = None if role is Role.BOTH or ends_at == inf else ends_at
        return []

    def _on_tick(self, now: float) -> list[Action]:
        actions = self.decode.on_tick(now)
        if self._role_ends_at is not None and now >= self._role_ends_at:
            self._role_ends_at = None
            leaving = self.decode if self._role is Role.PREFILL else self.prefill
            actions += leaving.on_drain_deadline(now)
        if self._drain_at is not None and not self._is_drain_over and now >= self._drain_at:
            self._is_drain_over = True
            actions += self.decode.on_drain_deadline(now) + self.prefill.on_drain_deadline(now)
        return actions

    # ---- after every event

    def _run_next_step(self, now: float) -> list[Action]:
        """Start a step if none runs and there is something to compute."""
        actions: list[Action] = []
        while not self.scheduler.step_in_flight and len(self.scheduler):
            decision = self.scheduler.schedule(self._next_step_id)
            self._next_step_id += 1
            for sequence in decision.preempted:
                machine = self.prefill if sequence.kind is SequenceKind.PREFILL_ONLY else self.decode
                actions += machine.on_preempted(sequence, now)
            if decision.batch is not None:
                actions.append(RunBatch(decision.batch, self.prefill.pushes(decision.batch), self.prefill.completions(decision.batch)))
            elif not decision.preempted:
                break
        return actions

    def _settle_peers(self, now: float) -> list[Action]:
        """Join, rejoin and let go of peers; tell the routers if that changed anything."""
        actions: list[Action] = []
        for peer in self.prefill.take_stuck_peers(now):
            if not self.decode.is_busy_with(peer):
                actions += self.peers.remove_stuck(peer, now)
        changes = self.peers.reconcile(now, lambda peer: self.decode.is_busy_with(peer) or self.prefill.is_busy_with(peer))
        for change in changes:
            if isinstance(change, RemovePeer) and not self.peers.is_wanted(change.peer):
                self.prefill.on_peer_removed(change.peer)
        actions += changes
        states = self.peers.states()
        if states != self._reported_peers:
            self._reported_peers = states
            actions += [SendFrame(link_id, PeerStatus(states)) for link_id in self._links]
        return actions

    def _report_load(self, now: float) -> list[Action]:
        """At most every load_interval_s, only what is new, of the prefix cache too; at least every heartbeat_s."""
        is_due = now >= self._load_sent_at + self._settings.heartbeat_s or self._reported_load is None
        may_send = self._load_changed and now >= self._load_sent_at + self._settings.load_interval_s
        if not self._links or not (is_due or may_send):
            return []
        events: list[Action] = [*self._cache_feed.frames()]
        self._load_changed = self._cache_feed.is_behind
        load = self.load()
        if load == self._reported_load and not is_due and not events:
            return []
        self._load_seq += 1
        self._reported_load = msgspec.structs.replace(load, seq=self._load_seq)
        self._load_sent_at = now
        return [SendFrame(link_id, self._reported_load) for link_id in self._links] + events


def _split(sequences: tuple[Sequence, ...]) -> tuple[list[Sequence], list[Sequence]]:
    """(PREFILL_ONLY, the others)"""
    prompts = [sequence for sequence in sequences if sequence.kind is SequenceKind.PREFILL_ONLY]
    return prompts, [sequence for sequence in sequences if sequence.kind is not SequenceKind.PREFILL_ONLY]
