"""How many sequences will still run in a while. Pure; nothing is done per token. Used by overload.py.

Time is counted in decode steps, which pass faster or slower with the number that run: `steps` is their sum since the start. A sequence that
begins is expected to end when its answer has the median length of such answers; one that is still there then, at the next of the quantiles
(quantiles.LEVELS), and at last at its max_tokens. So what is asked is how many expected ends lie within so many steps.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

from router.generation import Generation
from router.quantiles import LengthsByTenant
from router.step_time import StepTime


@dataclass(slots=True)
class _Running:
    generation: Generation
    began_at: float
    area: float
    """Of DecodeForecast when it began."""
    end: float
    """In steps."""
    num_before: int
    """Tokens it had when it began."""


class DecodeForecast:
    """began() and ended() of each choice; `now` never decreases. Workers are taken to be alike."""

    def __init__(self) -> None:
        self.lengths = LengthsByTenant()
        self.step_time = StepTime()
        self.num_workers = 1
        """That decode."""
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []
        """(step, key), ascending."""
        self._steps = 0.0
        self._area = 0.0
        """Integral of the sequences per worker over time."""
        self._at = 0.0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def batch(self) -> float:
        """Sequences per worker."""
        return len(self._running) / self.num_workers

    def began(self, generation: Generation, now: float) -> None:
        """Its first token has come. Precondition: it is not in."""
        self._advance(now)
        num = generation.lifecycle.num_output_tokens
        end = self._steps + self._expected_left(generation)
        self._running[generation.key] = _Running(generation, now, self._area, end, num)
        insort(self._ends, (end, generation.key))

    def ended(self, generation: Generation, now: float) -> None:
        """Idempotent, and nothing for one that never began. Its pace and, if it came to its end by itself, its length are learned."""
        running = self._running.get(generation.key)
        if running is None:
            return
        self._advance(now)
        num = generation.lifecycle.num_output_tokens
        if generation.finish is not None:
            self.lengths.add(generation.ticket.tenant.name, num)
        num_steps, seconds = num - running.num_before, generation.last_token_at - running.began_at
        if num_steps > 1 and seconds > 0 and now > running.began_at:
            self.step_time.add((self._area - running.area) / (now - running.began_at), seconds / num_steps)
        del self._running[generation.key]
        self._drop(running.end, generation.key)

    def num_after(self, seconds: float, now: float) -> int:
        """Of those that run now, how many still will."""
        self._advance(now)
        self._look_again()
        return len(self._ends) - bisect_right(self._ends, (self._steps + self._steps_in(seconds), 2**63))

    def seconds_until_ended(self, num: int, now: float) -> float:
        """Until so many have ended, if there are as many; 0 where steps were not measured."""
        self._advance(now)
        self._look_again()
        if num <= 0 or not self._ends:
            return 0.0
        return max(0.0, self._ends[min(num, len(self._ends)) - 1][0] - self._steps) * self.step_time(self.batch)

    def is_empty(self) -> bool:
        return not (self._running or self._ends)

    def _advance(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._at = max(now, self._at)
        if self._running:
            self._steps += self._steps_in(passed)
            self._area += passed * self.batch

    def _steps_in(self, seconds: float) -> float:
        step_s = self.step_time(self.batch)
        return seconds / step_s if step_s > 0 else 0.0

    def _look_again(self) -> None:
        """Those that should have ended get a later end."""
        while self._ends and self._ends[0][0] <= self._steps:
            _, key = self._ends.pop(0)
            running = self._running[key]
            running.end = self._steps + self._expected_left(running.generation)
            insort(self._ends, (running.end, key))

    def _expected_left(self, generation: Generation) -> float:
        """Tokens, at least one."""
        num, most = generation.lifecycle.num_output_tokens, generation.max_tokens
        levels = self.lengths.of(generation.ticket.tenant.name).levels()
        expected = next((level for level in levels if level > num), float(most))
        return max(1.0, min(expected, most) - num)

    def _drop(self, end: float, key: int) -> None:
        index = bisect_right(self._ends, (end, key)) - 1
        assert self._ends[index] == (end, key)
        del self._ends[index]
