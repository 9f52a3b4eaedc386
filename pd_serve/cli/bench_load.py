"""`pd-serve bench load`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_serve.cli.bench_options import (
    REQUESTS,
    ArmChoice,
    ArmOption,
    BenchModelOption,
    ClusterSetOption,
    ColocatedOption,
    DecodeOption,
    NameOption,
    OutOption,
    PrefillOption,
    RoundsOption,
    SloItlOption,
    SloTpotOption,
    SloTtftOption,
    TimeoutOption,
    UrlOption,
    VocabOption,
    WarmupOption,
    numbers,
    slo,
)
from pd_serve.cli.options import JsonOption, KeyOption
from pd_serve.errors import ConfigError

_LOAD = "Load"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench load --url http://127.0.0.1:8000 --rate 2,4,8 --duration 30 --slo-ttft-ms 500 --slo-tpot-ms 50\n\n"
    "  pd-serve bench load --arm disaggregated=1p1d --arm colocated=1c --concurrency 1 --input 512 --rounds 8\n\n"
    "  pd-serve bench load --arm ours=http://127.0.0.1:8000 --arm theirs=http://127.0.0.1:9000 --rate 1 --rounds 4"
)


def load(
    url: UrlOption = "",
    arm: ArmOption = None,
    prefill: PrefillOption = 0,
    decode: DecodeOption = 0,
    colocated: ColocatedOption = 0,
    model: BenchModelOption = "",
    set_: ClusterSetOption = None,
    timeout: TimeoutOption = 600.0,
    api_key: KeyOption = "",
    rate: Annotated[str, typer.Option("--rate", help="Open loop: requests per second; several: 1,2,4", rich_help_panel=_LOAD)] = "",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Closed loop: requests open at once; several: 1,8,32", rich_help_panel=_LOAD)
    ] = "",
    arrivals: Annotated[str, typer.Option("--arrivals", help="Of an open loop: poisson or constant", rich_help_panel=_LOAD)] = "poisson",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests at each load", rich_help_panel=_LOAD)] = 64,
    duration: Annotated[
        float, typer.Option("--duration", min=0.0, help="Seconds of sending at each rate, instead of --requests", rich_help_panel=_LOAD)
    ] = 0.0,
    rounds: RoundsOption = 1,
    warmup: WarmupOption = 2,
    input_: Annotated[str, typer.Option("--input", help="Prompt tokens: 512, or 128-2048 (uniform)", rich_help_panel=REQUESTS)] = "512",
    output: Annotated[str, typer.Option("--output", help="Output tokens: 128, or 16-256 (uniform)", rich_help_panel=REQUESTS)] = "128",
    lengths: Annotated[
        Path | None,
        typer.Option(
            "--lengths", help="File with a line `prompt,output` per request, instead of --input, --output", rich_help_panel=REQUESTS
        ),
    ] = None,
    prefix: Annotated[
        int, typer.Option("--prefix", min=0, help="Tokens at the head of each prompt that others share", rich_help_panel=REQUESTS)
    ] = 0,
    prefixes: Annotated[int, typer.Option("--prefixes", min=1, help="Different shared heads", rich_help_panel=REQUESTS)] = 1,
    vocab: VocabOption = 32_000,
    plans: Annotated[
        Path | None, typer.Option("--plans", help="Send the requests of this file, as --save-plans wrote it", rich_help_panel=REQUESTS)
    ] = None,
    save_plans: Annotated[
        Path | None, typer.Option("--save-plans", help="Write the requests of the first load to this file", rich_help_panel=REQUESTS)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and prompts", rich_help_panel=REQUESTS)] = 0,
    slo_ttft_ms: SloTtftOption = 0.0,
    slo_itl_ms: SloItlOption = 0.0,
    slo_tpot_ms: SloTpotOption = 0.0,
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Send requests at one or several loads: TTFT, ITL, TPOT, E2E, tokens/s, goodput. Several arms take turns."""
    from pd_serve.bench.arms import ClientSettings
    from pd_serve.bench.load import LoadSettings, Point, plans_of, run_load
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.runner import run
    from pd_serve.bench.workload import Arrivals, LengthRange, Workload, read_length_pairs, read_plans, write_plans
    from pd_serve.cli.bench_show import show

    points = [Point(rate=value) for value in numbers("--rate", rate)]
    points += [Point(concurrency=int(value)) for value in numbers("--concurrency", concurrency)]
    if arrivals not in [one.value for one in Arrivals]:
        raise ConfigError(f"--arrivals {arrivals}: expected poisson or constant")
    workload = Workload(
        num_requests=requests,
        input_length=LengthRange.parse(input_),
        output_length=LengthRange.parse(output),
        arrivals=Arrivals(arrivals),
        pairs=read_length_pairs(lengths) if lengths is not None else (),
        prefix_tokens=prefix,
        num_prefixes=prefixes,
        vocab=vocab,
        seed=seed,
    )
    if plans is None and not points:
        points = [Point(concurrency=1)]
    settings = LoadSettings(
        arms=ArmChoice(url, arm or (), prefill, decode, colocated, model, set_ or ()).specs(),
        client=ClientSettings(model, api_key, timeout),
        points=tuple(points) or (Point(),),
        workload=workload,
        slo=slo(slo_ttft_ms, slo_itl_ms, slo_tpot_ms),
        plans=(read_plans(plans),) if plans is not None else (),
        duration_s=duration,
        num_rounds=rounds,
        num_warmups=warmup,
        name=name,
    )
    if save_plans is not None:
        write_plans(save_plans, plans_of(settings, 0))
    path = result_path(out, "load", name)
    with Bars(json) as bars:
        result = run(run_load(settings, path, bars))
    show(result, path, as_json=json)
    return 0
