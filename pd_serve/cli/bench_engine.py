"""`pd-serve bench engine`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pd_serve.cli.bench_options import BenchModelOption, NameOption, OutOption, numbers
from pd_serve.cli.options import DtypeOption, JsonOption, SetOption
from pd_serve.errors import ConfigError

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench engine\n\n"
    "  pd-serve bench engine --batch 1,8,32 --context 256,1024 --threads 2\n\n"
    "  pd-serve bench engine --growth"
)


def engine(
    model: BenchModelOption = "",
    dtype: DtypeOption = None,
    set_: SetOption = None,
    cpu_ops: Annotated[str, typer.Option("--cpu-ops", help="Arms: values of engine.cpu_ops")] = "off,auto",
    batch: Annotated[str, typer.Option("--batch", help="Sequences in a decode step: 1,8,16")] = "1,8,16",
    context: Annotated[str, typer.Option("--context", help="Tokens that each of them sees: 256,1024")] = "256",
    prefill: Annotated[str, typer.Option("--prefill", help="Prompt lengths: 512,2048; empty: none")] = "512,2048",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Compute threads")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each case is computed by each arm")] = 12,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also: what a step costs besides arithmetic, by sequences, layers and prompt length")
    ] = False,
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Compute steps without server or scheduler: decode against the memory's speed, prefill, and how the host's work grows."""
    from pd_serve.bench.engine import EngineOptions, run_engine
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path, write_result
    from pd_serve.cli.bench_show import show
    from pd_serve.cli.options import sources
    from pd_serve.config_sources import load_config
    from pd_serve.cores import thread_env

    # Read when torch is imported, which only happens below.
    os.environ.update(thread_env(threads))
    choices = tuple(filter(None, (choice.strip() for choice in cpu_ops.split(","))))
    if not choices or not set(choices) <= {"off", "auto", "on"} or len(set(choices)) != len(choices):
        raise ConfigError(f"--cpu-ops {cpu_ops}: expected one or several of off, auto, on")
    flags = (("--model", "model.id", model or None), ("--dtype", "model.dtype", dtype))
    options = EngineOptions(
        settings=load_config(sources(None, set_, flags)),
        cpu_ops=choices,
        batches=tuple(int(value) for value in numbers("--batch", batch)),
        contexts=tuple(int(value) for value in numbers("--context", context)),
        prefill=tuple(int(value) for value in numbers("--prefill", prefill)),
        rounds=rounds,
        threads=threads,
        has_growth=growth,
        name=name,
    )
    path = result_path(out, "engine", name)
    with Bars(json) as bars:
        result = run_engine(options, bars)
    write_result(path, result)
    show(result, path, as_json=json)
    return 0
