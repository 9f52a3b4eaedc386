"""The queue of choices: order, leaving, and what it holds on to."""

from __future__ import annotations

import random

from pd_serve.ids import AttemptId
from router.generation import Generation
from router.lifecycle import Lifecycle, LifecycleSettings
from router.occupancy import OwnOccupancy
from router.queue import ChoiceQueue
from tests.fakes import sampling


def choice(key: int) -> Generation:
    lifecycle = Lifecycle(LifecycleSettings(1.0, 1.0, 1), (1, 2), sampling(), lambda: AttemptId(1))
    return Generation(key, 2, lifecycle, 4, lambda: None, True, False)


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


def test_those_that_left_are_let_go_of() -> None:
    queue = ChoiceQueue(OwnOccupancy())
    queue.push(choice(0))
    for key in range(1, 5000):
        queue.push(generation := choice(key))
        queue.leave(generation)
    assert len(queue._heap) < 64
