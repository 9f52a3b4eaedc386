"""KV leaves layer by layer beside compute, over a fake lane that is as slow as can be. NOT YET RUN ON A GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_serve.engine.batch import Batch, BatchEntry, Phase
from pd_serve.ids import AttemptId
from tests.accuracy.driver import make_runner
from tests.slow_lane import check_that_a_slow_lane_holds_nothing_up, check_that_layers_are_sent_while_later_ones_are_computed

pytestmark = pytest.mark.gpu
BLOCKS = (7, 2)
BATCH = Batch(1, (BatchEntry(AttemptId(1), Phase.PREFILL, tuple(range(200, 712)), 0, BLOCKS, None),), has_push=True)


@pytest.mark.parametrize("check", [check_that_a_slow_lane_holds_nothing_up, check_that_layers_are_sent_while_later_ones_are_computed])
def test_compute_and_sending_go_on_beside_each_other(check: Callable[..., None], demo_folder: Path) -> None:
    runner = make_runner(demo_folder, "bfloat16", block_size=256, device="cuda")

    def execute(on_layer: Any) -> object:
        return runner.execute(BATCH, on_layer)

    check(runner, BLOCKS, execute)
