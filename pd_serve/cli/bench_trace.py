"""`pd-serve bench trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_serve.cli.bench_options import (
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

_TRACE = "Trace"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench trace mooncake.jsonl --url http://127.0.0.1:8000 --minutes 5\n\n"
    "  pd-serve bench trace mooncake.jsonl --arm ours=1p1d --limit 60 --block-tokens 32 --max-output 32 --speed-up 1,2\n\n"
    "  pd-serve bench trace AzureLLMInferenceTrace_conv.csv --arm ours=1p1d --arm colocated=1c --limit 50 --max-input 1024"
)


def trace(
    file: Annotated[Path, typer.Argument(help="Mooncake trace (JSON lines with hash_ids) or Azure trace (CSV)")],
    url: UrlOption = "",
    arm: ArmOption = None,
    prefill: PrefillOption = 0,
    decode: DecodeOption = 0,
    colocated: ColocatedOption = 0,
    model: BenchModelOption = "",
    set_: ClusterSetOption = None,
    timeout: TimeoutOption = 600.0,
    api_key: KeyOption = "",
    speed_up: Annotated[str, typer.Option("--speed-up", help="How many times as fast; several: 1,2,4", rich_help_panel=_TRACE)] = "1",
    limit: Annotated[int, typer.Option("--limit", min=0, help="First so many requests; 0: all", rich_help_panel=_TRACE)] = 0,
    minutes: Annotated[float, typer.Option("--minutes", min=0.0, help="First so many minutes; 0: all", rich_help_panel=_TRACE)] = 0.0,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=1, max=512, help="Tokens per hash id: prompts shrink by this / 512", rich_help_panel=_TRACE)
    ] = 512,
    max_input: Annotated[int, typer.Option("--max-input", min=0, help="Cut prompts to so many tokens", rich_help_panel=_TRACE)] = 0,
    max_output: Annotated[int, typer.Option("--max-output", min=0, help="Cut answers to so many tokens", rich_help_panel=_TRACE)] = 0,
    vocab: VocabOption = 32_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the tokens that hash ids stand for", rich_help_panel=_TRACE)] = 0,
    save_plans: Annotated[
        Path | None, typer.Option("--save-plans", help="Write the requests at the first speed to this file", rich_help_panel=_TRACE)
    ] = None,
    rounds: RoundsOption = 1,
    warmup: WarmupOption = 2,
    slo_ttft_ms: SloTtftOption = 0.0,
    slo_itl_ms: SloItlOption = 0.0,
    slo_tpot_ms: SloTpotOption = 0.0,
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Replay a published trace: its arrivals, lengths and shared prefixes; latency, goodput, hit rate, rejected share."""
    from pd_serve.bench.arms import ClientSettings
    from pd_serve.bench.load import LoadSettings, Point, run_load
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.runner import run
    from pd_serve.bench.trace import Scaling, SpedUp, TracePlans, read_trace
    from pd_serve.bench.workload import LengthRange, Workload, write_plans
    from pd_serve.cli.bench_show import show

    requests = read_trace(file, limit, minutes)
    speeds = numbers("--speed-up", speed_up)
    scalings = [Scaling(block_tokens, max_input, max_output, vocab, seed + index) for index in range(len(speeds))]
    plans = [SpedUp(TracePlans(requests, scaling), speed) for scaling, speed in zip(scalings, speeds, strict=True)]
    settings = LoadSettings(
        arms=ArmChoice(url, arm or (), prefill, decode, colocated, model, set_ or ()).specs(),
        client=ClientSettings(model, api_key, timeout),
        points=tuple(Point(speed_up=speed) for speed in speeds),
        workload=Workload(len(requests), LengthRange(1, 1), LengthRange(1, 1), vocab=vocab, seed=seed),
        slo=slo(slo_ttft_ms, slo_itl_ms, slo_tpot_ms),
        plans=tuple(plans),
        num_rounds=rounds,
        num_warmups=warmup,
        kind="trace",
        name=name or file.stem,
        parameters=(
            ("trace", file.name),
            ("block_tokens", block_tokens),
            ("max_input", max_input),
            ("max_output", max_output),
            ("ideal_prefix_hit_rate", TracePlans(requests, scalings[0]).ideal_hit_rate()),
        ),
    )
    if save_plans is not None:
        write_plans(save_plans, plans[0])
    path = result_path(out, "trace", settings.name)
    with Bars(json) as bars:
        result = run(run_load(settings, path, bars))
    show(result, path, as_json=json)
    return 0
