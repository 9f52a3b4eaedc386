"""Parts of `make bench-gpu` that serve: hand-over and interference of one prefill and one decode worker, by the tools of `pd-serve bench`.

With one GPU both workers share it, and interference through its compute is to be expected; with two each has its own.
"""

from __future__ import annotations

import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from pd_serve.bench.cluster import ClusterSpec
from pd_serve.bench.handover import HandoverSettings, run_handover
from pd_serve.bench.interference import InterferenceSettings, run_interference
from pd_serve.bench.progress import Bars
from pd_serve.bench.results import Result
from pd_serve.bench.runner import run
from pd_serve.bench.victims import VictimsTest
from tests.bench.gpu_figures import Figure, Task

_BUDGET = 2048
"""Of the colocated worker: no time to look for the best."""


_SHOWN = (
    "ttft_s.p50",
    "handover_s.*",
    "exposed_s.p50",
    "exposed_layers.p50",
    "overlap_ratio.p50",
    "phase_s.*",
    "victim_tokens_per_s",
    "itl_s.*",
    "baseline_itl_s.*",
    "itl_ratio.*",
    "victim_ttft_s.p50",
    "long_ttft_s.p50",
    "failed",
)
"""Of the tools' figures; they have many more."""


def measure_handover(task: Task) -> list[Figure]:
    settings = HandoverSettings(
        lengths=(64,) if task.is_rehearsal else (128, 512, 2048),
        num_requests=2 if task.is_rehearsal else 8,
        base=_cluster(task),
        has_colocated=False,
    )
    with tempfile.TemporaryDirectory() as folder, Bars(True) as bars:
        return _figures(run(run_handover(settings, Path(folder) / "handover.json", bars)))


def measure_interference(task: Task) -> list[Figure]:
    test = VictimsTest(
        slots=4,
        victim_tokens=64 if task.is_rehearsal else 1024,
        long_tokens=64 if task.is_rehearsal else 2048,
        count=1 if task.is_rehearsal else 4,
        interval_s=1.0,
        lead_s=1.0,
        vocab=300,
    )
    settings = InterferenceSettings(test=test, cores=None, base=_cluster(task), budget=_BUDGET)
    with tempfile.TemporaryDirectory() as folder, Bars(True) as bars:
        path = Path(folder) / "interference.json"
        return _figures(run(run_interference(settings, Path(folder) / "sweep.json", path, bars)))


def _cluster(task: Task) -> ClusterSpec:
    settings = {
        "model.load_format": "random",
        "model.dtype": "bfloat16",
        "model.max_len": "4096",
        "engine.device": task.device,
        "engine.max_batch_tokens": str(_BUDGET),
        "engine.max_running": "64",
        "kv.block_size": str(task.block_size),
        "kv.num_blocks": str((1 << 16 if not task.is_rehearsal else 1 << 14) // task.block_size),
    }
    return ClusterSpec(model=task.folder, settings=settings)


def _figures(result: Result) -> list[Figure]:
    return [
        Figure(f"{arm}: {name}", value, "s" if "_s." in name else "")
        for arm, found in result.arms.items()
        for name, value in found.figures.items()
        if any(fnmatchcase(name, pattern) for pattern in _SHOWN)
    ]
