"""The sequences that one worker decodes, in closed form: between two changes of the batch, steps are counted and not simulated.

    step i of a batch of B sequences with C tokens of context at its start takes a + b (C + B i) + c B seconds

so k of them take k d + b B k (k - 1) / 2 with d the first one's. What joins waits for the end of the step under way, what ends leaves with
the step of its last token. Every gap between tokens goes to the outcome, those of many steps together where they are alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Protocol

_ALIKE = 0.005
"""Steps whose times differ by no more than this share go to the outcome as their mean."""


class Decoding(Protocol):
    """A sequence, as the batch knows it."""

    order: int
    num_left: int
    """Tokens yet to come when it joined."""
    joined_at_step: int
    num_late_before: int
    """What DecodeBatch.num_late was after its first step here."""
    last_token_at: float
    """When it joined: of its last token."""
    num_late_gaps: int


class DecodeBatch:
    """join -> begin -> (boundary) -> advance ... -> leave. Times are the simulation's seconds."""

    def __init__(
        self, coefficients: tuple[float, float, float], gap_s: float, late_s: float, add_gaps: Callable[[float, int], None]
    ) -> None:
        """`gap_s`: between two steps. `late_s`: gaps between tokens above it are late; 0: none is. `add_gaps`: (seconds, tokens)."""
        a, self._b, self._c = coefficients
        self._a = a + gap_s
        self._late_s = late_s or math.inf
        self._add_gaps = add_gaps
        self._running: dict[int, Decoding] = {}
        self._ends: list[tuple[int, int]] = []
        """(step with which it ends, order)."""
        self._fresh: list[Decoding] = []
        """Joined since the last step."""
        self.num_steps = 0
        """Since the beginning, before the steps under way."""
        self.num_late = 0
        """Steps that were late."""
        self.context = 0
        self.started_at = 0.0
        """Of the steps under way: when the first began."""

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, order: int) -> bool:
        return order in self._running

    def join(self, sequence: Decoding, num_tokens: int) -> None:
        """With so many tokens of context, the token that it is about to compute included. Precondition: no step is under way."""
        sequence.joined_at_step = self.num_steps
        self._running[sequence.order] = sequence
        self._fresh.append(sequence)
        self.context += num_tokens
        heapq.heappush(self._ends, (self.num_steps + sequence.num_left, sequence.order))

    def leave(self, sequence: Decoding, num_tokens: int) -> None:
        """With so many tokens by now. Precondition: no step is under way."""
        del self._running[sequence.order]
        self.context -= num_tokens
        if sequence in self._fresh:
            self._fresh.remove(sequence)
        else:
            sequence.num_late_gaps += self.num_late - sequence.num_late_before

    def steps_to_end(self) -> int:
        """Until the first of them ends. Precondition: it is not empty."""
        ends = self._ends
        while ends[0][1] not in self._running:
            heapq.heappop(ends)
        return ends[0][0] - self.num_steps

    def sequences(self) -> list[Decoding]:
        """The one that joined first first."""
        return list(self._running.values())

    def pop_ended(self) -> list[Decoding]:
        """Those that have all their tokens."""
        ended: list[Decoding] = []
        ends = self._ends
        while ends and ends[0][0] <= self.num_steps:
            order = heapq.heappop(ends)[1]
            if order in self._running:
                ended.append(self._running[order])
        return ended

    def youngest(self) -> Decoding:
        return self._running[max(self._running)]

    # ---- time

    def step_s(self) -> float:
        """The next step."""
        return self._a + self._b * self.context + self._c * len(self._running)

    def span_s(self, num_steps: int) -> float:
        """So many of the steps under way."""
        batch = len(self._running)
        return num_steps * self.step_s() + self._b * batch * num_steps * (num_steps - 1) / 2

    def num_done(self, now: float) -> int:
        """Of the steps under way, those that have ended by now."""
        elapsed = now - self.started_at
        first = self.step_s()
        if elapsed < first:
            return 0
        half = self._b * len(self._running) / 2
        if half > 1e-12 * first:
            linear = first - half
            guess = (math.sqrt(linear * linear + 4 * half * elapsed) - linear) / (2 * half)
        else:
            guess = elapsed / first
        num = max(0, int(guess))
        while num and self.span_s(num) > elapsed:
            num -= 1
        while self.span_s(num + 1) <= elapsed:
            num += 1
        return num

    def boundary(self, now: float) -> int:
        """Steps under way until the end of the one that runs now; at least one."""
        num = self.num_done(now)
        return num if num and self.span_s(num) >= now - self.started_at else num + 1

    # ---- steps

    def advance(self, num_steps: int, step_s: float = 0.0) -> None:
        """So many steps are over. `step_s`: what one took, where that is not what the coefficients say."""
        first = step_s or self.step_s()
        batch = len(self._running)
        growth = 0.0 if step_s else self._b * batch
        begin = 0
        if self._fresh:
            self._first_steps(first, batch)
            begin = 1
        if num_steps > begin:
            self._note(first + growth * begin, growth, num_steps - begin, batch)
        self.num_steps += num_steps
        self.context += batch * num_steps

    def _first_steps(self, first: float, batch: int) -> None:
        """Some have waited for the boundary before their first step."""
        ended_at = self.started_at + first
        self.num_late += first > self._late_s
        for sequence in self._fresh:
            gap = ended_at - sequence.last_token_at
            self._add_gaps(gap, 1)
            sequence.num_late_gaps += gap > self._late_s
            sequence.num_late_before = self.num_late
        if batch > len(self._fresh):
            self._add_gaps(first, batch - len(self._fresh))
        self._fresh.clear()

    def _note(self, first: float, growth: float, num_steps: int, batch: int) -> None:
        """Steps of first, first + growth, ...: in as few pieces as are alike."""
        last = first + growth * (num_steps - 1)
        if last > self._late_s:
            num_late = num_steps if first > self._late_s or not growth else num_steps - 1 - int((self._late_s - first) / growth)
            self.num_late += max(0, min(num_steps, num_late))
        while num_steps:
            alike = num_steps if growth * (num_steps - 1) <= _ALIKE * first else max(1, int(_ALIKE * first / growth))
            self._add_gaps(first + growth * (alike - 1) / 2, alike * batch)
            first += growth * alike
            num_steps -= alike
