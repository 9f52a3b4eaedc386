"""Parts of `make bench-gpu` that one process measures on one device: its limits, decode, prefill, the sampler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.engine.device_sampler import DeviceSampler
from pd_serve.engine.loader import EnginePlan, load_runner, plan_engine
from pd_serve.engine.parameters import num_parameters
from pd_serve.engine.runner import ModelRunner, TokenSampler
from pd_serve.engine.sampler import Sampler
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams
from tests.bench.gpu_figures import Figure, Limits, Task, share

BATCHES = (1, 8, 32, 128)
LENGTHS = (512, 2048, 8192)
CONTEXT = 512
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def measure_limits(task: Task) -> list[Figure]:
    """A copy inside the device's memory, and a product of matrices of 16 bits."""
    limits = find_limits(task)
    return [
        Figure("copy", limits.bytes_per_s / 1e9, "GB/s read and written"),
        Figure("matmul bf16", limits.flops_per_s / 1e12, "TFLOP/s"),
    ]


def find_limits(task: Task) -> Limits:
    device, is_small = torch.device(task.device), task.is_rehearsal
    source = torch.ones(1 << (24 if is_small else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_s = _median_s(lambda: target.copy_(source), device)
    size = 256 if is_small else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiplied_s = _median_s(lambda: torch.mm(a, b), device)
    return Limits(2 * source.numel() / copied_s, 2 * size**3 / multiplied_s)


def measure_decode(task: Task) -> list[Figure]:
    """Whole steps as the engine thread runs them, sampling included, replayed and eager; the limit: weights and KV read once."""
    plan, runner = _load(task)
    figures = []
    graphs = runner.graphs
    names = {"graph": graphs, "eager": None} if graphs is not None else {"eager": None}
    for num_sequences in _smaller(BATCHES, task, 8):
        batch = _decode_batch(num_sequences, plan.layout.block_size)
        nbytes = _weights_nbytes(plan) + num_sequences * CONTEXT * plan.layout.bytes_per_token
        for name, used in names.items():
            runner.use_graphs(used)
            step_s = _median_s(partial(runner.execute, batch), plan.device)
            ideal_s = nbytes / task.limits.bytes_per_s if task.limits.bytes_per_s else 0.0
            figures.append(
                Figure(f"decode batch {num_sequences} {name}", step_s * 1e3, "ms/step", share(ideal_s, step_s), "memory bandwidth")
            )
    return figures


def measure_prefill(task: Task) -> list[Figure]:
    plan, runner = _load(task)
    figures = []
    for num_tokens in _smaller(LENGTHS, task, 512):
        blocks = tuple(range(plan.layout.num_blocks_for(num_tokens)))
        token_ids = tuple(3 + token % 500 for token in range(num_tokens))
        batch = Batch(1, (BatchEntry(AttemptId(1), Phase.PREFILL, token_ids, 0, blocks, SampleSpec(_GREEDY, num_tokens, 0)),))
        step_s = _median_s(partial(runner.execute, batch), plan.device)
        ideal_s = _prefill_flops(plan, num_tokens) / task.limits.flops_per_s if task.limits.flops_per_s else 0.0
        figures.append(Figure(f"prefill {num_tokens}", step_s * 1e3, "ms", share(ideal_s, step_s), "peak FLOP/s"))
        figures.append(Figure(f"prefill {num_tokens}", num_tokens / step_s, "tokens/s"))
    return figures


def measure_sampler(task: Task) -> list[Figure]:
    """The sampler for GPUs beside the one that answers sequence by sequence, on the same logits."""
    device, vocab_size = torch.device(task.device), 1024 if task.is_rehearsal else 128256
    kinds = {
        "greedy": _GREEDY,
        "top-p 0.9": SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9),
        "top-k 50, min-p 0.05": SamplingParams(max_tokens=1, top_k=50, min_p=0.05),
    }
    samplers: dict[str, TokenSampler] = {"batched": DeviceSampler((2,), device), "by sequence": Sampler((2,))}
    figures = []
    for num_rows in _smaller(BATCHES, task, 8):
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)).to(device) * 3
        for kind, params in kinds.items():
            specs = [SampleSpec(params, 10 + row, 0) for row in range(num_rows)]
            answers = {name: sampler.sample(logits, specs) for name, sampler in samplers.items()}
            agreeing = sum(mine.token_id == other.token_id for mine, other in zip(*answers.values(), strict=True))
            figures.append(Figure(f"sampler {num_rows} {kind}, same tokens", agreeing / num_rows, "of the rows"))
            for name, sampler in samplers.items():
                spent_s = _median_s(partial(sampler.sample, logits, specs), device)
                figures.append(Figure(f"sampler {num_rows} {kind}, {name}", spent_s * 1e6, "us"))
    return figures


def _load(task: Task) -> tuple[EnginePlan, ModelRunner[Any]]:
    num_blocks = (128 * 2 * CONTEXT if not task.is_rehearsal else 8 * 2 * CONTEXT) // task.block_size + 1
    config = Config.model_validate(
        {
            "model": {"load_format": "random", "dtype": "bfloat16", "max_len": max(LENGTHS) + 64},
            "kv": {"block_size": task.block_size, "num_blocks": num_blocks},
            "engine": {"device": task.device, "max_running": max(BATCHES)},
        }
    )
    plan = plan_engine(Path(task.folder), config)
    return plan, load_runner(plan, None, MonotonicClock())


def _decode_batch(num_sequences: int, block_size: int) -> Batch:
    per_sequence = -(-CONTEXT // block_size)
    entries = []
    for index in range(num_sequences):
        table = tuple(range(index * per_sequence, (index + 1) * per_sequence))
        entries.append(BatchEntry(AttemptId(index), Phase.DECODE, (5 + index,), CONTEXT - 1, table, SampleSpec(_GREEDY, CONTEXT, 0)))
    return Batch(1, tuple(entries))


def _weights_nbytes(plan: EnginePlan) -> int:
    return int(num_parameters(plan.info, 1) * plan.dtype.itemsize)


def _prefill_flops(plan: EnginePlan, num_tokens: int) -> float:
    """Two per weight and token, the vocabulary's for one row only; and causal attention: q·k and p·v over half of the square."""
    info = plan.info
    table = info.vocab_size * info.hidden_size
    weights = num_parameters(info, 1) - table * (1 if info.has_tied_embeddings else 2)
    attention = 4 * num_tokens * num_tokens / 2 * info.num_heads * info.head_dim * info.num_layers
    return 2.0 * weights * num_tokens + 2.0 * table + attention


def _smaller(sizes: tuple[int, ...], task: Task, limit: int) -> list[int]:
    return [size for size in sizes if size <= limit or not task.is_rehearsal]


def _median_s(run: Callable[[], object], device: torch.device, least: int = 7, seconds: float = 1.0) -> float:
    """Of single runs, each waited for; after three that do not count. For about a second, seven runs at least."""
    spent: list[float] = []
    end = time.monotonic() + seconds
    while len(spent) < least + 3 or (time.monotonic() < end and len(spent) < 200):
        _wait(device)
        started = time.monotonic()
        run()
        _wait(device)
        spent.append(time.monotonic() - started)
    return statistics.median(spent[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
