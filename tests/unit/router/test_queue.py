"""The queue of choices: order, leaving, and what it holds on to."""

from __future__ import annotations

import random

import pytest

from pd_serve.ids import AttemptId
from router.generation import Generation
from router.lifecycle import Lifecycle, LifecycleSettings
from router.moves import MoveReason
from router.occupancy import OwnOccupancy
from router.queue import AGED_TURN, ChoiceQueue, QueueRules
from router.tenants import NO_TICKET, Tenant, Ticket
from tests.fakes import sampling
from tests.unit.router.test_growth import calls_of


def choice(key: int, num_prompt: int = 2, ticket: Ticket = NO_TICKET, submitted_at: float = 0.0) -> Generation:
    lifecycle = Lifecycle(LifecycleSettings(1.0, 1.0, 1), (1, 2), sampling(), lambda: AttemptId(1))
    return Generation(key, num_prompt, lifecycle, 4, lambda: None, True, False, ticket=ticket, submitted_at=submitted_at)


def start(queue: ChoiceQueue) -> Generation:
    """The next one, as the dispatcher starts it."""
    generation = queue.head()
    assert generation is not None
    queue.leave(generation)
    queue.started(generation)
    return generation


def test_first_come_first_served_and_a_moved_one_is_back_in_its_place() -> None:
    queue = ChoiceQueue(OwnOccupancy())
    first, second, third = (choice(key) for key in (1, 2, 3))
    for generation in (second, third, first):
        queue.push(generation)
    assert queue.head() is first
    queue.leave(first)
    assert queue.head() is second
    queue.push(first)
    assert queue.head() is first


def test_one_that_left_from_the_middle_is_never_the_head() -> None:
    queue, occupancy = ChoiceQueue(own := OwnOccupancy()), own
    waiting = [choice(key) for key in range(200)]
    for generation in waiting:
        queue.push(generation)
    leaving = random.Random(1).sample(waiting, 150)
    for generation in leaving:
        queue.leave(generation)
        queue.leave(generation)
    assert len(queue) == occupancy.num_queued == 50
    served = []
    while (head := queue.head()) is not None:
        served.append(head.key)
        queue.leave(head)
    assert served == sorted(generation.key for generation in waiting if generation not in leaving)
    assert (len(queue), occupancy.num_queued, queue._classes[0]._all._waiting) == (0, 0, {})


def test_oldest_short_prompt_is_known_besides_the_oldest() -> None:
    queue = ChoiceQueue(OwnOccupancy(), short_tokens=2)
    long, first, second = choice(1, num_prompt=3), choice(2), choice(3)
    for generation in (second, long, first):
        queue.push(generation)
    assert (queue.head(), queue.short_head()) == (long, first)
    queue.leave(first)
    assert (queue.head(), queue.short_head()) == (long, second)
    queue.leave(second)
    assert queue.short_head() is None
    assert len(queue) == 1


@pytest.mark.parametrize("short_tokens", [0, 2])
def test_those_that_left_are_let_go_of(short_tokens: int) -> None:
    queue = ChoiceQueue(OwnOccupancy(), short_tokens)
    queue.push(choice(0))
    for key in range(1, 5000):
        queue.push(generation := choice(key))
        queue.leave(generation)
    (of_class,) = queue._classes
    (flow,) = of_class._flows.values()
    for line in (of_class._all, of_class._short):
        assert len(line._waiting.get(flow, [])) < 64
        assert len(line._order) < 64


def test_classes_are_strict_until_one_has_aged_and_then_it_has_its_turns() -> None:
    now = 0.0
    queue = ChoiceQueue(OwnOccupancy(), rules=QueueRules(3, ageing_s=5.0), now=lambda: now)
    high, low = Ticket(rank=0), Ticket(rank=2)
    for key in range(10):
        queue.push(choice(key, ticket=low))
    for key in range(10, 60):
        queue.push(choice(key, ticket=high))
    assert {start(queue).ticket.rank for _ in range(10)} == {0}
    now = 5.0
    ranks = [start(queue).ticket.rank for _ in range(3 * AGED_TURN)]
    assert ranks == ([0] * (AGED_TURN - 1) + [2]) * 3
    assert queue.ahead_of(high).num_choices == 19
    assert queue.ahead_of(low).num_choices == 26


def test_each_class_has_its_own_part_of_the_count() -> None:
    occupancy = OwnOccupancy()
    queue = ChoiceQueue(occupancy, rules=QueueRules(2))
    for key, rank in enumerate((0, 1, 1)):
        queue.push(choice(key, ticket=Ticket(rank=rank)))
    assert [occupancy.num_queued_of(rank) for rank in (0, 1)] == [1, 2]
    assert occupancy.num_queued == 3


def test_what_had_begun_comes_before_all_classes_and_what_was_refused_goes_to_its_place() -> None:
    queue = ChoiceQueue(OwnOccupancy(), rules=QueueRules(2))
    urgent, first, second = choice(9, ticket=Ticket(rank=0)), choice(1, ticket=Ticket(rank=1)), choice(2, ticket=Ticket(rank=1))
    for generation in (first, second):
        queue.push(generation)
    assert [start(queue), start(queue)] == [first, second]
    queue.push(urgent)
    first.reason, second.reason = MoveReason.NO_CAPACITY, MoveReason.PEER_LOST
    queue.push(first)
    queue.push(second)
    assert [start(queue), start(queue), start(queue)] == [second, urgent, first]


def test_tenants_share_by_weight_in_tokens_and_idleness_saves_up_nothing() -> None:
    queue = ChoiceQueue(OwnOccupancy())
    large, small = Ticket(Tenant("large", weight=3.0)), Ticket(Tenant("small"))
    for key in range(400):
        queue.push(choice(key, num_prompt=100 if key % 2 else 50, ticket=large if key % 2 else small))
    tokens = {"large": 0, "small": 0}
    for _ in range(100):
        generation = start(queue)
        tokens[generation.ticket.tenant.name] += generation.num_tokens
    assert tokens["large"] == pytest.approx(3 * tokens["small"], rel=0.1)
    late = Ticket(Tenant("late"))
    for key in range(1000, 1100):
        queue.push(choice(key, num_prompt=100, ticket=late))
    began = [start(queue).ticket.tenant.name for _ in range(50)]
    assert began.count("late") < 15


def test_a_tenant_is_charged_what_it_took_and_not_what_was_expected() -> None:
    queue = ChoiceQueue(OwnOccupancy(), expected_tokens=lambda generation: 100.0)
    brief, usual = Ticket(Tenant("brief")), Ticket(Tenant("usual"))
    for key in range(300):
        queue.push(choice(key, num_prompt=10, ticket=brief if key % 2 else usual))
    began: list[str] = []
    for _ in range(120):
        generation = start(queue)
        began.append(generation.ticket.tenant.name)
        if generation.ticket is brief:
            queue.finished(generation)
    assert began.count("brief") > 5 * began.count("usual")


def test_a_moved_one_that_ends_while_it_waits_has_cost_what_it_took() -> None:
    queue = ChoiceQueue(OwnOccupancy(), expected_tokens=lambda generation: 100.0)
    tenant = Ticket(Tenant("one"))
    queue.push(moved := choice(1, num_prompt=10, ticket=tenant))
    start(queue)
    assert moved.paid == 110.0
    moved.lifecycle._token_ids += [5] * 30
    moved.reason = MoveReason.PEER_LOST
    queue.push(moved)
    queue.leave(moved)
    queue.finished(moved)
    assert moved.paid == 40.0
    queue.push(never := choice(2, num_prompt=10, ticket=tenant))
    start(queue)
    never.reason = MoveReason.NO_CAPACITY
    queue.push(never)
    queue.leave(never)
    queue.finished(never)
    assert never.paid == 0.0, "nothing was generated"


def test_one_that_had_begun_keeps_its_place_when_it_is_refused_for_room() -> None:
    queue = ChoiceQueue(OwnOccupancy())
    queue.push(moved := choice(2))
    start(queue)
    queue.push(choice(1))
    for reason in (MoveReason.PEER_LOST, MoveReason.NO_CAPACITY):
        moved.reason = reason
        queue.push(moved)
        assert start(queue) is moved


def test_ahead_of_a_request_is_what_starts_before_it() -> None:
    """Against the queue itself: among three tenants with different loads, a newcomer of each."""
    rng = random.Random(5)
    for _ in range(30):
        queue = ChoiceQueue(OwnOccupancy())
        tickets = [Ticket(Tenant(name, weight=weight)) for name, weight in (("a", 1.0), ("b", 2.0), ("c", 1.0))]
        for key in range(120):
            queue.push(choice(key, num_prompt=rng.choice((10, 20, 40)), ticket=rng.choices(tickets, (8, 3, 1))[0]))
        for _ in range(rng.randrange(40)):
            start(queue)
        ticket = rng.choice(tickets)
        ahead = queue.ahead_of(ticket)
        queue.push(newcomer := choice(1000, num_prompt=20, ticket=ticket))
        before = []
        while (generation := start(queue)) is not newcomer:
            before.append(generation.num_tokens)
        assert abs(ahead.num_choices - len(before)) <= 4 + 0.1 * len(before)
        assert abs(ahead.num_tokens - sum(before)) <= 100 + 0.1 * sum(before)


def test_an_operation_takes_as_many_calls_among_ten_thousand() -> None:
    def calls(number: int) -> float:
        queue = ChoiceQueue(OwnOccupancy(), 2, QueueRules(3))
        tickets = [Ticket(Tenant(str(index)), rank=index % 3) for index in range(30)]
        waiting = [choice(key, ticket=tickets[key % 30]) for key in range(number)]
        for generation in waiting:
            queue.push(generation)
        leaving = waiting[number // 2 : number // 2 + 200]

        def work() -> None:
            for generation in leaving:
                queue.leave(generation)
            for _ in range(200):
                started = start(queue)
                queue.finished(started)
                queue.push(choice(100_000 + started.key, ticket=started.ticket))
                queue.ahead_of(tickets[0])

        return calls_of(work) / 400

    assert calls(10_000) < 1.2 * calls(1_000) + 1
