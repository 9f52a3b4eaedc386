from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pd_serve.clock import VirtualClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec, StepResult
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.parallel import SingleRank
from pd_serve.engine.warm_up import WarmUpPlan, warm_up
from pd_serve.ids import AttemptId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.sampling import SamplingParams
from tests.unit.engine.model_folders import write_checkpoint

STEP_S = 0.25
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, num_blocks=64, dtype=KVDtype.FLOAT32)
PLAN = WarmUpPlan(LAYOUT, max_len=4096, max_batch_tokens=256, max_running=256, budget_s=1e9)


class Runner:
    """Each step takes STEP_S."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.batches: list[Batch] = []

    def execute(self, batch: Batch, on_layer: None = None) -> StepResult:
        self.batches.append(batch)
        self.clock.advance(STEP_S)
        return StepResult(batch.step_id, (), 0.0, 0.0)


class SlowOther:
    """A rank beside this one whose time is up after some steps."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def minimum(self, value: int) -> int:
        self._left -= 1
        return min(value, int(self._left >= 0))


def test_the_commonest_sizes_come_first() -> None:
    runner = Runner()
    warm_up(runner, PLAN, SingleRank(), runner.clock)
    assert [batch.num_tokens for batch in runner.batches][:7] == [1, 2, 4, 8, 256, 128, 64]


def test_every_count_of_rows_that_is_compiled_for_is_computed_once() -> None:
    runner = Runner()
    warm_up(runner, PLAN, SingleRank(), runner.clock)
    sizes = [batch.num_tokens for batch in runner.batches]
    assert sorted(sizes) == [*range(1, 33), *range(48, 257, 16)]


@pytest.mark.parametrize(("max_len", "num_blocks", "max_running"), [(40, 64, 256), (4096, 2, 256), (4096, 64, 3), (2, 1, 1)])
def test_no_step_is_larger_than_what_requests_may_be(max_len: int, num_blocks: int, max_running: int) -> None:
    import msgspec

    layout = msgspec.structs.replace(LAYOUT, num_blocks=num_blocks)
    runner = Runner()
    assert warm_up(runner, replace(PLAN, layout=layout, max_len=max_len, max_running=max_running), SingleRank(), runner.clock)
    for batch in runner.batches:
        decodes = [entry for entry in batch.entries if entry.phase is Phase.DECODE]
        assert len(decodes) <= max_running
        blocks = [block for entry in batch.entries for block in entry.block_table]
        assert len(blocks) == len(set(blocks))
        assert max(blocks) < num_blocks
        assert all(entry.start + len(entry.token_ids) < max_len for entry in batch.entries)


def test_it_ends_when_the_time_is_up() -> None:
    runner = Runner()
    assert warm_up(runner, replace(PLAN, budget_s=4 * STEP_S), SingleRank(), runner.clock) == 4
    assert warm_up(runner, replace(PLAN, budget_s=0.0), SingleRank(), runner.clock) == 0


def test_the_slowest_rank_decides_for_all() -> None:
    runner = Runner()
    assert warm_up(runner, PLAN, SlowOther(3), runner.clock) == 3


def test_what_it_leaves_in_the_pool_changes_no_request(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"dtype": "float32"}, "kv": {"block_size": 4, "num_blocks": 32}, "engine": {"device": "cpu"}})
    plan = plan_engine(write_checkpoint(tmp_path), config)
    tokens = []
    for is_warm in (False, True):
        runner = load_runner(plan, None, VirtualClock())
        if is_warm:
            sizes = WarmUpPlan(plan.layout, plan.max_len, 32, 8, 1e9)
            assert warm_up(runner, sizes, SingleRank(), VirtualClock())
        spec = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 9, 0)
        entry = BatchEntry(AttemptId(1), Phase.PREFILL, tuple(range(3, 12)), 0, (0, 1, 2), spec)
        tokens.append(runner.execute(Batch(1, (entry,))).sampled[0].token_id)
    assert tokens[0] == tokens[1]
