"""The decode leg of an attempt, decided purely: the only voice of a request. Owned by WorkerMachine on the control thread.

The life of a request here:

    Open with a writer -> blocks for the whole prompt are reserved, a lease GRANTED, the write window opened, and then: Reserved
                       -> the writer pushes KV; its Completed is checked (lease, epoch, writer, contributor, tokens, layers, bytes)
                       -> FILLED: window closed, the first token goes out in a Step, the sequence joins the batch of the next step
    Open without       -> Reserved; the prompt is computed here
                       -> a token per step ... the last one with its finish reason: blocks go back, over

Cancel, a lost link, the lease's deadline, a lost writer, preemption, an engine fault or a drain end an attempt early. If its KV is still in
flight, the client is answered at once, but the leased blocks stay away from the pool until the writer has let go too (quarantine.py). Those
of a filled lease can be had again once its window is closed, so that a write that comes twice finds no new owner.
What must stay true: one terminal frame per attempt (Refused, Failed, a Step entry with a finish, or the Closed that answers Cancel).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pd_serve.engine.scheduler import Scheduler, SequenceUpdate
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.errors import StaleError
from pd_serve.ids import AttemptId, LeaseId, LinkId, PeerId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.conversion import packed_token_nbytes
from pd_serve.kv.digest import TokenSpan
from pd_serve.kv.lease import HeldLease, LeaseState, LeaseTable
from pd_serve.kv.routes import Route
from pd_serve.kv.transfer import write_ranges
from pd_serve.protocol.link import (
    Failed,
    FailureReason,
    FinishReason,
    Lease,
    Open,
    PeerInfo,
    RefusalReason,
    Refused,
    Reserved,
    Sample,
    Step,
    Target,
    TokenOutput,
)
from pd_serve.protocol.notify import ALL_CONTRIBUTORS, Completed, Quiesced
from pd_serve.transport.base import WriteWindow
from workers.decode.quarantine import Quarantine, may_report
from workers.events import Action, CloseWindow, Observe, OpenWindow, SendFrame
from workers.settings import MachineSettings

_LONGEST_TIMEOUT_S = 1e6
"""Above it, or not a number: the router is broken."""


@dataclass(slots=True)
class _Attempt:
    link_id: LinkId
    sequence: Sequence
    lease_id: LeaseId | None = None
    """While the KV is in flight."""
    routes: tuple[Route, ...] = ()
    """By contributor: what each part of the KV is."""
    handed_over_at: float | None = None
    """From the record's arrival to the first decode step: when prefill's compute ended, on this clock, the record's flight left out."""


class DecodeMachine:
    def __init__(self, settings: MachineSettings, scheduler: Scheduler, pool: BlockPool, leases: LeaseTable) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._pool = pool
        self._leases = leases
        self._quarantine = Quarantine(settings, leases)
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._closing: dict[LeaseId, tuple[int, ...]] = {}
        """Written blocks of filled leases whose window may still let a late copy of a write in: one more reference to each."""

    # ---- what is known

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._attempts

    @property
    def is_idle(self) -> bool:
        return not self._attempts and not len(self._leases) and not self._closing

    def is_busy_with(self, peer: PeerId) -> bool:
        """The peer may still write under a lease."""
        return bool(self._leases.of_writer(peer))

    def next_deadline(self) -> float | None:
        times = [time for time in (self._leases.next_deadline(), self._quarantine.next_deadline()) if time is not None]
        return min(times, default=None)

    # ---- the life of an attempt

    def open(self, link_id: LinkId, frame: Open, writer: PeerInfo | None, now: float) -> list[Action]:
        """`writer`: the one that the frame names, if it can be reached. Precondition: the worker is not draining."""
        refusal = self._refusal(frame, writer is not None)
        if refusal is not None:
            return [SendFrame(link_id, Refused(frame.attempt_id, *refusal))]
        self._scheduler.publish_received()
        cached = self._pool.match_prefix(frame.token_ids)
        headroom = self._headroom_for(frame)
        if self._num_blocks_to_come(frame, len(cached), headroom) + self._num_promised_blocks(headroom) > self._pool.num_allocatable:
            self._pool.release(cached)
            return [SendFrame(link_id, Refused(frame.attempt_id, RefusalReason.NO_CAPACITY, "not enough free blocks"))]
        num_cached = len(cached) * self._pool.block_size
        sequence = Sequence(
            attempt_id=frame.attempt_id,
            kind=SequenceKind.LOCAL if frame.writer is None else SequenceKind.DECODE,
            token_ids=list(frame.token_ids),
            num_prompt_tokens=len(frame.token_ids) - frame.num_output_tokens,
            sampling=frame.sampling,
            block_table=list(cached),
            num_computed_tokens=num_cached,
            num_cached_tokens=num_cached,
        )
        attempt = _Attempt(link_id, sequence)
        self._attempts[frame.attempt_id] = attempt
        actions: list[Action] = []
        if num_cached:
            actions.append(Observe(Sample("pd_serve_prefix_cache_hit_tokens_total", float(num_cached))))
        if frame.writer is None or writer is None:
            self._scheduler.add(sequence)
            return [*actions, SendFrame(link_id, Reserved(frame.attempt_id, None, num_cached))]
        return actions + self._grant(attempt, writer, now + frame.timeout_s)

    def on_window_opened(self, lease_id: LeaseId) -> list[Action]:
        """The writer may hear of the lease now."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return []
        num_cached = lease.num_cached_blocks * self._settings.layout.block_size
        target = Target(Lease(lease_id, lease.epoch, self._settings.self_id), lease.blocks, num_cached)
        return [SendFrame(self._attempts[lease.attempt_id].link_id, Reserved(lease.attempt_id, target, num_cached))]

    def on_completed(self, peer: PeerId, notice: Completed, now: float, damage: str = "") -> list[Action]:
        """`damage`: as in NoticeArrived."""
        lease = self._live_lease(peer, notice)
        if lease is None:
            return _stale()
        if lease.state is not LeaseState.GRANTED:
            return [] if self._quarantine.on_notice(peer, notice) else _stale()
        attempt = self._attempts[lease.attempt_id]
        problem = self._problem_of(attempt, lease, notice) or damage
        if problem:
            return self._fail(attempt, FailureReason.TRANSFER, f"bad completion from {peer}: {problem}", now)
        if not self._leases.complete(lease.lease_id, notice.contributor):
            return []
        attempt.handed_over_at = now - notice.compute_to_notice_s
        return self._filled(attempt, lease, notice)

    def on_quiesced(self, peer: PeerId, notice: Quiesced, now: float) -> list[Action]:
        lease = self._live_lease(peer, notice)
        if lease is None:
            return _stale()
        if lease.state is not LeaseState.GRANTED:
            return [] if self._quarantine.on_notice(peer, notice) else _stale()
        self._quarantine.take_leave(lease, peer, notice)
        return self._fail(self._attempts[lease.attempt_id], FailureReason.TRANSFER, f"{peer} stopped before all KV was written", now)

    def on_updates(self, updates: Iterable[SequenceUpdate], started_at: float) -> list[Action]:
        """What a step, begun at `started_at`, computed: all tokens for one router in one frame."""
        outputs: dict[LinkId, list[TokenOutput]] = {}
        handovers: list[Action] = []
        for update in updates:
            attempt = self._attempts[update.attempt_id]
            if update.token is not None:
                outputs.setdefault(attempt.link_id, []).append(update.token)
            if attempt.handed_over_at is not None:
                handovers.append(Observe(Sample("pd_serve_handover_seconds", max(0.0, started_at - attempt.handed_over_at))))
                attempt.handed_over_at = None
            if update.has_left:
                self._end(attempt)
        return [SendFrame(link_id, Step(tuple(tokens))) for link_id, tokens in outputs.items()] + handovers

    # ---- ends before the end

    def cancel(self, link_id: LinkId, attempt_id: AttemptId, now: float) -> list[Action]:
        """The router asks for it; the caller sends Closed. Does nothing if the attempt is not here or another router's."""
        attempt = self._attempts.get(attempt_id)
        return [] if attempt is None or attempt.link_id != link_id else self._drop(attempt, now)

    def on_link_closed(self, link_id: LinkId, now: float) -> list[Action]:
        actions: list[Action] = []
        for attempt in tuple(self._attempts.values()):
            if attempt.link_id == link_id:
                actions += self._drop(attempt, now)
        return actions

    def on_window_closed(self, lease_id: LeaseId, fenced: bool) -> None:
        self._pool.release(self._closing.pop(lease_id, ()))
        self._quarantine.on_window_closed(lease_id, fenced)

    def on_peer_lost(self, peer: PeerId, detail: str, fenced: bool, now: float) -> list[Action]:
        actions: list[Action] = []
        for lease in self._leases.of_writer(peer):
            if lease.state is LeaseState.GRANTED:
                attempt = self._attempts[lease.attempt_id]
                actions += self._fail(attempt, FailureReason.PEER_LOST, f"{peer} was lost: {detail}", now)
        self._quarantine.on_peer_lost(peer, fenced)
        return actions

    def on_preempted(self, sequence: Sequence, now: float) -> list[Action]:
        """The scheduler has put the sequence out for want of blocks: the router moves it."""
        sample = Observe(Sample("pd_serve_preemptions_total", 1.0))
        return [sample, *self._fail(self._attempts[sequence.attempt_id], FailureReason.PREEMPTED, "no blocks left", now)]

    def on_engine_failed(self, sequences: Iterable[Sequence], detail: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for sequence in sequences:
            actions += self._fail(self._attempts[sequence.attempt_id], FailureReason.ENGINE, detail, now)
        return actions

    def on_drain_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for attempt in tuple(self._attempts.values()):
            actions += self._fail(attempt, FailureReason.DRAINING, "the worker is being drained", now)
        return actions

    def on_tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for lease in self._leases.expired(now):
            attempt = self._attempts[lease.attempt_id]
            actions += self._fail(attempt, FailureReason.TIMEOUT, "the KV did not arrive in time", now)
        return actions + self._quarantine.on_tick(now)

    # ---- inside

    def _refusal(self, frame: Open, is_joined: bool) -> tuple[RefusalReason, str] | None:
        settings = self._settings
        num_tokens, sampling = len(frame.token_ids), frame.sampling
        if not 0 <= frame.num_output_tokens < num_tokens or not 0 < frame.timeout_s <= _LONGEST_TIMEOUT_S:
            return RefusalReason.INVALID, "malformed request"
        if problem := settings.problem_of(sampling):
            return RefusalReason.INVALID, problem
        if num_tokens + sampling.max_tokens > settings.max_model_len:
            return RefusalReason.TOO_LONG, f"{num_tokens} + {sampling.max_tokens} tokens exceed {settings.max_model_len}"
        if not all(0 <= token < settings.vocab_size for token in frame.token_ids):
            return RefusalReason.INVALID, "token id out of range"
        if frame.attempt_id in self._attempts or self._scheduler.get(frame.attempt_id) is not None:
            return RefusalReason.DUPLICATE, "attempt is here already"
        if frame.writer == settings.self_id:
            return RefusalReason.INVALID, "a worker does not write to itself: open without a writer"
        if frame.writer is not None and not is_joined:
            return RefusalReason.NOT_JOINED, f"{frame.writer} is not joined"
        if frame.writer is None and self._scheduler.num_waiting >= settings.max_waiting:
            return RefusalReason.NO_CAPACITY, "too many prompts wait here"
        return None

    def _headroom_for(self, frame: Open) -> int:
        """Output tokens for which there must be room, for it and all others here. A moved request asks for as many as it has had to compute
        again: so it gets on by as much before it is preempted again, and long ones are not moved every few tokens."""
        return max(self._settings.headroom_tokens, min(frame.num_output_tokens, frame.sampling.max_tokens))

    def _num_blocks_to_come(self, frame: Open, num_cached_blocks: int, headroom: int) -> int:
        """Blocks that prompt and headroom of a new attempt will take from the pool."""
        num_tokens = len(frame.token_ids) + min(headroom, frame.sampling.max_tokens)
        return self._pool.num_blocks_for(num_tokens) - num_cached_blocks

    def _num_promised_blocks(self, headroom: int) -> int:
        """Blocks that admitted sequences may still take within that headroom, those whose KV is in flight included."""
        total = self._scheduler.headroom_blocks(headroom)
        for lease in self._leases:
            attempt = self._attempts.get(lease.attempt_id)
            if attempt is not None and lease.state is LeaseState.GRANTED:
                sequence = attempt.sequence
                length = len(sequence.token_ids) + min(headroom, sequence.sampling.max_tokens)
                total += max(0, self._pool.num_blocks_for(length) - len(lease.blocks))
        return total

    def _grant(self, attempt: _Attempt, writer: PeerInfo, deadline: float) -> list[Action]:
        """Reserve what is missing for the prompt. Precondition: admission has found that there is room."""
        sequence, layout = attempt.sequence, self._settings.layout
        num_tokens, num_cached = len(sequence.token_ids), sequence.num_cached_tokens
        cached = tuple(sequence.block_table)
        missing = self._pool.num_blocks_for(num_tokens) - len(cached)
        blocks = cached + self._pool.allocate(missing, after=cached[-1] if cached else None)
        sequence.block_table = []
        attempt.routes = self._settings.routes_from(writer)
        contributors = dict.fromkeys(range(len(attempt.routes)), writer.peer)
        lease = self._leases.grant(sequence.attempt_id, writer.peer, blocks, len(cached), deadline, contributors)
        attempt.lease_id = lease.lease_id
        starts, ends = write_ranges(layout, blocks, num_cached, num_tokens)
        window = WriteWindow(lease.lease_id, lease.epoch, writer.peer, starts, ends)
        return [OpenWindow(window, TokenSpan(blocks, num_cached, num_tokens))]

    def _live_lease(self, peer: PeerId, notice: Completed | Quiesced) -> HeldLease | None:
        """The lease a record speaks of, if the record can be its own: identity first, content later."""
        try:
            lease = self._leases.check(notice.lease_id, notice.epoch, peer)
        except StaleError:
            return None
        if not may_report(lease, peer, notice.contributor):
            return None
        if isinstance(notice, Completed) and (notice.attempt_id != lease.attempt_id or notice.contributor == ALL_CONTRIBUTORS):
            return None
        return lease

    def _problem_of(self, attempt: _Attempt, lease: HeldLease, notice: Completed) -> str:
        """Why a record does not prove that all KV is here; empty if it does."""
        layout = self._settings.layout
        num_tokens = len(attempt.sequence.token_ids)
        num_missing = num_tokens - lease.num_cached_blocks * layout.block_size
        num_heads = attempt.routes[notice.contributor].heads.num_heads
        owed = num_missing * layout.num_layers * packed_token_nbytes(layout, num_heads)
        if notice.num_contributors != len(attempt.routes):
            return f"{notice.num_contributors} contributors, {len(attempt.routes)} expected"
        if (notice.num_tokens, notice.num_layers) != (num_tokens, layout.num_layers):
            return f"{notice.num_tokens} tokens x {notice.num_layers} layers, {num_tokens} x {layout.num_layers} expected"
        if notice.nbytes != owed:
            return f"{notice.nbytes} bytes, {owed} expected"
        if not 0 <= notice.first_token < self._settings.vocab_size or not 0 <= notice.num_cached_tokens < num_tokens:
            return "first token or cached tokens out of range"
        return ""

    def _filled(self, attempt: _Attempt, lease: HeldLease, notice: Completed) -> list[Action]:
        sequence = attempt.sequence
        sequence.block_table = list(self._leases.fill(lease.lease_id))
        sequence.num_computed_tokens = notice.num_tokens
        self._closing[lease.lease_id] = lease.writable_blocks
        self._pool.retain(lease.writable_blocks)
        attempt.lease_id = None
        finish = sequence.append(notice.first_token, self._scheduler.rules)
        if notice.is_cut:
            finish = FinishReason.LENGTH
        token = TokenOutput(sequence.attempt_id, notice.first_token, finish, notice.logprobs, notice.num_cached_tokens)
        if finish is None:
            self._scheduler.add(sequence)
        else:
            self._pool.publish(sequence.token_ids, sequence.block_table, sequence.num_computed_tokens)
            self._end(attempt)
        return [SendFrame(attempt.link_id, Step((token,))), CloseWindow(lease.lease_id)]

    def _fail(self, attempt: _Attempt, reason: FailureReason, detail: str, now: float) -> list[Action]:
        """The router is told first; what the attempt holds goes back as soon as it may."""
        return [SendFrame(attempt.link_id, Failed(attempt.sequence.attempt_id, reason, detail)), *self._drop(attempt, now)]

    def _drop(self, attempt: _Attempt, now: float) -> list[Action]:
        """End the attempt silently."""
        lease_id = attempt.lease_id
        if lease_id is None:
            self._scheduler.remove(attempt.sequence.attempt_id)
        self._end(attempt)
        return [] if lease_id is None else self._quarantine.abandon(lease_id, now)

    def _end(self, attempt: _Attempt) -> None:
        """Forget the attempt; its blocks go back unless a lease holds them. Precondition: the scheduler does not have it."""
        del self._attempts[attempt.sequence.attempt_id]
        self._scheduler.release(attempt.sequence)


def _stale() -> list[Action]:
    return [Observe(Sample("pd_serve_stale_records_total", 1.0))]
