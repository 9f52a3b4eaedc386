"""`pd-serve plan simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_serve.cli.options import ConfigOption, JsonOption, SetOption, sources

_WORKERS = "Workers"
_FLEET = "The fleet"
_LOAD = "The load"
_LIMITS = "Limits (goodput)"
_RUN = "The run"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve plan simulate --model Llama-3.1-8B --gpu H100 --gpus 8 --input 4000 --output 250 --slo-ttft-ms 1000 --slo-itl-ms 30\n\n"
    "  pd-serve plan simulate --workers worker.json --prefill 1 --decode 1 --rate 2 --slo-ttft-ms 2000 --slo-itl-ms 100\n\n"
    "  pd-serve plan simulate --model Llama-3.1-70B --gpu H100 --tp 4,8 --gpus 16 --trace mooncake.jsonl --limit 2000 \\\n"
    "    --slo-ttft-ms 5000 --slo-itl-ms 60 --out plan --emit compose"
)


def simulate(
    workers: Annotated[
        list[str] | None,
        typer.Option(
            "--workers",
            metavar="[ROLE=]FILE",
            help="Worker model of `pd-serve bench fit`; of one role: decode=FILE; several of a role: TP degrees to choose from",
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="config.json, its folder, a hub id or a published name", rich_help_panel=_WORKERS)
    ] = "",
    gpu: Annotated[
        str, typer.Option("--gpu", help="Accelerator whose published peaks stand in for measurements: H100, ...", rich_help_panel=_WORKERS)
    ] = "",
    tp: Annotated[
        str, typer.Option("--tp", help="TP degrees of workers, with --gpu; several to choose from: 1,2,4", rich_help_panel=_WORKERS)
    ] = "1",
    efficiency: Annotated[
        float,
        typer.Option("--efficiency", min=0.01, max=1.0, help="Share of the peaks that is reached, with --gpu", rich_help_panel=_WORKERS),
    ] = 0.5,
    link: Annotated[
        str, typer.Option("--link", help="Of each worker, each way: 200Gb/s, nvlink, shm, 12.5GB/s, ...", rich_help_panel=_WORKERS)
    ] = "200Gb/s",
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Prefill workers", rich_help_panel=_FLEET)] = 0,
    decode: Annotated[int, typer.Option("--decode", min=0, help="Decode workers", rich_help_panel=_FLEET)] = 0,
    colocated: Annotated[int, typer.Option("--colocated", min=0, help="Workers for both phases", rich_help_panel=_FLEET)] = 0,
    chunk_budget: Annotated[
        str, typer.Option("--chunk-budget", help="Tokens of a colocated step; several: 256,512; empty: the best", rich_help_panel=_FLEET)
    ] = "",
    gpus: Annotated[
        int, typer.Option("--gpus", min=0, help="Search the split of so many GPUs (or cores) with most goodput", rich_help_panel=_FLEET)
    ] = 0,
    grid: Annotated[
        bool, typer.Option("--grid", help="With --gpus: try every split that fits, also those that leave GPUs idle", rich_help_panel=_FLEET)
    ] = False,
    fail: Annotated[
        list[str] | None,
        typer.Option("--fail", metavar="WORKER@T+DOWN", help="A worker dies and comes back: decode-0@60+30", rich_help_panel=_FLEET),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Replay this trace (Mooncake JSON lines or Azure CSV)", rich_help_panel=_LOAD)
    ] = None,
    speed_up: Annotated[
        float,
        typer.Option("--speed-up", min=0.0, max=1e4, help="How many times as fast as it was; 0: as fast as goodput", rich_help_panel=_LOAD),
    ] = 1.0,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.0, max=1e6, help="First minutes of the trace; 0: all", rich_help_panel=_LOAD)
    ] = 0.0,
    max_input: Annotated[int, typer.Option("--max-input", min=0, help="Cut prompts of the trace", rich_help_panel=_LOAD)] = 0,
    max_output: Annotated[int, typer.Option("--max-output", min=0, help="Cut answers of the trace", rich_help_panel=_LOAD)] = 0,
    rate: Annotated[
        float, typer.Option("--rate", min=0.0, help="Requests per second in the mean; 0: as goodput", rich_help_panel=_LOAD)
    ] = 0.0,
    input_: Annotated[
        str, typer.Option("--input", help="Prompt tokens: 512, 128-2048 or lognormal:512:0.9", rich_help_panel=_LOAD)
    ] = "512",
    output: Annotated[str, typer.Option("--output", help="Output tokens, likewise", rich_help_panel=_LOAD)] = "128",
    burst: Annotated[
        str, typer.Option("--burst", metavar="F:EVERY:LENGTH", help="Rate F times as high: 4:60:5", rich_help_panel=_LOAD)
    ] = "",
    turns: Annotated[
        int, typer.Option("--turns", min=1, help="Mean turns of a conversation; 1: requests share nothing", rich_help_panel=_LOAD)
    ] = 1,
    think_s: Annotated[
        float, typer.Option("--think-s", min=0.0, max=86400.0, help="Mean seconds between two turns", rich_help_panel=_LOAD)
    ] = 20.0,
    system_tokens: Annotated[
        int,
        typer.Option("--system-tokens", min=0, max=1 << 20, help="Tokens at the head that all conversations share", rich_help_panel=_LOAD),
    ] = 512,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Requests; 0: the whole trace, 2000 of a synthetic load", rich_help_panel=_LOAD)
    ] = 0,
    scale: Annotated[
        float, typer.Option("--scale", min=0.0, max=1e4, help="Look at the load so many times as fast besides: 10", rich_help_panel=_LOAD)
    ] = 0.0,
    slo_ttft_ms: Annotated[
        float, typer.Option("--slo-ttft-ms", min=0.0, max=1e9, help="Limit of time to first token", rich_help_panel=_LIMITS)
    ] = 0.0,
    slo_itl_ms: Annotated[
        float, typer.Option("--slo-itl-ms", min=0.0, max=1e9, help="Limit that 99 % of a request's gaps keep", rich_help_panel=_LIMITS)
    ] = 0.0,
    one_load: Annotated[
        bool,
        typer.Option("--one-load", help="Look at the load only: no goodput, which takes a dozen runs of each fleet", rich_help_panel=_RUN),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and what workers draw", rich_help_panel=_RUN)] = 0,
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="Fleets tried at once; 0: as many as there are cores", rich_help_panel=_RUN)
    ] = 0,
    config: ConfigOption = None,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for pictures and study.json", rich_help_panel=_RUN)] = None,
    emit: Annotated[
        str, typer.Option("--emit", help="`compose`: write a compose file and settings for the fleet into --out", rich_help_panel=_RUN)
    ] = "",
    json: JsonOption = False,
) -> int:
    """What a load would do to a fleet: the router's own code on a virtual clock; goodput, the best split, one pool beside it."""
    from pd_serve.cli.plan_simulate_inputs import Fleet, Inputs, LoadOptions, WorkerOptions
    from pd_serve.cli.plan_simulate_run import RunOptions, run

    inputs = Inputs(
        workers=WorkerOptions(tuple(workers or ()), model, gpu, tp, efficiency, link),
        fleet=Fleet(prefill, decode, colocated, chunk_budget, gpus, grid, tuple(fail or ())),
        load=LoadOptions(
            trace=trace,
            speed_up=speed_up,
            minutes=minutes,
            max_input=max_input,
            max_output=max_output,
            rate=rate,
            input=input_,
            output=output,
            burst=burst,
            turns=turns,
            think_s=think_s,
            system_tokens=system_tokens,
            limit=limit,
            scale=scale,
        ),
        slo_ttft_ms=slo_ttft_ms,
        slo_itl_ms=slo_itl_ms,
        has_goodput=not one_load,
        seed=seed,
        settings=sources(config, set_, ()),
    )
    return run(inputs, RunOptions(processes, out, emit, json))
