"""`make bench`: the figures a release reports, measured on this machine with real processes, interleaved side by side.

    python -m tests.bench.speed [--quick] [--out FOLDER]

Time to first token disaggregated against colocated (one thread each, pinned to different cores, fresh prompts), hand-over
time, share of KV bytes pushed before the last layer finished, decode tokens/s at several batch sizes, and the layer-by-layer
trace of one 2,048-token request as a picture. Prints a table; writes speed.json and overlap.png.
Nothing here is asserted: a figure is compared with the other arm of the same minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.cluster import Cluster, running

LENGTHS = (128, 512, 2048)
BATCHES = (1, 8, 32)
ONE_CORE_EACH = {
    "engine.threads": "1",
    "prefill.engine.cpu_affinity": "0",
    "decode.engine.cpu_affinity": "1",
    "colocated.engine.cpu_affinity": "0",
    "engine.max_batch_tokens": "512",
    "kv.memory_bytes": str(512 * 1024 * 1024),
}


def fresh_prompt(length: int) -> list[int]:
    return [random.randrange(200, 48000) for _ in range(length)]


async def stream(client: httpx.AsyncClient, cluster: Cluster, prompt: Sequence[int], max_tokens: int) -> list[float]:
    """Seconds from sending the request to each arrival of text."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,
    }
    start, arrivals = time.perf_counter(), []
    async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter() - start)
    return arrivals


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def histogram(cluster: Cluster, address: str, name: str) -> dict[float, float]:
    """Cumulative counts by upper bound of a Prometheus histogram."""
    buckets: dict[float, float] = {}
    for line in httpx.get(f"{address}/metrics", timeout=5).text.splitlines():
        if line.startswith(f"{name}_bucket"):
            bound = line.split('le="')[1].split('"')[0]
            buckets[float(bound)] = buckets.get(float(bound), 0.0) + float(line.rpartition(" ")[2])
    return buckets


def histogram_quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    total = counts[-1][1] if counts else 0.0
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if total and count >= share * total:
            return lower + (bound - lower) * (share * total - below) / max(count - below, 1e-9)
        lower, below = bound, count
    return float("nan")


async def time_to_first_token(disaggregated: Cluster, colocated: Cluster, rounds: int, progress: Progress) -> dict[str, Any]:
    arms = {"disaggregated": disaggregated, "colocated": colocated}
    figures: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=120) as client:
        for length in LENGTHS:
            task = progress.add_task(f"TTFT at {length} tokens", total=rounds * 2)
            seconds: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(rounds):
                for name, cluster in list(arms.items())[:: 1 if turn % 2 else -1]:
                    seconds[name].append((await stream(client, cluster, fresh_prompt(length), 4))[0])
                    progress.advance(task)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            figures[str(length)] = {
                **{f"{name}_p50_s": value for name, value in medians.items()},
                "ratio": medians["disaggregated"] / medians["colocated"],
            }
    return figures


async def decode_speed(cluster: Cluster, progress: Progress, num_tokens: int) -> dict[str, float]:
    """Tokens per second of a whole batch between its first and its last token."""
    figures = {}
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=64)) as client:
        for batch in BATCHES:
            task = progress.add_task(f"decode at batch {batch}", total=1)
            runs = await asyncio.gather(*(stream(client, cluster, fresh_prompt(64), num_tokens) for _ in range(batch)))
            start, end = max(run[0] for run in runs), min(run[-1] for run in runs)
            inside = sum(sum(start < moment <= end for moment in run) for run in runs)
            figures[str(batch)] = inside / (end - start) if end > start else float("nan")
            progress.advance(task)
    return figures


def draw_overlap(trace: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 6))
    layers = trace["layers"]
    ordered = sorted(layers, key=lambda layer: layer["kv_written_s"])
    ends = [layer["kv_written_s"] for layer in ordered[1:]] + [trace["compute_end_s"]]
    for layer, end in zip(ordered, ends, strict=True):
        axes.barh(layer["layer"] + 0.2, 1e3 * (end - layer["kv_written_s"]), 0.35, 1e3 * layer["kv_written_s"], color="#4878a8")
        width = max(1e3 * (layer["push_end_s"] - layer["push_start_s"]), 2e-3 * 1e3 * trace["compute_end_s"])
        axes.barh(layer["layer"] - 0.2, width, 0.6, 1e3 * layer["push_start_s"], color="#d9822b", zorder=3)
    axes.axvline(1e3 * trace["compute_end_s"], color="black", linestyle=":")
    axes.set(xlabel="milliseconds since the first layer's KV", ylabel="layer")
    axes.set_title(
        f"{trace['num_tokens']} tokens over {trace['lane']}: compute (blue) and push (orange), overlap {trace['overlap_ratio']:.1%}"
    )
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def measure(quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures, and the trace of the longest request."""
    rounds = 3 if quick else 12
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        colocated = stack.enter_context(
            running(logs / "colocated", prefill=0, decode=0, colocated=1, dtype="bfloat16", settings=ONE_CORE_EACH)
        )
        cluster = stack.enter_context(running(logs / "disaggregated", dtype="bfloat16", settings=ONE_CORE_EACH))
        async with httpx.AsyncClient(timeout=120) as client:
            for arm in (cluster, colocated):
                for length in LENGTHS:
                    await stream(client, arm, fresh_prompt(length), 4)
        prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
        before = histogram(cluster, decode["address"], "pd_serve_handover_seconds")
        figures: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        figures["ttft"] = await time_to_first_token(cluster, colocated, rounds, progress)
        after = histogram(cluster, decode["address"], "pd_serve_handover_seconds")
        figures["handover_s"] = {f"p{share}": histogram_quantile(before, after, share / 100) for share in (50, 99)}
        async with httpx.AsyncClient(timeout=5) as client:
            traces = (await client.get(f"{prefill['address']}/control/traces")).json()["traces"]
        longest = max(traces, key=lambda trace: (trace["num_tokens"], trace["overlap_ratio"]))
        figures["overlap"] = {str(trace["num_tokens"]): trace["overlap_ratio"] for trace in traces}
        figures["decode_tokens_per_s"] = await decode_speed(cluster, progress, 48 if quick else 128)
        figures["transfer"] = {
            "bytes": cluster.metric(prefill["address"], "pd_serve_kv_transfer_bytes_total"),
            "seconds": cluster.metric(prefill["address"], "pd_serve_kv_transfer_seconds_sum"),
        }
    return figures, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for the results")
    arguments = parser.parse_args()
    figures, longest = asyncio.run(measure(arguments.quick))
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    draw_overlap(longest, out / "overlap.png")
    (out / "overlap.json").write_text(json.dumps(longest, indent=1))
    (out / "speed.json").write_text(json.dumps(figures, indent=1))
    table = Table("figure", "value", title="pd-serve on this machine")
    for length, row in figures["ttft"].items():
        table.add_row(
            f"TTFT p50 at {length} tokens",
            f"{row['disaggregated_p50_s'] * 1e3:.0f} ms, colocated {row['colocated_p50_s'] * 1e3:.0f} ms, ratio {row['ratio']:.3f}",
        )
    table.add_row("hand-over", ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in figures["handover_s"].items()))
    for batch, value in figures["decode_tokens_per_s"].items():
        table.add_row(f"decode tokens/s at batch {batch}", f"{value:.0f}")
    table.add_row("KV pushed before the last layer ended", ", ".join(f"{k}: {v:.1%}" for k, v in figures["overlap"].items()))
    Console().print(table)


if __name__ == "__main__":
    main()
