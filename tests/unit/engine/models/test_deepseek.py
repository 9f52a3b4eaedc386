from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pd_serve.engine.attention.cpu import CpuAttention
from pd_serve.engine.attention.mla import LatentAttention
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.engine.models import registry
from pd_serve.ids import AttemptId
from tests.accuracy.driver import GREEDY, Way, generate, make_runner
from tests.unit.engine.test_sparse_families import V2, V3

PROMPT = tuple(range(5, 42))
TABLE = (3, 0, 2)


@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_a_layers_latents_are_written_before_its_hook_and_read_after_it(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that they can be sent while attention computes."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = make_runner(tmp_path, "float32", num_blocks=4, load_format="random")
    steps: list[str] = []
    attend = CpuAttention.attend

    def attend_noted(self: CpuAttention, *arguments: Any) -> Tensor:
        steps.append("attend")
        return attend(self, *arguments)

    def on_layer(layer: int) -> None:
        steps.append(f"layer {layer}")
        latents = runner.cache.layer(layer).slab[list(TABLE)].view(48, 20)
        assert latents[: len(PROMPT)].abs().sum(-1).gt(0).all()
        assert latents[len(PROMPT) :].eq(0).all()
        if layer < 3:
            assert runner.cache.layer(layer + 1).slab.eq(0).all(), "not yet computed"

    monkeypatch.setattr(CpuAttention, "attend", attend_noted)
    entry = BatchEntry(AttemptId(1), Phase.PREFILL, PROMPT, 0, TABLE, SampleSpec(GREEDY, len(PROMPT), 0))
    result = runner.execute(Batch(1, (entry,), has_push=True), on_layer)
    assert steps == [step for layer in range(4) for step in (f"layer {layer}", "attend")]
    assert len(result.sampled) == 1
    assert torch.equal(runner.cache.layer(0).slab[1], torch.zeros(1, 16, 1, 20)), "a block that is nobody's"


def test_the_attention_for_cuda_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on CPU."""
    (tmp_path / "config.json").write_text(json.dumps(V3))
    prompts, way = [list(range(3, 3 + length)) for length in (1, 16, 70)], Way(chunk=30, batch=2, block_seed=4)
    tokens, expected = generate(make_runner(tmp_path, "float32", load_format="random"), prompts, 6, way)
    monkeypatch.setattr(registry, "attention_for", lambda geometry, dtype, device, _: LatentAttention(geometry, dtype, device))
    other_tokens, logits = generate(make_runner(tmp_path, "float32", load_format="random"), prompts, 6, way)
    assert other_tokens == tokens
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
