"""Compute and sending go on beside each other, whatever the speed of the lane (tests/slow_lane.py); on CUDA: tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_serve.clock import VirtualClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, BatchEntry, Phase
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.runner import ModelRunner
from pd_serve.ids import AttemptId
from tests.slow_lane import check_that_a_slow_lane_holds_nothing_up, check_that_layers_are_sent_while_later_ones_are_computed
from tests.unit.engine.model_folders import write_config

BLOCKS = (3, 1)
BATCH = Batch(1, (BatchEntry(AttemptId(1), Phase.PREFILL, tuple(range(3, 11)), 0, BLOCKS, None),), has_push=True)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner[Any]:
    config = {"model": {"dtype": "float32", "load_format": "random"}, "kv": {"block_size": 4, "num_blocks": 8}, "engine": {"device": "cpu"}}
    return load_runner(plan_engine(write_config(tmp_path), Config.model_validate(config)), None, VirtualClock())


def test_a_slow_lane_holds_no_step_up(runner: ModelRunner[Any]) -> None:
    check_that_a_slow_lane_holds_nothing_up(runner, BLOCKS, lambda on_layer: runner.execute(BATCH, on_layer))


def test_layers_are_sent_while_later_ones_are_computed(runner: ModelRunner[Any]) -> None:
    check_that_layers_are_sent_while_later_ones_are_computed(runner, BLOCKS, lambda on_layer: runner.execute(BATCH, on_layer))


def test_a_step_that_hands_its_layers_out_at_its_end_would_be_seen(runner: ModelRunner[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: hooks that are called when all layers are computed."""
    monkeypatch.setattr("tests.slow_lane.DEADLINE_S", 0.01)

    def late(on_layer: Any) -> None:
        runner.execute(BATCH, lambda layer: None)
        on_layer(1)

    with pytest.raises(AssertionError, match="wait for the step's end"):
        check_that_layers_are_sent_while_later_ones_are_computed(runner, BLOCKS, late)
