"""Fit, load, fit on one cluster, and the simulator's word on the load: the runs of docs/planning.md, "Worker models and validation".

    python -m tests.bench.plan_validate light|near FOLDER            Poisson; results in FOLDER, as `pd-serve plan validate` reads them
    python -m tests.bench.plan_validate TRACE FOLDER                 a Mooncake trace, shrunk to blocks of 32 tokens

A machine's speed drifts: what is fitted minutes before a load describes other minutes. Here prompts and streams are measured right before
the load and right after it, on the very processes that served it, and all samples are fitted together; both fits apart tell the drift.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pd_serve.bench.arms import ArmSpec, ClientSettings, opened
from pd_serve.bench.cluster import ClusterSpec
from pd_serve.bench.cores import share_cores
from pd_serve.bench.fit import Fit, FitSettings, fit_samples, measure_samples
from pd_serve.bench.machine import MachineWatch
from pd_serve.bench.progress import Bars
from pd_serve.bench.records import RequestPlan
from pd_serve.bench.results import ArmResult, Described, new_result, write_records, write_result
from pd_serve.bench.runner import open_loop, run
from pd_serve.bench.statistics import load_figures
from pd_serve.bench.trace import Scaling, SpedUp, TracePlans, read_trace
from pd_serve.bench.workload import LengthRange, Workload, make_plans, write_plans
from pd_serve.cli.app import run as pd_serve
from pd_serve.plan.fitted import worker_models, write_models

LIGHT = Workload(36, LengthRange(64, 512), LengthRange(16, 96), rate=0.8, seed=1)
NEAR = Workload(100, LengthRange(64, 768), LengthRange(16, 96), rate=2.2, seed=2)
TRACE_MINUTES, TRACE_SPEED = 0.3, 0.4
TRACE = Scaling(block_tokens=32, max_input=1536, max_output=48)


def plans_of(load: str) -> Sequence[RequestPlan]:
    if load in ("light", "near"):
        return make_plans(LIGHT if load == "light" else NEAR)
    return list(SpedUp(TracePlans(read_trace(Path(load), minutes=TRACE_MINUTES), TRACE), TRACE_SPEED))


async def measure(load: str, folder: Path) -> Path:
    """The result of the load; the fit lies beside it."""
    arm_spec = ArmSpec("ours", cluster=ClusterSpec(prefill=1, decode=1, settings=share_cores(1).apart()))
    settings = FitSettings(arm_spec, num_repeats=2, num_steps=12)
    plans = plans_of(load)
    name = load if load in ("light", "near") else "trace"
    path = folder / f"{name}.json"
    with Bars(quiet=True) as bars:
        async with opened([arm_spec], ClientSettings(), bars) as (arm,):
            before = await measure_samples(arm, settings, bars)
            with MachineWatch() as watch:
                records = await open_loop(arm.endpoint, plans)
            after = await measure_samples(arm, replace(settings, seed=1), bars)
            config = arm.config
    arms = {"ours": ArmResult(load_figures(records).figures(), write_records(path, "ours", records), {"arm": "ours"})}
    write_result(path, new_result(Described("load" if name != "trace" else "trace", name, {}, config), watch.load, arms))
    write_plans(folder / f"{name}.plans.jsonl", plans)
    fits = {"fit-before": fit_samples([before]), "fit-after": fit_samples([after]), "fit": fit_samples([before, after])}
    for kind, fit in fits.items():
        file = folder / f"{name}-{kind}.json"
        figures = {"bandwidth_bytes_per_s": fit.bandwidth_bytes_per_s}
        write_result(file, new_result(Described("fit", name, {}, config), watch.load, {"ours": ArmResult(figures)}))
        write_models(worker_models(fit), folder, file.stem)
        tell(kind, fit)
    print(f"load by others {watch.load.others_cores:.2f} cores, most in a second {watch.load.others_cores_max:.2f}", flush=True)
    return path


def tell(kind: str, fit: Fit) -> None:
    prompts = fit.prompts.fitted
    parts = ", ".join(f"{1e3 * value:.4g}" for value in prompts.coefficients)
    steps = ", ".join(f"{1e3 * value:.4g}" for value in fit.steps.fitted.coefficients)
    print(
        f"{kind}: prompts {parts} ms, calls {fit.prompts.call_sizes}, R2 {fit.prompts.fitted.r2:.4f}, worst {fit.prompts.fitted.worst:.1%}"
    )
    print(f"    steps {steps} ms, R2 {fit.steps.fitted.r2:.4f}, worst {fit.steps.fitted.worst:.1%}")
    print(f"    hand-over {1e3 * fit.handover_s:.2f} ms, request {1e3 * fit.request_s:.2f} ms")


def main(load: str, folder: Path) -> int:
    path = run(measure(load, folder))
    fit, plans = path.with_name(f"{path.stem}-fit.json"), path.with_suffix(".plans.jsonl")
    return pd_serve(["plan", "validate", str(path), "--fit", str(fit), "--plans", str(plans)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
