"""What it costs to convert KV on its way: bytes, packing, and the time that is not hidden behind compute, beside zero copies, in turns.

    python -m tests.bench.conversion [--rounds 5] [--tokens 1024] [--chunk 256]

Two engines and two transports over shared memory in one process; one compute thread, packing on the transport thread. The model has
SmolLM2-135M's layers, fewer of them, with random weights. `exposed` is from the end of compute to the answer of the last flush. Nothing is
asserted: an arm is compared with the first arm of its own element type at prefill, of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.accuracy.converting import CONFIG, Kind, Pair, Prompt, Sizes

MODEL = {
    **CONFIG,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
FP8 = Kind(16, "bfloat16", kv_dtype="fp8_e4m3")
ARMS: dict[str, tuple[Kind, Kind]] = {
    "bf16, as it lies": (Kind(16, "bfloat16"), Kind(16, "bfloat16")),
    "block 16 to 64": (Kind(16, "bfloat16"), Kind(64, "bfloat16")),
    "block 64 to 16": (Kind(64, "bfloat16"), Kind(16, "bfloat16")),
    "token- to head-major": (Kind(16, "bfloat16"), Kind(16, "bfloat16", "head_major")),
    "bf16 to fp8": (Kind(16, "bfloat16"), FP8),
    "bf16 to float32": (Kind(16, "bfloat16"), Kind(16, "float32")),
    "fp8, as it lies": (FP8, FP8),
    "fp8 to bf16": (FP8, Kind(16, "bfloat16")),
}


@dataclass
class Arm:
    name: str
    pair: Pair
    compute_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    nbytes: float = 0.0
    pack_s: float = 0.0
    link_s: float = 0.0

    def run(self, number: int, num_tokens: int, chunk: int, is_measured: bool) -> None:
        rank, target = self.pair.prefill, self.pair.target
        token_ids = tuple(random.randrange(3, 1000) for _ in range(num_tokens))
        source, blocks = (tuple(range(side.layout.num_blocks_for(num_tokens))) for side in (rank, target))
        rank.samples.clear()
        self.pair.push([Prompt(number, token_ids, 0, 0, source, blocks, ())], chunk)
        (trace,) = rank.thread.recent_traces(1)
        if not is_measured:
            return
        self.compute_s.append(trace.compute_end_s)
        self.exposed_s.append(trace.flushed_s - trace.compute_end_s)
        self.overlap.append(trace.overlap_ratio)
        self.nbytes = rank.samples["pd_serve_kv_transfer_bytes_total"]
        self.pack_s += rank.samples.get("pd_serve_kv_pack_seconds", 0.0)
        self.link_s += rank.samples["pd_serve_kv_transfer_seconds"]

    def figures(self) -> dict[str, float]:
        rounds = len(self.exposed_s)
        return {
            "bytes": self.nbytes,
            "compute_s": statistics.median(self.compute_s),
            "pack_s": self.pack_s / rounds,
            "link_s": self.link_s / rounds,
            "exposed_p50_s": statistics.median(self.exposed_s),
            "exposed_max_s": max(self.exposed_s),
            "overlap_ratio": statistics.mean(self.overlap),
        }


def measure(rounds: int, num_tokens: int, chunk: int) -> dict[str, dict[str, float]]:
    sizes = Sizes(MODEL, 2 * num_tokens, 256 * 1024, 32, verify=False)
    with ExitStack() as stack:
        arms: list[Arm] = []
        for index, (name, kinds) in enumerate(ARMS.items()):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"arm{index}-")))
            pair = Pair(folder, *kinds, sizes=sizes)
            stack.callback(pair.close)
            arms.append(Arm(name, pair))
        for turn in range(rounds + 1):
            for arm in arms[:: 1 if turn % 2 else -1]:
                arm.run(turn + 1, num_tokens, chunk, is_measured=turn > 0)
        return {arm.name: arm.figures() for arm in arms}


def table_of(figures: dict[str, dict[str, float]], title: str) -> Table:
    columns = ("arm", "MiB", "of zero copy", "compute ms", "pack ms", "pack MiB/s", "exposed ms (max)", "exposed, ratio", "arrived before")
    table = Table(*columns, title=title)
    plain: dict[str, float] = {}
    for name, row in figures.items():
        if name.endswith("as it lies"):
            plain = row
        speed = row["bytes"] / 2**20 / row["pack_s"] if row["pack_s"] else 0.0
        table.add_row(
            name,
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['bytes'] / plain['bytes']:.2f}",
            f"{row['compute_s'] * 1e3:.0f}",
            f"{row['pack_s'] * 1e3:.1f}",
            f"{speed:.0f}" if speed else "-",
            f"{row['exposed_p50_s'] * 1e3:.2f} ({row['exposed_max_s'] * 1e3:.2f})",
            f"{row['exposed_p50_s'] / plain['exposed_p50_s']:.2f}",
            f"{row['overlap_ratio']:.1%}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256, help="longest prefill chunk in tokens")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = measure(options.rounds, options.tokens, options.chunk)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1))
    title = f"{options.tokens} tokens in chunks of {options.chunk}, load {os.getloadavg()[0]:.1f}"
    Console(width=160).print(table_of(figures, title))


if __name__ == "__main__":
    main()
