"""`pd-serve bench fit`."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_serve.cli.bench_options import (
    ArmChoice,
    ArmOption,
    BenchModelOption,
    ClusterSetOption,
    CoresOption,
    NameOption,
    OutOption,
    TimeoutOption,
    UrlOption,
    VocabOption,
    cores_of,
    numbers,
)
from pd_serve.cli.options import JsonOption, KeyOption
from pd_serve.errors import ConfigError

_FIT = "What is fitted"
_LENGTHS = "33,64,100,180,257,300,384,430,500,512,900,1400"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench fit --arm ours=1p1d --out models/       models/fit-….json, and a worker model for each role beside it\n\n"
    "  pd-serve bench fit --url http://127.0.0.1:8000 --gpus 1 --lengths 256,1024,4096,16384 --contexts 4096,1024,256\n\n"
    "  pd-serve plan simulate --help                          what the models are for"
)


def fit(
    url: UrlOption = "",
    arm: ArmOption = None,
    model: BenchModelOption = "",
    set_: ClusterSetOption = None,
    cores_per_role: CoresOption = 0,
    timeout: TimeoutOption = 600.0,
    api_key: KeyOption = "",
    lengths: Annotated[
        str, typer.Option("--lengths", help="Prompts, tokens, one at a time; odd ones too: kernels round up", rich_help_panel=_FIT)
    ] = _LENGTHS,
    contexts: Annotated[
        str, typer.Option("--contexts", help="Prompts of streams that decode together", rich_help_panel=_FIT)
    ] = "640,256,64",
    stairs: Annotated[
        str, typer.Option("--stairs", help="Streams together, ending from one number to the next", rich_help_panel=_FIT)
    ] = "16,12,8,6,4,3,2,1",
    steps: Annotated[int, typer.Option("--steps", min=4, help="Decode steps with each number of streams", rich_help_panel=_FIT)] = 16,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of each prompt", rich_help_panel=_FIT)] = 4,
    gpus: Annotated[
        int, typer.Option("--gpus", min=0, help="Of each worker, to divide by; 0: its compute threads, or 1", rich_help_panel=_FIT)
    ] = 0,
    limit: Annotated[
        float, typer.Option("--limit", min=0.0, help="Cores that others may take meanwhile; above: refused", rich_help_panel=_FIT)
    ] = 0.25,
    vocab: VocabOption = 32_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts", rich_help_panel=_FIT)] = 0,
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Fit step times of one prefill and one decode worker (or a colocated one): worker models for `pd-serve plan`."""
    from dataclasses import replace

    from pd_serve.bench.arms import ClientSettings
    from pd_serve.bench.fit import FitSettings, run_fit
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.runner import run
    from pd_serve.cli.bench_show import show
    from pd_serve.plan.fitted import worker_models, write_models

    (spec, *more) = ArmChoice(url, arm or (), model=model, sets=set_ or ()).specs(["fitted=1p1d"])
    if more:
        raise ConfigError("one arm is fitted at a time")
    cores = cores_of(cores_per_role)
    if cores is not None and spec.cluster is not None:
        pinned = cores.apart() if spec.cluster.decode else cores.alone()
        spec = replace(spec, cluster=replace(spec.cluster, settings={**pinned, **spec.cluster.settings}))
    settings = FitSettings(
        arm=spec,
        client=ClientSettings(model, api_key, timeout),
        lengths=_counts("--lengths", lengths),
        num_repeats=repeats,
        stairs=_counts("--stairs", stairs),
        contexts=_counts("--contexts", contexts),
        num_steps=steps,
        num_gpus=gpus,
        limit_cores=limit,
        vocab=vocab,
        seed=seed,
        name=name,
    )
    path = result_path(out, "fit", name)
    with Bars(json) as bars:
        result, found = run(run_fit(settings, path, bars))
    written = write_models(worker_models(found), path.parent, path.stem)
    show(result, path, as_json=json)
    if not json:
        print(f"worker models: {', '.join(map(str, written))}")
    return 0


def _counts(option: str, text: str) -> tuple[int, ...]:
    """Raises ConfigError."""
    found = tuple(int(value) for value in numbers(option, text) if value >= 1)
    if not found:
        raise ConfigError(f"{option} {text}: expected numbers of 1 and more")
    return found
