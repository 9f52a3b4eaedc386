"""One simulated worker of any role: what it answers to the router's frames, as workers/ do it, with Steps for an engine.

    Open with a writer -> memory for the prompt is held: Reserved -> its KV arrives -> first token -> the batch -> ... last token
    Open without       -> the same, but the prompt is computed here
    Prefill            -> the prompt is computed in steps, each sent while it runs -> all has arrived: PrefillDone, and decode goes on

Frames are those of protocol/link.py. What a frame of the router leads to happens when the router is done with what it does now.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_serve.ids import AttemptId, Epoch, LeaseId, PeerId
from pd_serve.plan.sim.caches import KVPool
from pd_serve.plan.sim.events import VirtualLoop
from pd_serve.plan.sim.network import LinkSpec, Nic, transfer
from pd_serve.plan.sim.prompts import Attempt, Leg
from pd_serve.plan.sim.requests import ask_in
from pd_serve.plan.sim.steps import Steps
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.link import (
    BlockCounts,
    Cancel,
    Failed,
    FailureReason,
    FinishReason,
    Lease,
    Load,
    Open,
    Prefill,
    PrefillDone,
    RefusalReason,
    Refused,
    Reserved,
    Role,
    RouterFrame,
    Step,
    Target,
    TokenOutput,
    WorkerFrame,
)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What all workers of a cluster have in common."""

    link: LinkSpec
    block_size: int
    """Tokens of a block of KV: what is held is rounded up to these."""
    cache_block_tokens: int
    """Of the blocks of the requests' keys."""
    headroom_tokens: int
    tells_cache: bool
    """The router reads what is cached where."""
    late_s: float
    """Gaps between tokens above it are late; 0: none is."""


class Surroundings:
    """What a worker knows of the rest of the simulation."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, add_gaps: Callable[[float, int], None]) -> None:
        self.loop = loop
        self.rng = rng
        self.add_gaps = add_gaps
        self.hear: Callable[[PeerId, WorkerFrame], None] = lambda peer, frame: None
        """The router."""
        self.changed: Callable[[Node], None] = lambda node: None
        """It has something to report."""
        self.nodes: dict[PeerId, Node] = {}
        """Those that live."""


class Node:
    def __init__(self, peer: PeerId, role: Role, model: WorkerModel, budget: int, settings: NodeSettings, around: Surroundings) -> None:
        """`budget`: tokens of a step that computes prompts."""
        self.peer = peer
        self.role = role
        self.model = model
        self.pool = KVPool(model.num_kv_tokens, settings.cache_block_tokens, settings.tells_cache)
        self.nic = Nic()
        self.is_draining = False
        self.is_dead = False
        self._settings = settings
        self._around = around
        self._loop = around.loop
        self.steps = Steps(around.loop, model, budget, self.pool, around.rng, self)
        self.steps.decode_with(settings.late_s, around.add_gaps)
        self._lease = Lease(LeaseId(0), Epoch(0), peer)
        self._attempts: dict[AttemptId, Attempt] = {}
        self._granted: dict[AttemptId, Attempt] = {}
        """Waiting for KV."""
        self._num_orders = 0
        self._num_reports = 0
        self._num_promised = 0
        """Tokens of output that admission keeps free for what is here."""

    # ---- frames of the router

    def receive(self, frame: RouterFrame) -> None:
        if self.is_dead:
            return
        if isinstance(frame, Open):
            self._open(frame)
        elif isinstance(frame, Prefill):
            self._prefill(frame)
        elif isinstance(frame, Cancel):
            self._cancel(frame.attempt_id)
        self._around.changed(self)

    def _open(self, frame: Open) -> None:
        ask, pool = ask_in(frame.token_ids), self.pool
        if self.is_draining:
            self._tell(Refused(frame.attempt_id, RefusalReason.DRAINING, "the worker is being drained"))
            return
        num_tokens, num_left = ask.num_tokens, ask.num_left
        num_blocks = pool.match(ask.keys, num_tokens)
        num_cached = num_blocks * self._settings.cache_block_tokens
        num_own = self._rounded(num_tokens - num_cached)
        num_promised = min(max(self._settings.headroom_tokens, frame.num_output_tokens), num_left)
        growth = len(self.steps.batch) * self.steps.steps_under_way()
        num_to_come = pool.num_to_take(ask.keys, num_blocks, num_own) + num_promised
        if num_to_come + self._num_promised + growth > pool.num_allocatable:
            self._tell(Refused(frame.attempt_id, RefusalReason.NO_CAPACITY, "not enough free blocks"))
            return
        holding = pool.hold(ask.keys, num_blocks, num_own)
        leg = Leg.LOCAL if frame.writer is None else Leg.DECODE
        attempt = Attempt(frame.attempt_id, ask, leg, self._next_order(), holding, num_cached)
        attempt.num_promised = num_promised
        self._num_promised += num_promised
        self._attempts[frame.attempt_id] = attempt
        if leg is Leg.LOCAL:
            self._tell(Reserved(frame.attempt_id, None, num_cached))
            self.steps.add_prompt(attempt)
        else:
            self._granted[frame.attempt_id] = attempt
            self._tell(Reserved(frame.attempt_id, Target(self._lease, (), num_cached), num_cached))

    def _prefill(self, frame: Prefill) -> None:
        ask, pool = ask_in(frame.token_ids), self.pool
        if self.is_draining:
            self._tell(Failed(frame.attempt_id, FailureReason.DRAINING, "the worker is being drained"))
            return
        num_blocks = pool.match(ask.keys, ask.num_tokens)
        num_cached = num_blocks * self._settings.cache_block_tokens
        holding = pool.hold(ask.keys, num_blocks, 0)
        attempt = Attempt(frame.attempt_id, ask, Leg.PREFILL, self._next_order(), holding, num_cached)
        attempt.target = frame.target.lease.holder
        attempt.num_there = frame.target.num_cached_tokens
        self._attempts[frame.attempt_id] = attempt
        now = self._loop.now()
        self._send(attempt, num_cached, now, now)
        self.steps.add_prompt(attempt)

    def _cancel(self, attempt_id: AttemptId) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.is_live:
            attempt.is_live = False
            self._settle(attempt)
            if self._granted.pop(attempt_id, None) is not None or self.steps.remove(attempt):
                self.has_left(attempt)

    # ---- the engine's words

    def can_begin(self, attempt: Attempt) -> bool:
        if attempt.leg is Leg.LOCAL or attempt.holding.num_own:
            return True
        num_own = self._rounded(attempt.num_tokens - attempt.num_cached_tokens)
        if num_own > self.pool.num_allocatable:
            return False
        self.pool.grow(attempt.holding, num_own)
        return True

    def computing(self, attempt: Attempt, num_tokens: int, begin: float, end: float) -> None:
        if attempt.leg is Leg.PREFILL:
            self._send(attempt, attempt.num_computed_tokens + num_tokens, begin, end)

    def computed(self, attempt: Attempt) -> None:
        self.pool.publish(attempt.holding, attempt.ask.keys, attempt.num_computed_tokens)

    def prompts_done(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            if attempt.leg is Leg.PREFILL:
                self._loop.at(attempt.arrived_at, self._sent, attempt)
            else:
                self._speak(attempt, attempt.num_cached_tokens)
        self._around.changed(self)

    def ended(self, attempts: Sequence[Attempt]) -> None:
        outputs: list[TokenOutput] = []
        for attempt in attempts:
            if attempt.is_live:
                outputs.append(TokenOutput(attempt.attempt_id, 0, FinishReason.LENGTH))
            self.has_left(attempt)
        if outputs:
            self._tell(Step(tuple(outputs)))
        self._around.changed(self)

    def preempted(self, attempt: Attempt) -> None:
        self.has_left(attempt)
        if attempt.is_live:
            self._tell(Failed(attempt.attempt_id, FailureReason.PREEMPTED, "no blocks left"))
        self._around.changed(self)

    def has_left(self, attempt: Attempt) -> None:
        """What it holds is given back, and what it has generated stays with its request."""
        del self._attempts[attempt.attempt_id]
        self._num_promised -= attempt.num_promised
        self.pool.release(attempt.holding, max(0, attempt.num_generated() - 1) if attempt.joined_at_step >= 0 else 0)
        self._settle(attempt)
        self.steps.wake()

    # ---- KV on its way

    def _send(self, attempt: Attempt, up_to: int, begin: float, end: float) -> None:
        """The prompt's KV up to so many tokens, as far as the target lacks it."""
        attempt.arrived_at = max(attempt.arrived_at, end)
        num_tokens = up_to - attempt.num_there
        assert attempt.target is not None
        target = self._around.nodes.get(attempt.target)
        if num_tokens <= 0 or target is None:
            return
        nbytes = num_tokens * self.model.kv_bytes_per_token
        is_first = not attempt.has_sent
        attempt.has_sent = True
        attempt.num_there = up_to
        arrived = transfer(self._settings.link, self.nic, target.nic, nbytes, (begin, end), self.model.num_layers, is_first)
        attempt.arrived_at = max(attempt.arrived_at, arrived)

    def _sent(self, attempt: Attempt) -> None:
        """All of it is at the target."""
        if not attempt.is_live or self.is_dead:
            return
        num_computed = attempt.num_tokens - attempt.num_cached_tokens
        target = attempt.target
        self.has_left(attempt)
        self._tell(PrefillDone(attempt.attempt_id, num_computed, attempt.num_cached_tokens))
        node = None if target is None else self._around.nodes.get(target)
        if node is not None:
            self._loop.at(self._loop.now() + self.model.handover_s, node.filled, attempt.attempt_id, attempt.num_cached_tokens)
        self._around.changed(self)

    def filled(self, attempt_id: AttemptId, num_cached: int) -> None:
        """All KV of an attempt is here. `num_cached`: tokens of it that nobody had to compute."""
        attempt = self._granted.pop(attempt_id, None)
        if attempt is None or self.is_dead:
            return
        self.pool.publish(attempt.holding, attempt.ask.keys, attempt.num_tokens)
        self._speak(attempt, num_cached)
        self._around.changed(self)

    # ---- tokens

    def _speak(self, attempt: Attempt, num_cached: int) -> None:
        """The first token of the attempt."""
        ask, now = attempt.ask, self._loop.now()
        attempt.steps_by_now = self.steps.steps_by_now
        ask.progress = attempt
        if ask.first_at < 0:
            ask.first_at, ask.num_cached = now, num_cached
        else:
            gap = now - ask.last_token_at
            self._around.add_gaps(gap, 1)
            ask.num_late_gaps += 0 < self._settings.late_s < gap
        attempt.last_token_at = ask.last_token_at = now
        attempt.num_left = ask.num_left
        if attempt.num_left:
            self._tell(Step((TokenOutput(attempt.attempt_id, 0, None, None, num_cached),)))
            if attempt.is_live:
                self.steps.join(attempt)
        else:
            self.has_left(attempt)
            self._tell(Step((TokenOutput(attempt.attempt_id, 0, FinishReason.LENGTH, None, num_cached),)))

    def _settle(self, attempt: Attempt) -> None:
        ask = attempt.ask
        if ask.progress is attempt:
            ask.settle()
            ask.num_late_gaps += attempt.num_late_gaps
            if attempt.joined_at_step >= 0:
                ask.last_token_at = self._loop.now()

    # ---- changes

    def load(self) -> Load:
        """As it reports it now."""
        steps, pool, size = self.steps, self.pool, self._settings.block_size
        self._num_reports += 1
        growth = len(steps.batch) * steps.steps_under_way()
        num_held = pool.num_held + growth
        num_idle = min(pool.num_idle, max(0, pool.capacity - num_held))
        num_free = max(0, pool.capacity - num_held - num_idle)
        return Load(
            self._num_reports,
            self.role,
            self.is_draining,
            BlockCounts(pool.capacity // size, num_free // size, num_idle // size, 0, 0),
            len(self._granted),
            steps.num_running,
            steps.num_waiting,
            steps.prompts.num_tokens,
            steps.batch.context + growth,
        )

    def give_back(self, legs: frozenset[Leg]) -> None:
        """The time of a drain, or of an old role, is over: what is left of these is the router's to move."""
        for attempt in list(self._attempts.values()):
            if attempt.leg in legs and attempt.is_live:
                self._cancel(attempt.attempt_id)
                self._tell(Failed(attempt.attempt_id, FailureReason.DRAINING, "the worker is being drained"))
        self._around.changed(self)

    def die(self) -> None:
        """Nothing of it is left, and nothing of it happens any more. The router has not heard yet."""
        self.is_dead = True
        self.steps.stop()
        for attempt in list(self._attempts.values()):
            attempt.is_live = False
            self._settle(attempt)
        self._attempts.clear()
        self._granted.clear()

    @property
    def is_idle(self) -> bool:
        """Nothing is held for any attempt."""
        return not self._attempts and self.steps.is_idle

    @property
    def legs(self) -> frozenset[Leg]:
        """That it has anything of."""
        return frozenset(attempt.leg for attempt in self._attempts.values())

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._settings.block_size) * self._settings.block_size

    def _next_order(self) -> int:
        self._num_orders += 1
        return self._num_orders

    def _tell(self, frame: WorkerFrame) -> None:
        self._around.hear(self.peer, frame)
