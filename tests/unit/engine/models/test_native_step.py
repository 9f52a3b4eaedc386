from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.engine.batch import BatchEntry, Phase
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.native.build import find_compiler
from pd_serve.engine.native.decoder import NativeDecoder
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.step_inputs import StepInputs, build_step_inputs
from pd_serve.ids import AttemptId
from tests.unit.engine.model_folders import write_config

BLOCK_SIZE = 4
WIDE: dict[str, object] = {"head_dim": 16, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 160}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"num_attention_heads": 4},
    "one KV head per query head": {"num_key_value_heads": 6},
    "qwen2, biases": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3, norms of heads": {"architectures": ["Qwen3ForCausalLM"]},
    "mistral, window": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "all biases": {"attention_bias": True, "mlp_bias": True},
}

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


def _runner(folder: Path, **changes: object) -> ModelRunner[Any]:
    settings = {
        "model": {"id": str(write_config(folder, **{**WIDE, **changes})), "load_format": "random"},
        "kv": {"num_blocks": 64, "block_size": BLOCK_SIZE},
        "engine": {"device": "cpu", "cpu_ops": "on"},
    }
    runner = load_runner(plan_engine(folder, Config.model_validate(settings)), None, MonotonicClock())
    runner.cache.region.view(torch.bfloat16).normal_(generator=torch.Generator().manual_seed(1))
    return runner


def _inputs(contexts: list[int], num_tokens: int = 1, phase: Phase = Phase.DECODE) -> StepInputs:
    """One sequence per context, which ends with its `num_tokens` new tokens."""
    blocks = iter(torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist())
    tables = [tuple(next(blocks) for _ in range(-(-context // BLOCK_SIZE))) for context in contexts]
    tokens = [tuple(range(index, index + num_tokens)) for index in range(len(contexts))]
    entries = [
        BatchEntry(AttemptId(index), phase, tokens[index], context - num_tokens, tables[index], None)
        for index, context in enumerate(contexts)
    ]
    inputs = build_step_inputs(entries, BLOCK_SIZE, torch.device("cpu"))
    num_rows = len(contexts) * num_tokens
    return StepInputs(
        inputs.num_tokens,
        inputs.num_decode_rows,
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        torch.arange(num_rows),
        inputs.spans,
        tuple(range(num_rows)),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call that computes all layers."""
    made: list[int] = []
    decode = NativeDecoder.decode_

    def recorded(decoder: NativeDecoder, hidden: torch.Tensor, *others: Any) -> None:
        made.append(hidden.shape[0])
        decode(decoder, hidden, *others)

    monkeypatch.setattr(NativeDecoder, "decode_", recorded)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_gives_the_very_bits_of_one_per_operation(family: str, calls: list[int], tmp_path: Path) -> None:
    runner = _runner(tmp_path, **FAMILIES[family])
    pool = runner.cache.region
    before = pool.clone()
    with torch.inference_mode():
        for contexts in ([1], [21], [3, 4, 5, 16, 17, 40], [2] * 35):
            inputs = _inputs(contexts)
            # A hook is called between operations.
            expected, written = runner.forward(inputs, lambda _index: None), pool.clone()
            pool.copy_(before)
            logits = runner.forward(inputs)
            assert calls.pop() == len(contexts)
            assert torch.equal(logits, expected)
            assert torch.equal(pool, written)
            assert not calls
            pool.copy_(before)


def test_a_rows_logits_do_not_depend_on_its_company(calls: list[int], tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    contexts = [5, 9, 13, 33]
    with torch.inference_mode():
        together = runner.forward(_inputs(contexts))
        before = runner.cache.region.clone()
        for count in (1, 2, 3):
            assert torch.equal(runner.forward(_inputs(contexts[:count])), together[:count])
            assert torch.equal(runner.cache.region, before)
    assert calls == [4, 1, 2, 3]


def test_several_tokens_of_one_sequence_see_those_before_them(calls: list[int], tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    with torch.inference_mode():
        logits = runner.forward(_inputs([12, 18], num_tokens=3))
        assert calls == [6]
        assert torch.equal(logits, runner.forward(_inputs([12, 18], num_tokens=3), lambda _index: None))


def test_prompts_and_layers_that_are_pushed_go_operation_by_operation(calls: list[int], tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    layers: list[int] = []
    with torch.inference_mode():
        runner.forward(_inputs([6], num_tokens=6, phase=Phase.PREFILL))
        runner.forward(_inputs([6]), layers.append)
    assert (calls, layers) == ([], [0, 1])
