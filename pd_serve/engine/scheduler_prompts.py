"""Prompts that wait for compute, and how a step's room is shared out among them. Pure; used by the scheduler and, in
simulation, by the planner.

    in order of arrival   |---- oldest ----|---- next ----| ...              unless a prompt that could end would have to wait for others:
    short ones pass       |- share of the oldest -|- all that end -|         least left first; nothing else makes this step longer

A first token comes when the step that ends its prompt does, so short prompts do not wait behind whole long ones: least work left first
gives the shortest mean time. Alone it would let newcomers keep a long prompt waiting for ever. Here the oldest gets at least a quarter of
the room whoever passes: it is at worst four times as slow as alone, and whoever waits becomes the oldest. Prompts that cannot end with the
step are computed in order of arrival, one after the other: so no more of them hold blocks half computed than have to.

Sources: least work left first, L. Schrage, "A proof of the optimality of the shortest remaining processing time discipline" (1968); chunks
of several prompts in steps of bounded length, A. Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve"
(2024).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from pd_serve.ids import AttemptId

OLDEST_SHARE = 4
"""The oldest prompt gets at least one in so many of the tokens of a step."""
_FEW = 16
"""Entries of the heap that stand for nothing any more and are not worth clearing away."""


class Prompt(Protocol):
    """What a Sequence is to this queue."""

    attempt_id: AttemptId
    order: int
    """Arrival: larger is younger."""
    num_computed_tokens: int
    num_cached_tokens: int
    """Of these, how many were not computed for it."""

    @property
    def num_uncomputed_tokens(self) -> int: ...


P = TypeVar("P", bound=Prompt)


class PromptQueue(Generic[P]):
    """By arrival, and by how little is left of each. Taken over many, an operation costs no more than a logarithm of the length."""

    def __init__(self, least_share: int = 1) -> None:
        """`least_share`: tokens; a block of KV: of a prompt that is given up, what is less was computed in vain."""
        self._least_share = least_share
        self._by_arrival: OrderedDict[AttemptId, P] = OrderedDict()
        self._by_work: list[tuple[int, int, P]] = []
        """(tokens left, order, sequence); one that is not so any more is passed over."""
        self.num_tokens = 0
        """Tokens left of all."""
        self.num_begun = 0
        """Prompts of which some has been computed."""

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[P]:
        """By arrival."""
        return iter(self._by_arrival.values())

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._by_arrival

    def get(self, attempt_id: AttemptId) -> P | None:
        return self._by_arrival.get(attempt_id)

    def add(self, sequence: P) -> None:
        """Behind all others. Precondition: younger than they are, and something is left of it."""
        self._by_arrival[sequence.attempt_id] = sequence
        self.num_tokens += sequence.num_uncomputed_tokens
        self.num_begun += _has_begun(sequence)
        self._push(sequence)

    def pop(self, attempt_id: AttemptId) -> P | None:
        sequence = self._by_arrival.pop(attempt_id, None)
        if sequence is not None:
            self.num_tokens -= sequence.num_uncomputed_tokens
            self.num_begun -= _has_begun(sequence)
            if len(self._by_work) > 2 * len(self._by_arrival) + _FEW:
                self._by_work = [entry for entry in self._by_work if self._is_current(entry)]
                heapq.heapify(self._by_work)
        return sequence

    def advance(self, sequence: P, num_tokens: int) -> None:
        """So many tokens more of a prompt that is in here have been computed."""
        self.num_begun -= _has_begun(sequence)
        sequence.num_computed_tokens += num_tokens
        self.num_begun += _has_begun(sequence)
        self.num_tokens -= num_tokens
        if sequence.num_uncomputed_tokens:
            self._push(sequence)

    def share_out(self, room: int, max_prompts: int, chunk_of: Callable[[P], int]) -> list[tuple[P, int]]:
        """(prompt, tokens) of a step with room for so many tokens of so many prompts; the oldest first.

        `chunk_of`: most tokens of a prompt that one step may compute; at least one.
        """
        if room <= 0 or max_prompts <= 0 or not self._by_arrival:
            return []
        in_order = self._in_order(room, max_prompts, chunk_of)
        oldest, most = in_order[0]
        share = min(most, max(self._least_share, -(-room // OLDEST_SHARE)))
        short = self._that_end(room - share, max_prompts - 1, chunk_of, oldest)
        served = dict.fromkeys(sequence.attempt_id for sequence, count in in_order if count == sequence.num_uncomputed_tokens)
        if all(sequence.attempt_id in served for sequence, _ in short):
            return in_order
        return [(oldest, share), *short]

    def _in_order(self, room: int, max_prompts: int, chunk_of: Callable[[P], int]) -> list[tuple[P, int]]:
        chosen: list[tuple[P, int]] = []
        for sequence in self:
            if room <= 0 or len(chosen) == max_prompts:
                break
            count = min(chunk_of(sequence), room)
            chosen.append((sequence, count))
            room -= count
        return chosen

    def _that_end(self, room: int, max_prompts: int, chunk_of: Callable[[P], int], oldest: P) -> list[tuple[P, int]]:
        """Prompts other than the oldest of which nothing is left after the step; least left first."""
        chosen: list[tuple[P, int]] = []
        looked_at: list[tuple[int, int, P]] = []
        while len(chosen) < max_prompts and (entry := self._pop_least()) is not None:
            looked_at.append(entry)
            num_left, _, sequence = entry
            if num_left > room or num_left > chunk_of(sequence):
                break
            if sequence is not oldest:
                chosen.append((sequence, num_left))
                room -= num_left
        for entry in looked_at:
            heapq.heappush(self._by_work, entry)
        return chosen

    def _push(self, sequence: P) -> None:
        heapq.heappush(self._by_work, (sequence.num_uncomputed_tokens, sequence.order, sequence))

    def _pop_least(self) -> tuple[int, int, P] | None:
        while self._by_work:
            entry = heapq.heappop(self._by_work)
            if self._is_current(entry):
                return entry
        return None

    def _is_current(self, entry: tuple[int, int, P]) -> bool:
        num_left, _, sequence = entry
        return self._by_arrival.get(sequence.attempt_id) is sequence and sequence.num_uncomputed_tokens == num_left


def _has_begun(sequence: Prompt) -> bool:
    return sequence.num_computed_tokens > sequence.num_cached_tokens
