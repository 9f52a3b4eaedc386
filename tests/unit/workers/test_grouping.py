from __future__ import annotations

import pytest

from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.protocol.link import Lease
from tests.transport_nodes import ops
from workers.events import PushPlan
from workers.prefill.grouping import push_points

NUM_LAYERS = 30


def plan(layer_nbytes: int) -> PushPlan:
    lease = Lease(LeaseId(1), Epoch(1), PeerId(WorkerId("decode"), Incarnation(1)))
    return PushPlan(AttemptId(1), lease, ops((0, 0, layer_nbytes)), 1 << 20, 1 << 20, NUM_LAYERS, 0)


def test_nothing_is_pushed_where_there_is_nothing_to_push() -> None:
    assert push_points((), 1024) == frozenset()


def test_every_layer_is_pushed_by_itself_where_each_is_large_enough() -> None:
    assert push_points((plan(1024),), 1024) == frozenset(range(NUM_LAYERS))
    assert push_points((plan(1),), 0) == frozenset(range(NUM_LAYERS))


def test_layers_of_a_short_prompt_go_out_together() -> None:
    assert push_points((plan(100),), 1000) == {9, 19, 29}
    assert push_points((plan(1),), 1000) == {29}


def test_what_counts_is_what_the_step_writes_for_all_its_prompts() -> None:
    assert push_points((plan(300), plan(700)), 1000) == frozenset(range(NUM_LAYERS))


@pytest.mark.parametrize("min_nbytes", range(1, 4000, 97))
def test_the_last_layer_is_always_pushed_and_no_push_is_smaller_than_asked_for(min_nbytes: int) -> None:
    points = sorted(push_points((plan(100),), min_nbytes))
    assert points[-1] == NUM_LAYERS - 1
    sizes = [100 * (point - before) for before, point in zip([-1, *points], points, strict=False)]
    assert len(points) == 1 or min(sizes) > min_nbytes - 100
