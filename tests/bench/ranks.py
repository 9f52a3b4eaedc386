"""What sharing a model out to ranks costs or gains: step times of one rank and of several, in turns, on this machine.

    python -m tests.bench.ranks [--model demo | FOLDER] [--degree 2] [--dtype bfloat16] [--rounds 20]

Every rank is a process with one compute thread. FOLDER needs a config.json only: weights are random. `tiny` and `demo-sized` are built in:
the latter has SmolLM2-135M's layers and sizes with 8 heads and 4 KV heads, so that 2 and 4 ranks can share it (9 heads allow 3 only).
Steps of both are taken in turns. Figures move with the load of others, the least times least: compare only what one run prints.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pd_serve.clock import VirtualClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec, StepResult
from pd_serve.engine.loader import load_runner, plan_engine
from pd_serve.ids import AttemptId
from pd_serve.model_store import resolve_model
from pd_serve.protocol.sampling import SamplingParams
from tests.unit.engine.model_folders import write_config
from tests.unit.engine.rank_processes import RankProcesses

CONTEXT = 128
BLOCK_SIZE = 16
PARAMS = SamplingParams(max_tokens=999, temperature=0.0)
SIZED: dict[str, int] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
}


def decode_step(num_sequences: int) -> Batch:
    blocks = CONTEXT // BLOCK_SIZE
    return Batch(0, tuple(_entry(index, Phase.DECODE, 1, CONTEXT - 1, index * blocks) for index in range(num_sequences)))


def prefill_step(num_tokens: int) -> Batch:
    return Batch(0, (_entry(0, Phase.PREFILL, num_tokens, 0, 0),))


def _entry(index: int, phase: Phase, num_tokens: int, start: int, first_block: int) -> BatchEntry:
    end = start + num_tokens
    tokens = tuple(3 + position % 90 for position in range(num_tokens))
    blocks = tuple(range(first_block, first_block - (-end // BLOCK_SIZE)))
    return BatchEntry(AttemptId(index), phase, tokens, start, blocks, SampleSpec(PARAMS, end, 0))


STEPS = {
    "decode of 1": decode_step(1),
    "decode of 8": decode_step(8),
    "decode of 32": decode_step(32),
    "prefill of 128": prefill_step(128),
    "prefill of 512": prefill_step(512),
}


def measure(execute: Callable[[Batch], StepResult], batch: Batch) -> float:
    """Seconds of a step."""
    started_at = time.perf_counter()
    execute(batch)
    return time.perf_counter() - started_at


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo-sized")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        run(options, Path(scratch))


def run(options: argparse.Namespace, scratch: Path) -> None:
    folder = _folder(options.model, scratch)

    def config(degree: int) -> Config:
        return Config.model_validate(
            {
                "model": {"dtype": options.dtype, "load_format": "auto" if options.model == "demo" else "random", "max_len": 0},
                "kv": {"block_size": BLOCK_SIZE, "num_blocks": 512},
                "engine": {"device": "cpu", "tp": degree},
            }
        )

    alone = load_runner(plan_engine(folder, config(1)), None, VirtualClock())
    processes = RankProcesses(options.degree - 1, scratch)
    with processes.joined(folder, config(options.degree)) as ranks:
        for name, batch in STEPS.items():
            pairs = [(measure(alone.execute, batch), measure(ranks.execute, batch)) for _ in range(options.rounds + 1)][1:]
            one, several = (sorted(times) for times in zip(*pairs, strict=True))
            print(
                f"{name:>15}: least {one[0] * 1e3:8.2f} ms with 1 rank, {several[0] * 1e3:8.2f} with {options.degree}: ratio"
                f" {several[0] / one[0]:.2f}; ratio of medians {statistics.median(several) / statistics.median(one):.2f}",
                flush=True,
            )
    processes.close()


def _folder(model: str, scratch: Path) -> Path:
    if model == "tiny":
        return write_config(scratch / "model", num_attention_heads=8, num_key_value_heads=4, hidden_size=64, max_position_embeddings=1024)
    if model == "demo-sized":
        return write_config(scratch / "model", **SIZED)
    return resolve_model(model, "", lambda what, done, total: None)


if __name__ == "__main__":
    main()
