from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.bench.engine import EngineOptions, run_engine
from pd_serve.bench.engine_steps import decode_batch, prefill_batches
from pd_serve.bench.errors import BenchError
from pd_serve.bench.progress import Bars
from pd_serve.config import Config
from pd_serve.engine.batch import Phase
from tests.unit.engine.model_folders import write_checkpoint


def _options(folder: Path, num_blocks: int) -> EngineOptions:
    settings = Config.model_validate({"model": {"id": str(folder)}, "kv": {"num_blocks": num_blocks}, "engine": {"device": "cpu"}})
    return EngineOptions(settings, ("off",), batches=(1, 3), contexts=(20,), prefill=(40,), rounds=1)


def test_every_arm_has_every_figure(tmp_path: Path) -> None:
    with Bars(quiet=True) as bars:
        result = run_engine(_options(write_checkpoint(tmp_path), 16), bars)
    figures = result.arms["cpu_ops=off"].figures
    assert {"read_bytes_per_s", "limit_ratio[3x20]", "decode_s[1x20].min", "prefill_tokens_per_s[40]"} <= figures.keys()
    assert all(value > 0 for value in figures.values())
    assert result.config["cpu_ops=off"]["engine.cpu_ops"] == "off"


def test_a_pool_without_room_for_the_largest_step_is_an_error(tmp_path: Path) -> None:
    with Bars(quiet=True) as bars, pytest.raises(BenchError, match="needs 6"):
        run_engine(_options(write_checkpoint(tmp_path), 5), bars)


def test_steps_are_as_a_scheduler_would_make_them() -> None:
    entries = decode_batch(3, 33, 16).entries
    assert [(entry.start, len(entry.block_table), entry.phase) for entry in entries] == [(32, 3, Phase.DECODE)] * 3
    assert len({block for entry in entries for block in entry.block_table}) == 9
    chunks = [batch.entries[0] for batch in prefill_batches(100, 64, 16)]
    assert [(chunk.start, len(chunk.token_ids), chunk.sample is not None) for chunk in chunks] == [(0, 64, False), (64, 36, True)]
