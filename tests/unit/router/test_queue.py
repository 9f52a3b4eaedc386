"""The queue of choices: order, leaving, and what it holds on to."""

from __future__ import annotations

import random

import pytest

from pd_serve.ids import AttemptId
from router.generation import Generation
from router.lifecycle import Lifecycle, LifecycleSettings
from router.occupancy import OwnOccupancy
from router.queue import ChoiceQueue
from tests.fakes import sampling


def choice(key: int, num_prompt: int = 2) -> Generation:
    lifecycle = Lifecycle(LifecycleSettings(1.0, 1.0, 1), (1, 2), sampling(), lambda: AttemptId(1))
    return Generation(key, num_prompt, lifecycle, 4, lambda: None, True, False)


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
    assert (len(queue), occupancy.num_queued, queue._heap) == (0, 0, [])


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
    assert len(queue._heap) < 64
    assert len(queue._short) < 64
