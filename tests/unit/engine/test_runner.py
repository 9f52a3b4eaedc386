from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_serve.clock import VirtualClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.runner import ModelRunner
from pd_serve.errors import ConfigError, EngineError, ModelError
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams
from tests.unit.engine.model_folders import write_checkpoint, write_config

PROMPT = tuple(range(3, 23))


def _config(**sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {"model": {"dtype": "float32"}, "kv": {"block_size": 4, "num_blocks": 32}, "engine": {"device": "cpu"}}
    return Config.model_validate({key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})


def _runner(folder: Path, buffer: memoryview | None = None) -> ModelRunner[Any]:
    return load_runner(plan_engine(folder, _config()), buffer, VirtualClock(5.0))


def _entry(attempt: int, phase: Phase, token_ids: tuple[int, ...], start: int, first_block: int, *, sampled: bool = True) -> BatchEntry:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    spec = SampleSpec(params, start + len(token_ids), 0) if sampled else None
    return BatchEntry(AttemptId(attempt), phase, token_ids, start, tuple(range(first_block, first_block + 8)), spec)


def test_results_come_in_entry_order_for_sampled_entries_only(tmp_path: Path) -> None:
    runner = _runner(write_checkpoint(tmp_path))
    alone = [
        runner.execute(Batch(0, (_entry(1, Phase.PREFILL, PROMPT, 0, 0),))).sampled[0].token_id,
        runner.execute(Batch(0, (_entry(2, Phase.PREFILL, PROMPT[:9], 0, 8),))).sampled[0].token_id,
    ]
    decodes = (_entry(1, Phase.DECODE, (alone[0],), 20, 0), _entry(2, Phase.DECODE, (alone[1],), 9, 8))
    separately = [runner.execute(Batch(0, (decode,))).sampled[0].token_id for decode in decodes]
    mixed = (*decodes, _entry(3, Phase.PREFILL, PROMPT[:5], 0, 16, sampled=False), _entry(4, Phase.PREFILL, PROMPT, 0, 24))
    result = runner.execute(Batch(7, mixed))
    assert result.step_id == 7
    assert [(token.attempt_id, token.token_id) for token in result.sampled] == [(1, separately[0]), (2, separately[1]), (4, alone[0])]
    assert (result.started_at, result.ended_at) == (5.0, 5.0)


def test_on_layer_fires_in_order_when_the_layers_kv_is_written_and_later_ones_are_not(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    reference = _runner(folder)
    reference.execute(Batch(0, (_entry(1, Phase.PREFILL, PROMPT, 0, 0),)))
    memory = bytearray(reference.cache.layout.pool_nbytes)
    runner = _runner(folder, memoryview(memory))
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        for index in range(2):
            written = torch.equal(runner.cache.layer(index).slab[:5], reference.cache.layer(index).slab[:5])
            assert written == (index <= layer)

    runner.execute(Batch(0, (_entry(1, Phase.PREFILL, PROMPT, 0, 0),), has_push=True), on_layer)
    assert seen == [0, 1]
    assert any(memory)


def test_on_layer_is_not_called_without_a_push(tmp_path: Path) -> None:
    def on_layer(layer: int) -> None:
        raise AssertionError(f"called for layer {layer}")

    _runner(write_checkpoint(tmp_path)).execute(Batch(0, (_entry(1, Phase.PREFILL, PROMPT, 0, 0),)), on_layer)


def test_a_step_without_samples_still_writes_its_kv(tmp_path: Path) -> None:
    runner = _runner(write_checkpoint(tmp_path))
    assert runner.execute(Batch(0, (_entry(1, Phase.PREFILL, PROMPT[:8], 0, 0, sampled=False),))).sampled == ()
    assert runner.cache.layer(1).slab[:2].ne(0).all()
    assert runner.cache.layer(1).slab[2:].eq(0).all()


def test_logits_that_are_no_numbers_are_an_engine_error(tmp_path: Path) -> None:
    runner = _runner(write_checkpoint(tmp_path))
    runner.cache.layer(0).slab.fill_(float("inf"))
    with pytest.raises(EngineError):
        runner.execute(Batch(0, (_entry(1, Phase.DECODE, (5,), 12, 0),)))


def test_layout_follows_model_and_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    plan = plan_engine(folder, _config())
    assert (plan.layout.num_layers, plan.layout.num_kv_heads, plan.layout.head_dim) == (2, 2, 8)
    assert (plan.layout.block_size, plan.layout.num_blocks, plan.max_len) == (4, 32, 256)
    sized = plan_engine(folder, _config(kv={"num_blocks": 0, "memory_bytes": 1 << 20})).layout
    assert sized.pool_nbytes <= 1 << 20 < sized.pool_nbytes + sized.num_layers * sized.block_nbytes


def test_settings_that_do_not_fit_are_config_errors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, head_dim=512, num_attention_heads=64, num_key_value_heads=64)
    with pytest.raises(ConfigError, match="beyond the model's 256"):
        plan_engine(folder, _config(model={"max_len": 257}))
    with pytest.raises(ConfigError, match="no room for a single block"):
        plan_engine(folder, _config(kv={"num_blocks": 0, "memory_bytes": 1 << 20, "block_size": 256}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            plan_engine(folder, _config(engine={"device": "cuda"}))


def test_random_weights_need_only_a_config_and_are_equal_everywhere(tmp_path: Path) -> None:
    config = _config(model={"load_format": "random"})
    entry = _entry(1, Phase.PREFILL, PROMPT, 0, 0)
    plans = [plan_engine(write_config(tmp_path / name), config) for name in ("a", "b")]
    tokens = [load_runner(plan, None, VirtualClock()).execute(Batch(0, (entry,))).sampled[0].token_id for plan in plans]
    assert tokens[0] == tokens[1]
    assert plans[0].info.fingerprint == plans[1].info.fingerprint


def test_a_checkpoint_that_does_not_match_its_config_is_a_model_error(tmp_path: Path) -> None:
    plan = plan_engine(write_checkpoint(tmp_path, tie_word_embeddings=False), _config())
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        load_runner(plan, None, VirtualClock())
