"""Slots of the staging ring: bounded, shared out fairly, never lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.errors import ConfigError
from pd_serve.ids import PeerId
from pd_serve.kv.layout import KVDtype, KVLayout
from tests.machine_fakes import peer_id
from workers.prefill.staging import StagingRing, check_staging

SLOT = 100
ONE, TWO, THREE = (peer_id(name) for name in ("one", "two", "three"))


def take_all(ring: StagingRing, peer: PeerId) -> list[int]:
    slots = []
    while (slot := ring.take(peer)) is not None:
        slots.append(slot)
    return slots


def test_slots_lie_side_by_side_from_the_offset_on_and_none_beyond_the_end() -> None:
    ring = StagingRing(1000, 4 * SLOT + 99, SLOT)
    slots = [slot for peer in "abcd" if (slot := ring.take(peer_id(peer))) is not None]
    assert sorted(slots) == [1000, 1100, 1200, 1300]


def test_a_peer_that_gives_nothing_back_keeps_half_and_the_next_half_of_the_rest() -> None:
    ring = StagingRing(0, 16 * SLOT, SLOT)
    assert [len(take_all(ring, peer)) for peer in (ONE, TWO, THREE)] == [8, 4, 2]
    assert ring.num_free == 2, "there is one left for whoever is next"


def test_what_is_given_back_can_be_taken_again_by_the_same_peer() -> None:
    ring = StagingRing(0, 8 * SLOT, SLOT)
    for _ in range(3):
        slots = take_all(ring, ONE)
        assert len(slots) == 4
        ring.give_back(ONE, slots)
    assert ring.num_free == 8


def test_one_slot_is_enough() -> None:
    ring = StagingRing(0, SLOT, SLOT)
    assert ring.take(ONE) == 0
    assert ring.take(ONE) is ring.take(TWO) is None
    ring.give_back(ONE, [0])
    assert ring.take(TWO) == 0


def test_giving_back_more_than_is_held_is_a_mistake_in_the_caller() -> None:
    ring = StagingRing(0, 4 * SLOT, SLOT)
    slot = ring.take(ONE)
    assert slot is not None
    with pytest.raises(AssertionError):
        ring.give_back(TWO, [slot])


@settings(max_examples=50, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_no_slot_is_lost_or_held_twice(rng: random.Random) -> None:
    num_slots = rng.randint(1, 20)
    ring = StagingRing(0, num_slots * SLOT, SLOT)
    held: dict[PeerId, list[int]] = {peer: [] for peer in (ONE, TWO, THREE)}
    for _ in range(200):
        peer = rng.choice(list(held))
        if rng.random() < 0.6:
            slot = ring.take(peer)
            if slot is not None:
                held[peer].append(slot)
        else:
            kept = rng.randint(0, len(held[peer]))
            ring.give_back(peer, held[peer][kept:])
            del held[peer][kept:]
        taken = [slot for slots in held.values() for slot in slots]
        assert len(set(taken)) == len(taken) == num_slots - ring.num_free
        assert all(len(slots) <= (num_slots + 1) // 2 for slots in held.values())


@pytest.mark.parametrize(("nbytes", "slot", "problem"), [(1 << 20, 4096, "up to 8192"), (8192, 16384, "not one slot"), (1 << 20, 8192, "")])
def test_staging_that_holds_no_token_is_refused_at_start(nbytes: int, slot: int, problem: str) -> None:
    layout = KVLayout(2, 8, 128, 16, 4, KVDtype.BFLOAT16)
    if not problem:
        check_staging(layout, nbytes, slot)
        return
    with pytest.raises(ConfigError, match=problem):
        check_staging(layout, nbytes, slot)
