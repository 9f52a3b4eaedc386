"""The scheduler alone: a fake engine samples from a fixed function of (attempt, position)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.engine.batch import Batch, Phase, SampledToken, StepResult
from pd_serve.engine.scheduler import Scheduler, SchedulerSettings, SequenceUpdate
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.ids import AttemptId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.link import FinishReason
from pd_serve.protocol.sampling import SamplingParams

EOS = 2
BLOCK = 4


def make_scheduler(pool: BlockPool, **changes: int) -> Scheduler:
    values: dict[str, int] = {"max_batch_tokens": 16, "max_running": 64, "prefill_chunk": 0, "max_model_len": 10_000} | changes
    return Scheduler(SchedulerSettings(eos_token_ids=frozenset({EOS}), **values), pool)


def make_sequence(
    attempt: int,
    num_tokens: int,
    kind: SequenceKind = SequenceKind.LOCAL,
    max_tokens: int = 4,
    num_output_tokens: int = 0,
    **sampling: object,
) -> Sequence:
    ids = [100 * attempt + i for i in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return Sequence(AttemptId(attempt), kind, ids, num_tokens - num_output_tokens, params)


def make_decode(pool: BlockPool, attempt: int, prompt_len: int, max_tokens: int = 4) -> Sequence:
    sequence = make_sequence(attempt, prompt_len, SequenceKind.DECODE, max_tokens)
    sequence.block_table = list(pool.allocate(pool.num_blocks_for(prompt_len)))
    sequence.num_computed_tokens = prompt_len
    sequence.append(7, make_scheduler(pool).rules)
    return sequence


def run(batch: Batch, token_id: int = 7) -> StepResult:
    sampled = tuple(SampledToken(e.attempt_id, token_id, None) for e in batch.entries if e.sample is not None)
    return StepResult(batch.step_id, sampled, 0.0, 1.0)


def step(scheduler: Scheduler, step_id: int, token_id: int = 7) -> tuple[Batch | None, tuple[SequenceUpdate, ...]]:
    decision = scheduler.schedule(step_id)
    for sequence in decision.preempted:
        scheduler.release(sequence)
    if decision.batch is None:
        return None, ()
    updates = scheduler.complete(run(decision.batch, token_id))
    for update in updates:
        if update.has_left:
            scheduler.release(update.sequence)
    return decision.batch, updates


def test_prompt_is_chunked_within_the_budget_and_sampled_at_its_end_only() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    scheduler.add(make_sequence(1, 20))
    batch, updates = step(scheduler, 0)
    assert batch is not None
    entry = batch.entries[0]
    assert (entry.start, len(entry.token_ids), entry.sample) == (0, 16, None)
    assert not updates[0].prompt_done
    assert updates[0].token is None
    batch, updates = step(scheduler, 1)
    assert batch is not None
    entry = batch.entries[0]
    assert entry.token_ids == (116, 117, 118, 119)
    assert entry.sample is not None
    assert entry.sample.position == 20
    assert updates[0].prompt_done
    assert updates[0].token is not None
    assert updates[0].token.num_cached_tokens == 0


def test_last_chunk_of_one_token_is_still_a_prefill() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK))
    scheduler.add(make_sequence(1, 17))
    step(scheduler, 0)
    batch, _ = step(scheduler, 1)
    assert batch is not None
    assert [(len(e.token_ids), e.phase) for e in batch.entries] == [(1, Phase.PREFILL)]


@pytest.mark.parametrize("kind", [SequenceKind.LOCAL, SequenceKind.PREFILL_ONLY])
def test_what_a_moved_request_has_generated_is_computed_again_in_the_decode_phase(kind: SequenceKind) -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK), max_batch_tokens=64)
    scheduler.add(make_sequence(1, 60, kind, num_output_tokens=40))
    seen: list[tuple[Phase, int, int, bool]] = []
    for number in range(3):
        batch, updates = step(scheduler, number)
        assert batch is not None
        seen += [(e.phase, e.start, len(e.token_ids), updates[0].prompt_done) for e in batch.entries]
    assert seen == [(Phase.PREFILL, 0, 20, False), (Phase.DECODE, 20, 32, False), (Phase.DECODE, 52, 8, True)]
    assert updates[0].token is not None
    assert updates[0].token.num_cached_tokens == 0
    assert updates[0].has_left is (kind is SequenceKind.PREFILL_ONLY)


def test_decode_tokens_come_before_prompt_chunks_and_use_the_budget_first() -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool, max_batch_tokens=8)
    scheduler.add(make_sequence(1, 30))
    for attempt in (2, 3, 4):
        scheduler.add(make_decode(pool, attempt, 5))
    batch, _ = step(scheduler, 0)
    assert batch is not None
    assert [(e.attempt_id, e.phase, len(e.token_ids)) for e in batch.entries] == [
        (2, Phase.DECODE, 1),
        (3, Phase.DECODE, 1),
        (4, Phase.DECODE, 1),
        (1, Phase.PREFILL, 5),
    ]


def test_prompts_are_chunked_in_order_of_arrival_and_no_longer_than_prefill_chunk() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK), prefill_chunk=6)
    for attempt in (5, 3, 4):
        scheduler.add(make_sequence(attempt, 10))
    batch, _ = step(scheduler, 0)
    assert batch is not None
    assert [(e.attempt_id, len(e.token_ids)) for e in batch.entries] == [(5, 6), (3, 6), (4, 4)]


def test_no_more_than_max_running_sequences_in_one_step() -> None:
    scheduler = make_scheduler(BlockPool(100, BLOCK), max_running=2)
    for attempt in (1, 2, 3):
        scheduler.add(make_sequence(attempt, 2))
    batch, _ = step(scheduler, 0)
    assert batch is not None
    assert [e.attempt_id for e in batch.entries] == [1, 2]


def test_prefill_only_leaves_with_its_first_token_and_keeps_its_blocks_for_the_push() -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_sequence(1, 6, SequenceKind.PREFILL_ONLY, max_tokens=1))
    decision = scheduler.schedule(0)
    assert decision.batch is not None
    assert decision.batch.has_push
    (update,) = scheduler.complete(run(decision.batch))
    assert update.has_left
    assert update.prompt_done
    assert update.finished is None
    assert update.token is not None
    assert update.token.token_id == 7
    assert len(scheduler) == 0
    assert pool.counts().held == 2
    scheduler.release(update.sequence)
    scheduler.release(update.sequence)
    assert pool.counts().held == 0


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("prompt_len", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_local_attempt_gives_exactly_max_tokens(prompt_len: int, max_tokens: int) -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_sequence(1, prompt_len, max_tokens=max_tokens))
    tokens = []
    for step_id in range(5):
        _, updates = step(scheduler, step_id)
        tokens += [u.token for u in updates if u.token is not None]
    assert len(tokens) == max_tokens
    assert [t.finish for t in tokens] == [None] * (max_tokens - 1) + [FinishReason.LENGTH]
    assert len(scheduler) == 0
    assert pool.counts().held == 0
    pool.check()


@pytest.mark.parametrize("how", ["asked for", "first step", "removed"])
def test_decode_publishes_what_it_received(how: str) -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool)
    sequence = make_decode(pool, 1, 9)
    blocks = tuple(sequence.block_table[:2])
    scheduler.add(sequence)
    if how == "asked for":
        scheduler.publish_received()
    elif how == "first step":
        step(scheduler, 0)
    else:
        scheduler.remove(AttemptId(1))
    assert pool.match_prefix(sequence.token_ids) == blocks


def test_moved_attempt_samples_like_an_undisturbed_one() -> None:
    undisturbed = make_sequence(1, 10, max_tokens=8, min_tokens=5, presence_penalty=0.5)
    rules = make_scheduler(BlockPool(1, BLOCK)).rules
    for _ in range(4):
        undisturbed.append(7, rules)
    params = SamplingParams(max_tokens=4, temperature=0.0, min_tokens=5, presence_penalty=0.5)
    moved = Sequence(AttemptId(2), SequenceKind.LOCAL, list(undisturbed.token_ids), 10, params)
    a, b = undisturbed.sample_spec(), moved.sample_spec()
    assert (a.position, a.num_output_tokens, a.prompt_ids, a.output_ids, a.eos_masked) == (
        b.position,
        b.num_output_tokens,
        b.prompt_ids,
        b.output_ids,
        b.eos_masked,
    )
    assert undisturbed.max_total_tokens(rules) == moved.max_total_tokens(rules)


def test_blocks_of_a_sequence_removed_in_flight_return_only_when_the_step_ends() -> None:
    pool = BlockPool(2, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_sequence(1, 8))
    decision = scheduler.schedule(0)
    assert decision.batch is not None
    sequence = scheduler.remove(AttemptId(1))
    assert sequence is not None
    assert scheduler.is_in_flight(AttemptId(1))
    scheduler.release(sequence)
    assert pool.num_allocatable == 0
    assert scheduler.complete(run(decision.batch)) == ()
    assert pool.num_allocatable == 2
    pool.check()


def test_planted_release_to_the_pool_in_flight_is_what_the_deferral_prevents() -> None:
    pool = BlockPool(2, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_sequence(1, 8))
    decision = scheduler.schedule(0)
    assert decision.batch is not None
    sequence = scheduler.remove(AttemptId(1))
    assert sequence is not None
    pool.release(sequence.block_table)
    in_flight = set(decision.batch.entries[0].block_table)
    assert in_flight & set(pool.allocate(2)), "the mistake would have gone unseen"


def test_failed_step_takes_its_sequences_out() -> None:
    pool = BlockPool(10, BLOCK)
    scheduler = make_scheduler(pool, max_running=1)
    scheduler.add(make_sequence(1, 8))
    scheduler.add(make_sequence(2, 8))
    scheduler.schedule(0)
    (failed,) = scheduler.abort_step()
    assert failed.attempt_id == 1
    scheduler.release(failed)
    assert not scheduler.step_in_flight
    assert [s.attempt_id for s in scheduler] == [2]
    assert pool.counts().held == 0


def test_youngest_is_preempted_when_an_older_one_must_grow() -> None:
    pool = BlockPool(4, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_decode(pool, 1, 8, max_tokens=20))
    scheduler.add(make_decode(pool, 2, 8, max_tokens=20))
    decision = scheduler.schedule(0)
    assert decision.batch is None
    assert [s.attempt_id for s in decision.preempted] == [2]
    scheduler.release(decision.preempted[0])
    batch, _ = step(scheduler, 1)
    assert batch is not None
    assert [e.attempt_id for e in batch.entries] == [1]


def test_youngest_skips_the_step_rather_than_preempt_an_older_one() -> None:
    pool = BlockPool(5, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_decode(pool, 1, 7, max_tokens=20))
    scheduler.add(make_decode(pool, 2, 12, max_tokens=20))
    decision = scheduler.schedule(0)
    assert decision.batch is not None
    assert [e.attempt_id for e in decision.batch.entries] == [1]
    assert decision.preempted == ()


def test_prompt_waits_for_blocks_that_others_will_return() -> None:
    pool = BlockPool(4, BLOCK)
    elsewhere = pool.allocate(3)
    scheduler = make_scheduler(pool)
    scheduler.add(make_sequence(1, 8, SequenceKind.PREFILL_ONLY))
    assert step(scheduler, 0) == (None, ())
    assert len(scheduler) == 1
    pool.release(elsewhere)
    batch, _ = step(scheduler, 1)
    assert batch is not None


def test_sequence_that_outgrows_the_whole_pool_goes_elsewhere() -> None:
    pool = BlockPool(2, BLOCK)
    scheduler = make_scheduler(pool)
    scheduler.add(make_decode(pool, 1, 8, max_tokens=20))
    decision = scheduler.schedule(0)
    assert decision.batch is None
    assert [s.attempt_id for s in decision.preempted] == [1]


def test_half_computed_prompts_do_not_deadlock() -> None:
    pool = BlockPool(6, BLOCK)
    scheduler = make_scheduler(pool, max_batch_tokens=16, prefill_chunk=8)
    scheduler.add(make_sequence(1, 20, max_tokens=1))
    scheduler.add(make_sequence(2, 20, max_tokens=1))
    preempted: list[int] = []
    finished: list[int] = []
    for step_id in range(8):
        decision = scheduler.schedule(step_id)
        preempted += [s.attempt_id for s in decision.preempted]
        for sequence in decision.preempted:
            scheduler.release(sequence)
        if decision.batch is not None:
            for update in scheduler.complete(run(decision.batch)):
                if update.has_left:
                    finished.append(update.attempt_id)
                    scheduler.release(update.sequence)
    assert finished[0] == 1
    assert sorted(preempted + finished) == [1, 2]
    assert pool.counts().held == 0


def test_stop_rules_of_a_mixed_batch() -> None:
    pool = BlockPool(100, BLOCK)
    scheduler = make_scheduler(pool, max_batch_tokens=64)
    scheduler.add(make_sequence(1, 4))
    scheduler.add(make_sequence(2, 4, ignore_eos=True))
    scheduler.add(make_sequence(3, 4, min_tokens=1))
    batch, updates = step(scheduler, 0, token_id=EOS)
    assert batch is not None
    assert [e.sample is not None and e.sample.eos_masked for e in batch.entries] == [False, False, True]
    assert [u.finished for u in updates] == [FinishReason.STOP, None, None]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.randoms(use_true_random=False),
    num_blocks=st.integers(8, 24),
    budget=st.integers(1, 24),
    prefix_cache=st.booleans(),
)
def test_everything_ends_and_every_block_returns(seed: object, num_blocks: int, budget: int, prefix_cache: bool) -> None:
    """Random arrivals, cancels in flight, the preempted moved back in: every attempt ends, and blocks are conserved throughout."""
    import random

    assert isinstance(seed, random.Random)
    pool = BlockPool(num_blocks, BLOCK, prefix_cache)
    scheduler = make_scheduler(pool, max_batch_tokens=budget)
    waiting = [make_sequence(i, seed.randint(1, 20), max_tokens=seed.randint(1, 10)) for i in range(1, 13)]
    ended: set[int] = set()
    flushing: list[Sequence] = []
    for step_id in range(3000):
        if waiting and seed.random() < 0.5:
            sequence = waiting.pop()
            if seed.random() < 0.3:
                sequence.kind = SequenceKind.PREFILL_ONLY
            blocks = pool.match_prefix(sequence.token_ids)
            sequence.block_table = list(blocks)
            sequence.num_computed_tokens = sequence.num_cached_tokens = len(blocks) * BLOCK
            scheduler.add(sequence)
        decision = scheduler.schedule(step_id)
        for sequence in decision.preempted:
            scheduler.release(sequence)
            again = Sequence(sequence.attempt_id, sequence.kind, sequence.token_ids, sequence.num_prompt_tokens, sequence.sampling)
            waiting.append(again)
        if decision.batch is not None:
            check_batch(decision.batch, budget)
            if seed.random() < 0.1 and len(scheduler):
                victim = scheduler.remove(seed.choice(list(scheduler)).attempt_id)
                assert victim is not None
                ended.add(victim.attempt_id)
                scheduler.release(victim)
            for update in scheduler.complete(run(decision.batch)):
                if update.has_left:
                    ended.add(update.attempt_id)
                    flushing.append(update.sequence)
        if flushing and seed.random() < 0.5:
            scheduler.release(flushing.pop(0))
        pool.check()
        check_counts(scheduler)
        if len(ended) == 12 and not flushing:
            break
    assert len(ended) == 12
    assert pool.counts().held == 0


def check_counts(scheduler: Scheduler) -> None:
    """What is counted along is what can be counted."""
    prompts = [sequence for sequence in scheduler if not sequence.prompt_done]
    num_begun = sum(sequence.num_computed_tokens > sequence.num_cached_tokens for sequence in prompts)
    assert scheduler.num_waiting == len(prompts) - num_begun
    assert scheduler.prefill_queue_tokens == sum(sequence.num_uncomputed_tokens for sequence in prompts)


def check_batch(batch: Batch, budget: int) -> None:
    assert batch.num_tokens <= budget
    written: set[tuple[int, int]] = set()
    for entry in batch.entries:
        assert len(entry.block_table) * BLOCK >= entry.start + len(entry.token_ids)
        for position in range(entry.start, entry.start + len(entry.token_ids)):
            slot = (entry.block_table[position // BLOCK], position % BLOCK)
            assert slot not in written, "two sequences write one slot"
            written.add(slot)
