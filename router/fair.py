"""The choices of one priority class that wait, shared out between tenants by tokens. Used by queue.py only.

Each tenant has a counter of the tokens it was given, over its weight; the one with the least is next, and of its choices the oldest. A
choice is charged its prompt and the output it is expected to have when it starts, and what it really took when it ends. A tenant that had
nothing waiting begins at the counter of the last start: being idle saves up nothing. So with `T` tenants that want as much as they can get,
each gets its weight's share, and one that asks for less than that waits for at most one start of each other, however many those have
waiting.

Source: Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (virtual token counters, with predicted lengths); the lift
of a tenant that returns is that of P. Goyal et al., "Start-time Fair Queueing", 1996.
Every operation takes a logarithm of what waits, counted over many; ahead_of() and oldest() look at each tenant.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from router.generation import Generation
from router.tenants import Tenant

FEW = 16
"""Leftovers that are not worth clearing away."""


@dataclass(slots=True, eq=False)
class _Flow:
    """One tenant in this class."""

    weight: float
    served: float = 0.0
    """Tokens it was given, over its weight."""
    num_queued: int = 0
    cost: float = 0.0
    """Tokens that what waits is expected to take, output included."""
    num_tokens: int = 0
    """Of the prompts that wait."""
    num_to_compute: int = 0
    """Of these, those that have to be computed."""


class Ahead(NamedTuple):
    """Of a choice that came now."""

    num_choices: float
    num_tokens: float
    """Of their prompts."""
    num_to_compute: float
    """Of these, those that have to be computed."""


class _Line:
    """Some of the choices of a class, by flow."""

    def __init__(self) -> None:
        self._waiting: dict[_Flow, list[tuple[int, Generation]]] = {}
        self._order: list[tuple[float, int, _Flow]] = []
        """Flows by counter, where there are several; an entry is good while the counter is still that."""
        self._ties = itertools.count()

    def push(self, flow: _Flow, generation: Generation) -> None:
        heap = self._waiting.get(flow)
        if heap is None:
            self._waiting[flow] = [(generation.key, generation)]
            self.moved(flow)
        else:
            heapq.heappush(heap, (generation.key, generation))

    def moved(self, flow: _Flow) -> None:
        """Its counter has changed, or it has something again."""
        num_flows = len(self._waiting)
        if num_flows < 2 or flow not in self._waiting:
            return
        heapq.heappush(self._order, (flow.served, next(self._ties), flow))
        if num_flows == 2 or len(self._order) > 2 * num_flows + FEW:
            self._order = [(flow.served, next(self._ties), flow) for flow in self._waiting]
            heapq.heapify(self._order)

    def head(self) -> Generation | None:
        if len(self._waiting) < 2:
            for only in self._waiting.values():
                return first_waiting(only)
        while self._order:
            served, _, flow = self._order[0]
            heap = self._waiting.get(flow)
            if heap is not None and served == flow.served:
                if (generation := first_waiting(heap)) is not None:
                    return generation
                del self._waiting[flow]
                if len(self._waiting) < 2:
                    return self.head()
            heapq.heappop(self._order)
        return None

    def oldest(self) -> Generation | None:
        heads = [head for heap in self._waiting.values() if (head := first_waiting(heap)) is not None]
        return min(heads, key=lambda head: head.key, default=None)

    def left(self, flow: _Flow) -> None:
        """One of its choices has left, from wherever it was."""
        heap = self._waiting.get(flow)
        if heap is None:
            return
        if not flow.num_queued:
            del self._waiting[flow]
        else:
            clear_leftovers(heap, flow.num_queued)


class FairClass:
    """push -> head ... -> left, and started for what begins; finished() when it ends, however it ends."""

    def __init__(self, short_tokens: int) -> None:
        self._short_tokens = short_tokens
        self._flows: dict[Tenant, _Flow] = {}
        self._all, self._short = _Line(), _Line()
        self._last_start = 0.0
        """Counter of the flow that last started something, at that start."""
        self.num_queued = 0
        self.num_tokens = self.num_to_compute = 0
        """Of the prompts that wait."""

    def push(self, generation: Generation) -> None:
        """`generation.cost` is set."""
        flow = self._flow(generation)
        if not flow.num_queued:
            flow.served = max(flow.served, self._last_start)
        flow.num_queued += 1
        flow.cost += generation.cost
        flow.num_tokens += generation.num_tokens
        flow.num_to_compute += generation.num_to_compute
        self.num_queued += 1
        self.num_tokens += generation.num_tokens
        self.num_to_compute += generation.num_to_compute
        self._all.push(flow, generation)
        if generation.num_tokens <= self._short_tokens:
            self._short.push(flow, generation)

    def head(self, is_short: bool = False) -> Generation | None:
        return (self._short if is_short else self._all).head()

    def oldest(self) -> Generation | None:
        return self._all.oldest()

    def left(self, generation: Generation) -> None:
        """`is_queued` is False by now. Once for each push."""
        flow = self._flow(generation)
        flow.num_queued -= 1
        flow.cost = flow.cost - generation.cost if flow.num_queued else 0.0
        flow.num_tokens -= generation.num_tokens
        flow.num_to_compute -= generation.num_to_compute
        self.num_queued -= 1
        self.num_tokens -= generation.num_tokens
        self.num_to_compute -= generation.num_to_compute
        self._all.left(flow)
        self._short.left(flow)

    def charge(self, generation: Generation, num_tokens: float) -> None:
        """All that it has cost its tenant so far is `num_tokens`; 0: nothing, as if it had never started."""
        flow = self._flow(generation)
        charge = num_tokens / flow.weight
        if charge > generation.paid == 0:
            self._last_start = max(self._last_start, flow.served)
        flow.served += charge - generation.paid
        generation.paid = charge
        self._all.moved(flow)
        self._short.moved(flow)

    def ahead_of(self, tenant: Tenant) -> Ahead:
        """What would start before a choice of this tenant that came now, if nothing else came."""
        own = self._flows.get(tenant)
        served, num, tokens, to_compute = self._last_start, 0.0, 0.0, 0.0
        if own is not None:
            served = max(served if not own.num_queued else own.served, own.served) + own.cost / own.weight
            num, tokens, to_compute = float(own.num_queued), float(own.num_tokens), float(own.num_to_compute)
        for flow in self._flows.values():
            if flow is own or not flow.num_queued:
                continue
            cost_of_one = flow.cost / flow.num_queued
            room = max(0.0, served - flow.served) * flow.weight + cost_of_one
            share = min(1.0, room / flow.cost)
            num += share * flow.num_queued
            tokens += share * flow.num_tokens
            to_compute += share * flow.num_to_compute
        return Ahead(num, tokens, to_compute)

    def _flow(self, generation: Generation) -> _Flow:
        tenant = generation.ticket.tenant
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow(tenant.weight)
        return flow


def first_waiting(heap: list[tuple[int, Generation]]) -> Generation | None:
    """The oldest of a heap that is still in the queue; it stays. Those before it are let go of."""
    while heap:
        generation = heap[0][1]
        if generation.is_queued:
            return generation
        heapq.heappop(heap)
    return None


def clear_leftovers(heap: list[tuple[int, Generation]], num_queued: int) -> None:
    """When they are the majority: taken over many, an operation costs no more than a logarithm of the length."""
    while heap and not heap[0][1].is_queued:
        heapq.heappop(heap)
    if len(heap) > 2 * num_queued + FEW:
        heap[:] = [entry for entry in heap if entry[1].is_queued]
        heapq.heapify(heap)
