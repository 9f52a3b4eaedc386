"""The prefill leg of an attempt, decided purely. Owned by WorkerMachine on the control thread.

The life of a request here:

    Prefill frame -> the prefix cached here but not on decode is pushed at once (PushNow)
                  -> COMPUTING: the scheduler runs the prompt in chunks; each chunk's layers go out as they are written (RunBatch.pushes)
                  -> last chunk done: FLUSHING: flush, then Completed (with the first token) to decode, PrefillDone to the router; the
                     transport thread begins with it as the step ends (RunBatch.completions), whether or not that has been heard of here
                  -> the flush has ended: source blocks go back (to the prefix cache); the job is over

Cancel, Abandon, a lost link or peer, preemption, an engine fault or a drain stop a job: nothing more is issued under its lease, then
flush, then Quiesced to decode: STOPPED. What must stay true:

    source blocks go back only after that flush (ok or not) and after the step that computes into them
    nothing is ever pushed under a lease once its Quiesced may have been sent, or under one that was used before
    exactly one terminal frame to the router: PrefillDone, Failed, or the Closed that answers its Cancel
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from pd_serve.engine.batch import Batch
from pd_serve.engine.scheduler import Scheduler, SequenceUpdate
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.ids import AttemptId, Epoch, LeaseId, LinkId, PeerId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.conversion import Packing, plan_packings
from pd_serve.kv.digest import TokenSpan
from pd_serve.kv.layout import KVLayout
from pd_serve.kv.routes import Route
from pd_serve.kv.transfer import plan_ranges
from pd_serve.protocol.link import Failed, FailureReason, PeerInfo, Prefill, PrefillDone, Sample, Target
from pd_serve.protocol.notify import ALL_CONTRIBUTORS, Abandon, Completed, NoticeUnion, Quiesced
from pd_serve.protocol.sampling import TokenLogprobs
from workers.events import Action, FlushDone, FlushThenNotify, Observe, PushNow, PushPlan, SendFrame, StopPush
from workers.prefill.spent import SpentLeases
from workers.settings import MachineSettings

_UNKNOWN = -1
"""Stands for the first token until it is sampled."""
_NO_RANGES = np.empty((0, 3), dtype=np.int64)


class _Stage(Enum):
    COMPUTING = auto()
    FLUSHING = auto()
    STOPPED = auto()


@dataclass(slots=True)
class _Job:
    attempt_id: AttemptId
    link_id: LinkId | None
    """Whom the terminal frame is owed to; None once it has been sent, or the link is gone."""
    target: Target
    layout: KVLayout
    """Of the holder's ranks."""
    routes: tuple[Route, ...]
    sequence: Sequence
    stage: _Stage = _Stage.COMPUTING
    num_plans: int = 0
    pushed_nbytes: list[int] = field(default_factory=list)
    """By route."""
    tokens: list[int] = field(default_factory=list)
    """Of the flushes that end the job: not answered yet."""
    problem: str = ""
    """Of the first flush that failed."""
    stopped_at: float | None = None
    """When the job was given up; its flush may still be out."""

    @property
    def holder(self) -> PeerId:
        return self.target.lease.holder


class PrefillMachine:
    def __init__(self, settings: MachineSettings, scheduler: Scheduler, pool: BlockPool) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._pool = pool
        self._jobs: dict[AttemptId, _Job] = {}
        self._by_lease: dict[tuple[PeerId, LeaseId], _Job] = {}
        self._flushes: dict[int, _Job | tuple[PeerId, LeaseId]] = {}
        """By token: the job that waits for it, or the lease of another's whose Quiesced it carries."""
        self._next_token = 1
        self._spent = SpentLeases()
        self._completes_early = settings.info.num_ranks == 1
        """Records go out as the step ends. Several ranks must all have ended it first."""

    # ---- what is known

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._jobs

    @property
    def is_idle(self) -> bool:
        return not self._jobs and not self._flushes

    def is_busy_with(self, peer: PeerId) -> bool:
        """A flush to the peer is, or will be, out."""
        return any(job.holder == peer for job in self._jobs.values())

    def take_stuck_peers(self, now: float) -> tuple[PeerId, ...]:
        """Peers whose flush has kept the blocks of a stopped job for too long; told again only after as long a wait."""
        stuck: dict[PeerId, None] = {}
        for job in self._jobs.values():
            if job.stopped_at is not None and now >= job.stopped_at + self._settings.flush_patience_s:
                job.stopped_at = now
                stuck[job.holder] = None
        return tuple(stuck)

    def next_deadline(self) -> float | None:
        patience = self._settings.flush_patience_s
        return min((job.stopped_at + patience for job in self._jobs.values() if job.stopped_at is not None), default=None)

    # ---- the life of a job

    def start(self, link_id: LinkId, frame: Prefill, holder: PeerInfo | None) -> list[Action]:
        """`holder` None: the lease's holder is not joined."""
        refusal = self._refusal(frame, holder)
        if refusal is not None or holder is None:
            reason, detail = refusal or (FailureReason.PEER_LOST, f"{frame.target.lease.holder} is not joined")
            return [SendFrame(link_id, Failed(frame.attempt_id, reason, detail))]
        lease = frame.target.lease
        self._spent.add(lease.holder, lease.lease_id)
        self._scheduler.publish_received()
        cached = self._pool.match_prefix(frame.token_ids)
        num_cached = len(cached) * self._pool.block_size
        sequence = Sequence(
            attempt_id=frame.attempt_id,
            kind=SequenceKind.PREFILL_ONLY,
            token_ids=list(frame.token_ids),
            num_prompt_tokens=len(frame.token_ids) - frame.num_output_tokens,
            sampling=frame.sampling,
            block_table=list(cached),
            num_computed_tokens=num_cached,
            num_cached_tokens=num_cached,
        )
        routes = self._settings.routes_to(holder)
        job = _Job(frame.attempt_id, link_id, frame.target, holder.layout, routes, sequence, pushed_nbytes=[0] * len(routes))
        self._jobs[frame.attempt_id] = job
        self._by_lease[lease.holder, lease.lease_id] = job
        self._scheduler.add(sequence)
        actions: list[Action] = []
        if num_cached:
            actions.append(Observe(Sample("pd_serve_prefix_cache_hit_tokens_total", float(num_cached))))
        actions += [PushNow(plan) for plan in self._plans(job, cached, 0, num_cached)]
        return actions

    def pushes(self, batch: Batch) -> tuple[PushPlan, ...]:
        """What of a batch about to run goes to decode."""
        plans: list[PushPlan] = []
        for entry in batch.entries:
            job = self._jobs.get(entry.attempt_id)
            if job is None:
                continue
            plans += self._plans(job, entry.block_table, entry.start, entry.start + len(entry.token_ids))
        return tuple(plans)

    def completions(self, batch: Batch) -> tuple[FlushThenNotify, ...]:
        """The records of prompts that end with a batch about to run, what it samples left out. Call after pushes(batch)."""
        flushes: list[FlushThenNotify] = []
        for entry in batch.entries if self._completes_early else ():
            job = self._jobs.get(entry.attempt_id)
            if job is not None and entry.sample is not None:
                flushes += self._flush(job, self._completed(job, entry.start + len(entry.token_ids), _UNKNOWN, None, False), None)
        return tuple(flushes)

    def on_update(self, update: SequenceUpdate, ended_at: float) -> list[Action]:
        """A step computed something of a job."""
        if not update.prompt_done:
            return []
        assert update.token is not None
        job = self._jobs[update.attempt_id]
        job.stage = _Stage.FLUSHING
        if self._completes_early:
            return [] if job.tokens else self._end(job)
        first, num_tokens = update.token, job.sequence.num_computed_tokens
        return list(self._flush(job, self._completed(job, num_tokens, first.token_id, first.logprobs, update.is_cut), ended_at))

    def on_flush(self, event: FlushDone) -> list[Action]:
        waiting = self._flushes.pop(event.token, None)
        if not isinstance(waiting, _Job):
            return []
        job = waiting
        job.tokens.remove(event.token)
        if not event.ok:
            job.problem = job.problem or event.detail or "failed"
        # Of records that went out with the step the answer may be here before the end of the step.
        return [] if job.tokens or job.stage is _Stage.COMPUTING else self._end(job)

    def _end(self, job: _Job) -> list[Action]:
        """Its flushes and its step have ended."""
        del self._jobs[job.attempt_id]
        del self._by_lease[job.holder, job.target.lease.lease_id]
        self._scheduler.release(job.sequence)
        if job.link_id is None:
            return []
        if job.problem:
            return self._end_with(job, FailureReason.TRANSFER, f"flush to {job.holder} failed: {job.problem}")
        sequence = job.sequence
        num_computed = sequence.num_computed_tokens - sequence.num_cached_tokens
        return [SendFrame(job.link_id, PrefillDone(job.attempt_id, num_computed, sequence.num_cached_tokens))]

    # ---- ends before the end

    def cancel(self, link_id: LinkId, attempt_id: AttemptId, now: float) -> list[Action]:
        """The router asks for it; the caller sends Closed. Does nothing if the attempt is not here or another router's."""
        job = self._jobs.get(attempt_id)
        if job is None or job.link_id != link_id:
            return []
        job.link_id = None
        return self._stop(job, now)

    def on_link_closed(self, link_id: LinkId, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in tuple(self._jobs.values()):
            if job.link_id == link_id:
                job.link_id = None
                actions += self._stop(job, now)
        return actions

    def on_abandon(self, peer: PeerId, notice: Abandon, now: float) -> list[Action]:
        """Decode asks to let go of a lease, perhaps one never heard of: it is spent from now on, and Quiesced follows the flush."""
        self._spent.add(peer, notice.lease_id)
        job = self._by_lease.get((peer, notice.lease_id))
        if job is not None and job.target.lease.epoch == notice.epoch and job.stage is _Stage.COMPUTING:
            return self._fail(job, FailureReason.REFUSED, "decode has abandoned the lease", now)
        if job is not None and job.stage is _Stage.STOPPED:
            return []
        key = (peer, notice.lease_id)
        if key in self._flushes.values():
            return []
        if job is not None:
            # Everything has been issued; what is behind it on each route is answered by that route.
            return [
                FlushThenNotify(peer, self._token_for(key), quiesced, None, route.src_rank, route.dst_rank)
                for route, quiesced in zip(job.routes, _quiesced(job, notice.lease_id, notice.epoch), strict=True)
            ]
        return [FlushThenNotify(peer, self._token_for(key), Quiesced(notice.lease_id, notice.epoch, ALL_CONTRIBUTORS), None)]

    def on_peer_lost(self, peer: PeerId, detail: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in tuple(self._jobs.values()):
            if job.holder == peer and job.stage is _Stage.COMPUTING:
                actions += self._fail(job, FailureReason.PEER_LOST, f"{peer} was lost: {detail}", now)
        return actions

    def on_peer_removed(self, peer: PeerId) -> None:
        """No router names the peer any more, and no push to it is out."""
        self._spent.forget(peer)

    def on_preempted(self, sequence: Sequence, now: float) -> list[Action]:
        """The scheduler has put the sequence out for want of blocks."""
        return self._fail(self._jobs[sequence.attempt_id], FailureReason.PREEMPTED, "no blocks left", now)

    def on_engine_failed(self, sequences: Iterable[Sequence], detail: str, now: float) -> list[Action]:
        actions: list[Action] = []
        for sequence in sequences:
            actions += self._fail(self._jobs[sequence.attempt_id], FailureReason.ENGINE, detail, now)
        return actions

    def on_drain_deadline(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in tuple(self._jobs.values()):
            if job.stage is _Stage.COMPUTING:
                actions += self._fail(job, FailureReason.DRAINING, "the worker is being drained", now)
        return actions

    # ---- inside

    def _refusal(self, frame: Prefill, holder: PeerInfo | None) -> tuple[FailureReason, str] | None:
        settings, target = self._settings, frame.target
        num_tokens = len(frame.token_ids)
        if not 0 <= frame.num_output_tokens < num_tokens or num_tokens + frame.sampling.max_tokens > settings.max_model_len:
            return FailureReason.REFUSED, f"{num_tokens} + {frame.sampling.max_tokens} tokens exceed {settings.max_model_len}"
        if not all(0 <= token < settings.vocab_size for token in frame.token_ids):
            return FailureReason.REFUSED, "malformed request"
        if problem := settings.problem_of(frame.sampling):
            return FailureReason.REFUSED, problem
        if frame.attempt_id in self._jobs or self._scheduler.get(frame.attempt_id) is not None:
            return FailureReason.REFUSED, "attempt is here already"
        if self._spent.contains(target.lease.holder, target.lease.lease_id):
            return FailureReason.REFUSED, f"lease {target.lease.lease_id} is spent"
        if holder is None:
            return None
        layout = holder.layout
        num_cached = target.num_cached_tokens
        if len(target.blocks) != layout.num_blocks_for(num_tokens) or not all(0 <= block < layout.num_blocks for block in target.blocks):
            return FailureReason.REFUSED, "target does not fit the holder's pool"
        if not 0 <= num_cached < num_tokens or num_cached % layout.block_size:
            return FailureReason.REFUSED, f"{num_cached} tokens cached of {num_tokens}"
        if self._scheduler.num_waiting >= settings.max_waiting:
            return FailureReason.PREEMPTED, "too many prompts wait here"
        return None

    def _plans(self, job: _Job, blocks: tuple[int, ...], start: int, end: int) -> list[PushPlan]:
        """Tokens [start, end) less those that decode has: a plan for every route."""
        start = max(start, job.target.num_cached_tokens)
        if start >= end:
            return []
        layout = self._settings.layout
        is_equal = layout.is_same_as(job.layout)
        ranges = plan_ranges(layout, blocks, job.target.blocks, start, end) if is_equal else _NO_RANGES
        plans: list[PushPlan] = []
        for index, route in enumerate(job.routes):
            plan = PushPlan(
                attempt_id=job.attempt_id,
                lease=job.target.lease,
                ranges=ranges,
                local_layer_stride=layout.layer_nbytes,
                remote_layer_stride=job.layout.layer_nbytes,
                num_layers=layout.num_layers,
                chunk_index=job.num_plans,
                span=TokenSpan(blocks, start, end) if is_equal else None,
                packings=() if is_equal else self._packings(job, route, blocks, start, end),
                src_rank=route.src_rank,
                dst_rank=route.dst_rank,
            )
            job.pushed_nbytes[index] += plan.nbytes
            plans.append(plan)
        job.num_plans += 1
        return plans

    def _packings(self, job: _Job, route: Route, blocks: tuple[int, ...], start: int, end: int) -> tuple[Packing, ...]:
        settings = self._settings
        limit = settings.max_packing_nbytes
        return tuple(plan_packings(settings.layout, job.layout, route.heads, blocks, job.target.blocks, start, end, limit))

    def _completed(self, job: _Job, num_tokens: int, first_token: int, logprobs: TokenLogprobs | None, is_cut: bool) -> list[Completed]:
        """By route."""
        return [
            Completed(
                lease_id=job.target.lease.lease_id,
                epoch=job.target.lease.epoch,
                attempt_id=job.attempt_id,
                contributor=index,
                num_contributors=len(job.routes),
                first_token=first_token,
                logprobs=logprobs,
                num_tokens=num_tokens,
                num_layers=self._settings.layout.num_layers,
                nbytes=nbytes,
                num_cached_tokens=job.sequence.num_cached_tokens,
                compute_to_notice_s=0.0,
                is_cut=is_cut,
            )
            for index, nbytes in enumerate(job.pushed_nbytes)
        ]

    def _fail(self, job: _Job, reason: FailureReason, detail: str, now: float) -> list[Action]:
        """Tell the router first, then stop."""
        return [*self._end_with(job, reason, detail), *self._stop(job, now)]

    def _end_with(self, job: _Job, reason: FailureReason, detail: str) -> list[Action]:
        link_id, job.link_id = job.link_id, None
        return [] if link_id is None else [SendFrame(link_id, Failed(job.attempt_id, reason, detail))]

    def _stop(self, job: _Job, now: float) -> list[Action]:
        """Issue nothing more; the flush that ends the job carries Quiesced. A job that is flushing has issued all, and just ends."""
        if job.stopped_at is None:
            job.stopped_at = now
        if job.stage is not _Stage.COMPUTING:
            return []
        job.stage = _Stage.STOPPED
        self._scheduler.remove(job.attempt_id)
        # Of records that go out with a step, or have gone: Quiesced is the last word all the same.
        while job.tokens:
            del self._flushes[job.tokens.pop()]
        lease = job.target.lease
        return [StopPush(lease), *self._flush(job, _quiesced(job, lease.lease_id, lease.epoch), None)]

    def _flush(self, job: _Job, notices: Iterable[NoticeUnion], ended_at: float | None) -> list[FlushThenNotify]:
        """The last that is done for the job: each route is flushed and its notice follows."""
        flushes: list[FlushThenNotify] = []
        for route, notice in zip(job.routes, notices, strict=True):
            token = self._token_for(job)
            job.tokens.append(token)
            flushes.append(FlushThenNotify(job.holder, token, notice, ended_at, route.src_rank, route.dst_rank))
        return flushes

    def _token_for(self, waiting: _Job | tuple[PeerId, LeaseId]) -> int:
        token = self._next_token
        self._next_token += 1
        self._flushes[token] = waiting
        return token


def _quiesced(job: _Job, lease_id: LeaseId, epoch: Epoch) -> list[Quiesced]:
    """By route."""
    return [Quiesced(lease_id, epoch, index) for index in range(len(job.routes))]
