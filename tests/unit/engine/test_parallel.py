"""One model over several ranks, in real processes, against the same model on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_serve.clock import VirtualClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec, StepResult
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.errors import ConfigError, EngineError
from pd_serve.ids import AttemptId
from pd_serve.kv.routes import rank_heads
from pd_serve.protocol.sampling import SamplingParams
from tests.unit.engine.greedy import greedy
from tests.unit.engine.random_models import MODELS, write_random_model
from tests.unit.engine.rank_processes import RankProcesses

BLOCK_SIZE = 4
NUM_TOKENS = 10
PROMPTS = (tuple(range(3, 40)), tuple(range(90, 60, -1)), (5,), tuple(range(7, 96, 4)))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    # The first rank is this process; with more threads than cores every sum would wait for threads that spin.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = RankProcesses(3, tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_random_model(root / name, seed=index, **changes) for index, (name, changes) in enumerate(MODELS.items())}


def _config(num_ranks: int = 1, **kv: object) -> Config:
    sections = {
        "model": {"dtype": "float32"},
        "kv": {"block_size": BLOCK_SIZE, "num_blocks": 64, **kv},
        "engine": {"device": "cpu", "tp": num_ranks},
    }
    return Config.model_validate(sections)


def _batch(tokens: tuple[int, ...], *, has_push: bool = False) -> Batch:
    spec = SampleSpec(SamplingParams(max_tokens=9, temperature=0.0), len(tokens), 0)
    return Batch(3, (BatchEntry(AttemptId(1), Phase.PREFILL, tokens, 0, tuple(range(-(-len(tokens) // BLOCK_SIZE))), spec),), has_push)


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        *((2, name) for name in MODELS if name != "nine-heads"),
        (3, "nine-heads"),
        *((4, name) for name in ("llama-biased", "qwen2", "two-kv-heads", "one-kv-head", "deepseek-v3")),
    ],
)
def test_ranks_together_give_the_tokens_and_the_kv_of_one(
    num_ranks: int, name: str, folders: dict[str, Path], processes: RankProcesses
) -> None:
    alone = load_runner(plan_engine(folders[name], _config()), None, VirtualClock())
    expected = greedy(alone.execute, PROMPTS, NUM_TOKENS, chunk=16, block_size=BLOCK_SIZE)
    with processes.joined(folders[name], _config(num_ranks)) as ranks:
        given = greedy(ranks.execute, PROMPTS, NUM_TOKENS, chunk=16, block_size=BLOCK_SIZE)
        kv = ranks.kv()
    assert [tokens for tokens, _ in given] == [tokens for tokens, _ in expected]
    logprobs, expected_logprobs = ([[[*step.top] for step in steps] for _, steps in runs] for runs in (given, expected))
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
    whole = torch.stack([alone.cache.layer(index).slab for index in range(alone.cache.layout.num_layers)]).numpy()
    for rank, part in enumerate(kv):
        heads = rank_heads(whole.shape[4], num_ranks, rank)
        np.testing.assert_allclose(part, whole[:, :, :, :, heads.start : heads.stop], atol=1e-4)


@pytest.mark.parametrize(("num_ranks", "name"), [(2, "qwen3"), (3, "nine-heads")])
def test_bits_do_not_depend_on_company_or_chunk(num_ranks: int, name: str, folders: dict[str, Path], processes: RankProcesses) -> None:
    with processes.joined(folders[name], _config(num_ranks)) as ranks:
        together = greedy(ranks.execute, PROMPTS, 8, chunk=16, block_size=BLOCK_SIZE)
        alone = [greedy(ranks.execute, (prompt,), 8, chunk=5, block_size=BLOCK_SIZE)[0] for prompt in PROMPTS]
    assert together == alone


def test_every_rank_is_told_of_each_layer_between_its_kv_and_its_attention(folders: dict[str, Path], processes: RankProcesses) -> None:
    batch = _batch(PROMPTS[0], has_push=True)
    with processes.joined(folders["llama"], _config(4)) as ranks:
        first = ranks.execute(batch)
        assert ranks.calls == [[(0, (True, False)), (1, (True, True))]] * 4
        honest = ranks.leader.runner.cache.layer(1).slab.clone()
        # Attention of the followers reads what their hook has left there, and what comes of it reaches the leader's next layer.
        again = ranks.execute(batch, spoils=True)
        assert not torch.allclose(ranks.leader.runner.cache.layer(1).slab, honest)
        assert (first.step_id, again.step_id) == (3, 3)
        ranks.execute(_batch(PROMPTS[0]))
        assert ranks.calls == [[]] * 4


def test_random_weights_are_shared_out_as_one_rank_would_draw_them(folders: dict[str, Path], processes: RankProcesses) -> None:
    def config(num_ranks: int) -> Config:
        return _config(num_ranks).model_copy(update={"model": _config().model.model_copy(update={"load_format": "random"})})

    alone = load_runner(plan_engine(folders["qwen2"], config(1)), None, VirtualClock())
    expected = greedy(alone.execute, PROMPTS[:2], 8, chunk=16, block_size=BLOCK_SIZE)
    with processes.joined(folders["qwen2"], config(2)) as ranks:
        given = greedy(ranks.execute, PROMPTS[:2], 8, chunk=16, block_size=BLOCK_SIZE)
    assert [tokens for tokens, _ in given] == [tokens for tokens, _ in expected]


def test_the_layout_is_that_of_one_rank_and_the_info_that_of_the_model(folders: dict[str, Path], processes: RankProcesses) -> None:
    memory = {"num_blocks": 0, "memory_bytes": 1 << 20}
    alone = plan_engine(folders["llama"], _config(**memory))
    with processes.joined(folders["llama"], _config(4, **memory)) as ranks:
        plan = ranks.leader.plan
    assert (plan.layout.num_kv_heads, plan.info.num_kv_heads, plan.rank, plan.num_ranks) == (1, 4, 0, 4)
    assert plan.layout.num_blocks == 4 * alone.layout.num_blocks
    assert plan.info == alone.info


def test_other_orders_and_fp8_of_kv_hold_for_ranks_too(folders: dict[str, Path], processes: RankProcesses) -> None:
    kv = {"order": "head_major", "dtype": "fp8_e4m3"}
    alone = load_runner(plan_engine(folders["llama"], _config(**kv)), None, VirtualClock())
    expected = greedy(alone.execute, PROMPTS[:2], 8, chunk=16, block_size=BLOCK_SIZE)
    with processes.joined(folders["llama"], _config(2, **kv)) as ranks:
        given = greedy(ranks.execute, PROMPTS[:2], 8, chunk=16, block_size=BLOCK_SIZE)
    assert [tokens for tokens, _ in given] == [tokens for tokens, _ in expected]


def test_a_rank_that_left_or_stays_away_ends_the_step_with_an_engine_error(folders: dict[str, Path], processes: RankProcesses) -> None:
    def leaders_step(timeout_s: float, *, leaves: bool) -> StepResult:
        with processes.joined(folders["llama"], _config(2), timeout_s) as ranks:
            if leaves:
                ranks.leave()
            return ranks.leader.runner.execute(_batch(PROMPTS[0]))

    with pytest.raises(EngineError, match="rank 0 lost the other ranks"):
        leaders_step(60.0, leaves=True)
    with pytest.raises(EngineError, match="rank 0 lost the other ranks"):
        leaders_step(3.0, leaves=False)


def test_a_plan_for_more_ranks_than_there_are_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tp is 2, but there are 1 ranks"):
        plan_engine(folders["llama"], _config(2))
