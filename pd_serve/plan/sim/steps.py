"""The steps of one worker's engine: prompts and decoding sequences, one step after the other, as pd_serve/engine/scheduler.py makes them.

    nothing to do    IDLE
    prompts wait     STEPPING   one step at a time: a token for each sequence first, then chunks of prompts within the budget
    only sequences   DECODING   many steps at once (decode_batch.py), until one ends, the pool is full, or something new cuts them short

What comes in during a step is looked at when it ends. When the pool has no room for another token of each, the youngest sequence is
preempted. With measured noise in the model each step is drawn by itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol, cast

from pd_serve.plan.sim.caches import KVPool
from pd_serve.plan.sim.decode_batch import DecodeBatch
from pd_serve.plan.sim.events import VirtualLoop
from pd_serve.plan.sim.prompts import Attempt, Prompts
from pd_serve.plan.worker_model import WorkerModel, drawn


class StepOwner(Protocol):
    """The worker."""

    def can_begin(self, attempt: Attempt) -> bool:
        """There is room for the prompt, which from now on it holds. True for one that has begun."""
        ...

    def computing(self, attempt: Attempt, num_tokens: int, begin: float, end: float) -> None:
        """A step computes so many more tokens of its prompt."""
        ...

    def computed(self, attempt: Attempt) -> None: ...

    def prompts_done(self, attempts: Sequence[Attempt]) -> None: ...

    def ended(self, attempts: Sequence[Attempt]) -> None:
        """They have all their tokens, and have left the batch."""
        ...

    def preempted(self, attempt: Attempt) -> None:
        """It has left the batch for want of room, which it has to give back."""
        ...

    def has_left(self, attempt: Attempt) -> None:
        """It was removed, and no step computes for it any more."""
        ...


class _Mode(Enum):
    IDLE = auto()
    STEPPING = auto()
    DECODING = auto()


class Steps:
    def __init__(self, loop: VirtualLoop, model: WorkerModel, budget: int, pool: KVPool, rng: random.Random, owner: StepOwner) -> None:
        """`budget`: tokens of a step that computes prompts."""
        self.prompts: Prompts = Prompts()
        self.busy_s = 0.0
        """In steps that have ended."""
        self.num_prompt_tokens = 0
        """Computed, of prompts."""
        self._loop = loop
        self._model = model
        self._budget = budget
        self._pool = pool
        self._rng = rng
        self._owner = owner
        self._joining: deque[Attempt] = deque()
        self._leaving: dict[int, Attempt] = {}
        self._mode = _Mode.IDLE
        self._version = 0
        """Of what is about to happen: an event of another one is void."""
        self._num_steps = 0
        """Under way, while decoding."""
        self._drawn_s = 0.0
        """What the one step under way takes, if it is drawn."""
        self._ended_at = float("-inf")
        """The last step."""

    def decode_with(self, late_s: float, add_gaps: Callable[[float, int], None]) -> None:
        """Once, before all else: as DecodeBatch."""
        self.batch = DecodeBatch(self._model.decode, self._model.step_gap_s, late_s, add_gaps)

    # ---- what comes in

    def add_prompt(self, attempt: Attempt) -> None:
        self.prompts.add(attempt)
        self.wake()

    def join(self, attempt: Attempt) -> None:
        """To decode from the next step on: prompt and first token are there."""
        self._joining.append(attempt)
        self.wake()

    def remove(self, attempt: Attempt) -> bool:
        """True: it is out. False: has_left() tells, when the step under way has ended."""
        if attempt.order in self.batch:
            self._leaving[attempt.order] = attempt
            self.wake()
            return False
        if attempt in self._joining:
            self._joining.remove(attempt)
        else:
            self.prompts.pop(attempt.attempt_id)
        return True

    def wake(self) -> None:
        """Something is here, or there is room."""
        if self._mode is _Mode.IDLE:
            self._begin()
        elif self._mode is _Mode.DECODING:
            num_steps = self.batch.boundary(self._loop.now())
            if num_steps < self._num_steps:
                self._decode_until(num_steps)

    def stop(self) -> list[Attempt]:
        """The worker is gone: what it decoded, its tokens counted up to now."""
        if self._mode is _Mode.DECODING and (num_done := self.steps_under_way()):
            self.batch.advance(num_done, self._drawn_s)
        self._version += 1
        self._mode = _Mode.STEPPING
        decoding = [cast(Attempt, sequence) for sequence in self.batch.sequences()]
        for attempt in decoding:
            self._take_out(attempt)
        return [*decoding, *self._joining]

    # ---- what is known

    def busy_by_now(self) -> float:
        """Seconds in steps."""
        if self._mode is not _Mode.DECODING:
            return self.busy_s
        return self.busy_s + min(self._loop.now() - self.batch.started_at, self.batch.span_s(self._num_steps))

    def steps_by_now(self) -> int:
        """Decode steps since the beginning."""
        return self.batch.num_steps + self.steps_under_way()

    def steps_under_way(self) -> int:
        """Of those of a batch under way, how many have ended."""
        if self._mode is not _Mode.DECODING or self._drawn_s:
            return 0
        return min(self.batch.num_done(self._loop.now()), self._num_steps)

    @property
    def is_idle(self) -> bool:
        return self._mode is _Mode.IDLE and not self._joining and not len(self.prompts)

    @property
    def num_running(self) -> int:
        return len(self.batch) + self.prompts.num_begun

    @property
    def num_waiting(self) -> int:
        return len(self._joining) + len(self.prompts) - self.prompts.num_begun

    # ---- inside

    def _begin(self) -> None:
        """Between two steps."""
        now = self._loop.now()
        self._mode = _Mode.STEPPING
        self._change_batch()
        self._make_room()
        if len(self.prompts) and self._mixed_step(now):
            return
        if len(self.batch):
            self._decode(now)
        else:
            self._mode = _Mode.IDLE

    def _change_batch(self) -> None:
        while self._leaving:
            _, attempt = self._leaving.popitem()
            if attempt.order in self.batch:
                self._take_out(attempt)
                self._owner.has_left(attempt)
        while self._joining and len(self.batch) < self._model.max_running:
            attempt = self._joining.popleft()
            self.batch.join(attempt, attempt.num_tokens + 1)

    def _make_room(self) -> None:
        """For a token of each."""
        while len(self.batch) > self._pool.num_allocatable:
            attempt = cast(Attempt, self.batch.youngest())
            self._take_out(attempt)
            self._owner.preempted(attempt)

    def _take_out(self, attempt: Attempt) -> None:
        num_generated = self.batch.num_steps - attempt.joined_at_step
        self.batch.leave(attempt, attempt.num_tokens + 1 + num_generated)

    def _lag_s(self, now: float) -> float:
        return max(0.0, self._ended_at + self._model.step_gap_s - now)

    def _mixed_step(self, now: float) -> bool:
        """False: no prompt has room."""
        model, batch = self._model, self.batch
        budget = self._budget - len(batch)
        chosen = self.prompts.share_out(budget, model.max_running - len(batch), lambda attempt: min(attempt.num_uncomputed_tokens, budget))
        step = [(attempt, count) for attempt, count in chosen if self._owner.can_begin(attempt)]
        if not step:
            return False
        chunks = [(count, attempt.num_computed_tokens) for attempt, count in step]
        lasts = model.mixed_s(chunks, len(batch), batch.context) * self._noise(model.prefill_noise)
        begin = now + self._lag_s(now)
        end = begin + lasts
        for attempt, count in step:
            self._owner.computing(attempt, count, begin, end)
        batch.started_at = now
        self._version += 1
        self._loop.at(end, self._stepped, self._version, step, lasts)
        return True

    def _stepped(self, version: int, step: list[tuple[Attempt, int]], lasts: float) -> None:
        if version != self._version:
            return
        now, batch = self._loop.now(), self.batch
        self._ended_at = now
        self.busy_s += lasts
        if len(batch):
            self._advance(1, now - batch.started_at)
        done: list[Attempt] = []
        for attempt, count in step:
            if attempt.is_live:
                self.prompts.advance(attempt, count)
                self.num_prompt_tokens += count
                self._owner.computed(attempt)
                if not attempt.num_uncomputed_tokens:
                    self.prompts.pop(attempt.attempt_id)
                    done.append(attempt)
        if done:
            self._owner.prompts_done(done)
        self._end_sequences()
        self._begin()

    def _decode(self, now: float) -> None:
        batch, model = self.batch, self._model
        batch.started_at = now + self._lag_s(now) - model.step_gap_s
        self._mode = _Mode.DECODING
        self._drawn_s = 0.0
        if model.decode_noise:
            lasts = (batch.step_s() - model.step_gap_s) * self._noise(model.decode_noise)
            self._drawn_s = model.step_gap_s + lasts
            self._decode_until(1)
        else:
            self._decode_until(min(batch.steps_to_end(), self._pool.num_allocatable // len(batch)))

    def _decode_until(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._version += 1
        self._loop.at(self.batch.started_at + (self._drawn_s or self.batch.span_s(num_steps)), self._decoded, self._version)

    def _decoded(self, version: int) -> None:
        if version != self._version:
            return
        now, batch, num_steps = self._loop.now(), self.batch, self._num_steps
        self.busy_s += now - batch.started_at - num_steps * self._model.step_gap_s
        self._ended_at = now
        self._mode = _Mode.STEPPING
        self._advance(num_steps, self._drawn_s)
        self._end_sequences()
        self._begin()

    def _advance(self, num_steps: int, step_s: float) -> None:
        self._pool.take(len(self.batch) * num_steps)
        self.batch.advance(num_steps, step_s)

    def _end_sequences(self) -> None:
        ended = [cast(Attempt, sequence) for sequence in self.batch.pop_ended()]
        if ended:
            for attempt in ended:
                self._leaving.pop(attempt.order, None)
                self._take_out(attempt)
            self._owner.ended(ended)

    def _noise(self, quantiles: tuple[float, ...]) -> float:
        return drawn(quantiles, self._rng.random()) if quantiles else 1.0
