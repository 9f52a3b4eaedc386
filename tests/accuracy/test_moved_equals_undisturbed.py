"""A request that is moved goes on with the very bits it would have had: what it had generated is decoded again, not prefilled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_serve.engine import scheduler as scheduler_module
from pd_serve.engine.batch import Phase
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.scheduler import Scheduler, SchedulerSettings
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.ids import AttemptId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.sampling import SamplingParams, TokenLogprobs
from tests.accuracy.driver import make_runner

NUM_TOKENS = 44
PROMPT = [(index * 7919) % 40000 + 300 for index in range(77)]
Told = tuple[int, TokenLogprobs | None]


def go_on(runner: ModelRunner[Any], generated: list[int], end: int = NUM_TOKENS) -> list[Told]:
    """Tokens and log-probabilities of an attempt that begins with `generated`, up to `end` tokens in all."""
    pool = BlockPool(runner.cache.layout.num_blocks, runner.cache.layout.block_size, prefix_cache=False)
    scheduler = Scheduler(SchedulerSettings(512, 8, 0, frozenset(), 1024), pool)
    sampling = SamplingParams(max_tokens=end - len(generated), temperature=0.9, seed=5, num_logprobs=1)
    scheduler.add(Sequence(AttemptId(1), SequenceKind.LOCAL, PROMPT + generated, len(PROMPT), sampling))
    told: list[Told] = []
    step_id = 0
    while len(scheduler):
        batch = scheduler.schedule(step_id).batch
        assert batch is not None
        told += [(u.token.token_id, u.token.logprobs) for u in scheduler.complete(runner.execute(batch)) if u.token is not None]
        step_id += 1
    return told


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_moved_request_goes_on_bit_by_bit(dtype: str, demo_folder: Path) -> None:
    runner = make_runner(demo_folder, dtype)
    undisturbed = go_on(runner, [])
    assert len(undisturbed) == NUM_TOKENS
    for num_generated, end in ((1, 6), (36, NUM_TOKENS)):
        assert go_on(runner, [token for token, _ in undisturbed[:num_generated]], end) == undisturbed[num_generated:end], num_generated


def test_prefilling_what_was_generated_is_caught(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def longest_chunk(plan: object, sequence: Sequence) -> int:
        return sequence.num_uncomputed_tokens

    def phase_of(sequence: Sequence) -> Phase:
        return Phase.PREFILL

    runner = make_runner(demo_folder, "bfloat16")
    undisturbed = go_on(runner, [])
    monkeypatch.setattr(scheduler_module._StepPlan, "longest_chunk", longest_chunk)
    monkeypatch.setattr(scheduler_module, "_phase_of", phase_of)
    assert go_on(runner, [token for token, _ in undisturbed[:36]]) != undisturbed[36:]
