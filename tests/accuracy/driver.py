"""Drives a ModelRunner by hand: greedy generation with a chosen chunk length, batch size and block order, keeping every logit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config, EngineConfig, KVConfig, ModelConfig
from pd_serve.engine.batch import BatchEntry, Phase, SampleSpec
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Way:
    """One way to compute the same thing."""

    chunk: int = 10**6
    """Longest prefill chunk in tokens."""
    batch: int = 10**6
    """Sequences in progress at once; the chunks of later ones share steps with the decoding of earlier ones."""
    block_seed: int | None = None
    """Shuffles the free blocks; None: ascending."""


@dataclass
class _Run:
    token_ids: list[int]
    table: tuple[int, ...]
    num_prompt: int
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


def make_runner(
    folder: Path,
    dtype: str,
    *,
    block_size: int = 16,
    num_blocks: int = 256,
    load_format: str = "auto",
    device: str = "cpu",
    cpu_ops: str = "off",
) -> ModelRunner[Any]:
    config = Config(
        model=ModelConfig.model_validate({"dtype": dtype, "load_format": load_format}),
        kv=KVConfig(block_size=block_size, num_blocks=num_blocks),
        engine=EngineConfig.model_validate({"device": device, "cpu_ops": cpu_ops}),
    )
    return load_runner(plan_engine(folder, config), None, MonotonicClock())


def generate(runner: ModelRunner[Any], prompts: Sequence[Sequence[int]], num_tokens: int, way: Way) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy tokens and logits [num_tokens, vocab_size] of every prompt. Stale pool contents are made as harmful as can be first."""
    layout = runner.cache.layout
    for layer in range(layout.num_layers):
        runner.cache.layer(layer).slab.fill_(float("nan"))
    blocks = list(range(layout.num_blocks))
    if way.block_seed is not None:
        random.Random(way.block_seed).shuffle(blocks)
    waiting, running, finished = [], [], []
    for prompt in prompts:
        count = layout.num_blocks_for(len(prompt) + num_tokens)
        waiting.append(_Run(list(prompt), tuple(blocks[:count]), len(prompt)))
        del blocks[:count]
    order = list(waiting)
    while waiting or running:
        while waiting and len(running) < way.batch:
            running.append(waiting.pop(0))
        # Every decoding sequence, and one chunk of the first that still has a prompt to compute.
        stepped = [run for run in running if run.num_computed >= run.num_prompt]
        stepped += [run for run in running if run.num_computed < run.num_prompt][:1]
        entries = [_entry(index, run, way.chunk) for index, run in enumerate(stepped)]
        inputs = build_step_inputs(entries, layout.block_size, runner.cache.layer(0).slab.device)
        with torch.inference_mode():
            logits = runner.forward(inputs)
        for run, entry in zip(stepped, entries, strict=True):
            run.num_computed += len(entry.token_ids)
        for row, index in zip(logits, inputs.sampled_entries, strict=True):
            stepped[index].logits.append(row.clone())
            stepped[index].token_ids.append(int(row.argmax()))
        finished += [run for run in running if len(run.logits) == num_tokens]
        running = [run for run in running if len(run.logits) < num_tokens]
    return [run.token_ids[run.num_prompt :] for run in order], [torch.stack(run.logits) for run in order]


def _entry(index: int, run: _Run, chunk: int) -> BatchEntry:
    is_prefill = run.num_computed < run.num_prompt
    end = min(run.num_computed + chunk, run.num_prompt) if is_prefill else run.num_computed + 1
    is_sampled = end >= run.num_prompt
    return BatchEntry(
        attempt_id=AttemptId(index),
        phase=Phase.PREFILL if is_prefill else Phase.DECODE,
        token_ids=tuple(run.token_ids[run.num_computed : end]),
        start=run.num_computed,
        block_table=run.table,
        sample=SampleSpec(GREEDY, end, end - run.num_prompt) if is_sampled else None,
    )
