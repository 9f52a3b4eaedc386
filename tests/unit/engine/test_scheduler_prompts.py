"""How the prompts of a step are chosen: short ones do not wait behind whole long ones, and no long one waits for ever."""

from __future__ import annotations

import pytest

from pd_serve.engine import scheduler_prompts
from pd_serve.engine.scheduler import Scheduler
from pd_serve.engine.scheduler_prompts import PromptQueue
from pd_serve.engine.sequence import SequenceKind
from pd_serve.ids import AttemptId
from pd_serve.kv.block_pool import BlockPool
from tests.unit.engine.test_scheduler import BLOCK, make_decode, make_scheduler, make_sequence, step

BUDGET = 16
SHARE = BUDGET // 4


def add_prompt(scheduler: Scheduler, attempt: int, num_tokens: int) -> None:
    scheduler.add(make_sequence(attempt, num_tokens, SequenceKind.PREFILL_ONLY, max_tokens=1))


def run_step(scheduler: Scheduler, step_id: int) -> dict[int, tuple[int, bool]]:
    """Of each prompt in the next step: tokens computed, and whether that was the last of it."""
    batch, updates = step(scheduler, step_id)
    assert batch is not None
    done = {update.attempt_id for update in updates if update.prompt_done}
    return {entry.attempt_id: (len(entry.token_ids), entry.attempt_id in done) for entry in batch.entries}


def test_short_prompt_is_in_the_next_step_and_that_step_is_no_longer_than_it_has_to_be() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    add_prompt(scheduler, 1, 64)
    assert run_step(scheduler, 0) == {1: (BUDGET, False)}
    add_prompt(scheduler, 2, 60)
    add_prompt(scheduler, 3, 3)
    assert run_step(scheduler, 1) == {1: (SHARE, False), 3: (3, True)}
    assert run_step(scheduler, 2) == {1: (BUDGET, False)}


def test_prompts_that_cannot_end_with_the_step_are_computed_in_order_of_arrival() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    for attempt, num_tokens in ((1, 40), (2, 30), (3, 20)):
        add_prompt(scheduler, attempt, num_tokens)
    steps = [run_step(scheduler, number) for number in range(6)]
    assert steps == [
        {1: (16, False)},
        {1: (16, False)},
        {1: (8, True), 2: (8, False)},
        {2: (16, False)},
        {2: (6, True), 3: (10, False)},
        {3: (10, True)},
    ]


def test_of_those_that_can_end_the_shortest_pass_first() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    for attempt, num_tokens in ((1, 40), (2, 10), (3, 7), (4, 5)):
        add_prompt(scheduler, attempt, num_tokens)
    assert run_step(scheduler, 0) == {1: (SHARE, False), 4: (5, True), 3: (7, True)}
    assert run_step(scheduler, 1) == {1: (SHARE, False), 2: (10, True)}


def test_where_nobody_needs_to_pass_a_step_is_filled() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    for attempt, num_tokens in ((1, 5), (2, 3), (3, 40)):
        add_prompt(scheduler, attempt, num_tokens)
    assert run_step(scheduler, 0) == {1: (5, True), 2: (3, True), 3: (8, False)}


def test_prompts_of_one_length_are_computed_one_after_the_other_in_order_of_arrival() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    for attempt in (5, 3, 4):
        add_prompt(scheduler, attempt, 24)
    steps = [run_step(scheduler, number) for number in range(5)]
    assert steps == [
        {5: (16, False)},
        {5: (8, True), 3: (8, False)},
        {3: (16, True)},
        {4: (16, False)},
        {4: (8, True)},
    ]


def test_what_is_cached_does_not_count() -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool)
    add_prompt(scheduler, 1, 40)
    mostly_cached = make_sequence(2, 42, SequenceKind.PREFILL_ONLY, max_tokens=1)
    mostly_cached.block_table = list(pool.allocate(10))
    mostly_cached.num_computed_tokens = mostly_cached.num_cached_tokens = 40
    scheduler.add(mostly_cached)
    assert run_step(scheduler, 0) == {1: (SHARE, False), 2: (2, True)}


def test_decoding_streams_come_first_and_prompts_share_what_they_leave() -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool)
    for attempt in range(1, 9):
        scheduler.add(make_decode(pool, attempt, 5, max_tokens=20))
    add_prompt(scheduler, 11, 40)
    add_prompt(scheduler, 12, 3)
    found = run_step(scheduler, 0)
    assert found == {**dict.fromkeys(range(1, 9), (1, False)), 11: (BLOCK, False), 12: (3, True)}


def test_share_is_a_block_at_least() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK), max_batch_tokens=BLOCK + 1)
    add_prompt(scheduler, 1, 40)
    add_prompt(scheduler, 2, 1)
    assert run_step(scheduler, 0) == {1: (BLOCK, False), 2: (1, True)}


def steps_of_a_long_prompt(num_tokens: int, block_size: int = 1) -> int:
    """How many a prompt takes while more short ones come than there is room for."""
    scheduler = make_scheduler(BlockPool(16000, block_size))
    add_prompt(scheduler, 0, num_tokens)
    for number in range(num_tokens):
        for short in range(BUDGET):
            add_prompt(scheduler, 1 + number * BUDGET + short, 2)
        if run_step(scheduler, number).get(0, (0, False))[1]:
            return number + 1
    return num_tokens


def test_long_prompt_gets_on_however_many_short_ones_come() -> None:
    assert steps_of_a_long_prompt(64) == 64 // SHARE


def test_planted_least_left_first_without_a_share_keeps_a_long_prompt_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_prompts, "OLDEST_SHARE", 1_000_000)
    assert steps_of_a_long_prompt(64) > 3 * 64 // SHARE, "the share would not have been missed"


def test_a_step_looks_at_as_many_prompts_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    pop_least = PromptQueue._pop_least

    def counting(queue: PromptQueue) -> tuple[int, int, object] | None:
        looked[-1] += 1
        return pop_least(queue)

    monkeypatch.setattr(PromptQueue, "_pop_least", counting)
    for num_waiting in (100, 10_000):
        scheduler = make_scheduler(BlockPool(100, BLOCK))
        for attempt in range(num_waiting):
            add_prompt(scheduler, attempt, BLOCK)
        looked.append(0)
        for number in range(20):
            run_step(scheduler, number)
    assert looked[0] == looked[1] <= 20 * (BUDGET // BLOCK + 1)


def test_prompts_that_leave_unserved_do_not_stay_in_the_heap() -> None:
    queue = PromptQueue()
    for attempt in range(1000):
        sequence = make_sequence(attempt, 1 + attempt % 7)
        sequence.order = attempt
        queue.add(sequence)
    for attempt in range(999):
        queue.pop(AttemptId(attempt))
    assert len(queue) == 1
    assert len(queue._by_work) < 40
    assert (queue.num_tokens, queue.num_begun) == (1 + 999 % 7, 0)
