"""`pd-serve plan ratio`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_serve.cli.options import ConfigOption, JsonOption, SetOption, sources
from pd_serve.errors import ConfigError

if TYPE_CHECKING:
    from pd_serve.plan.measured import Measured, Phase
    from pd_serve.plan.ratio import Demand
    from pd_serve.plan.trace_demand import TraceDemand

_LOAD = "The load"
_SUPPLY = "What an instance does"
_MEASURE = "Measure it on a running system"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve plan ratio --rate 30 --input 2000 --output 300 --prefill-tokens-per-s 20000 --decode-tokens-per-s 3000\n\n"
    "  pd-serve plan ratio --input 4000 --output 500 --prefill-tokens-per-s 4000 --decode-tokens-per-s 500 --per-gpu --total-gpus 16\n\n"
    "  pd-serve plan ratio --trace mooncake.jsonl --prefill-tokens-per-s 30000 --decode-tokens-per-s 2500 --utilisation 0.8\n\n"
    "  pd-serve plan ratio --measure http://127.0.0.1:8000 --for 60 --rate 5     under load: pd-serve bench load, beside it"
)


def ratio(
    rate: Annotated[
        float, typer.Option("--rate", min=0.0, help="Requests per second; 0: of the trace or the system, if any", rich_help_panel=_LOAD)
    ] = 0.0,
    input_: Annotated[float, typer.Option("--input", min=0.0, help="Prompt tokens of a request, mean", rich_help_panel=_LOAD)] = 0.0,
    output: Annotated[float, typer.Option("--output", min=0.0, help="Output tokens of a request, mean", rich_help_panel=_LOAD)] = 0.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Mooncake or Azure trace: lengths, mean and busiest rate", rich_help_panel=_LOAD)
    ] = None,
    speed_up: Annotated[float, typer.Option("--speed-up", help="Of the trace: how many times as fast", rich_help_panel=_LOAD)] = 1.0,
    hit_rate: Annotated[
        float, typer.Option("--hit-rate", min=0.0, help="Share of prompt tokens found in prefix caches", rich_help_panel=_LOAD)
    ] = 0.0,
    utilisation: Annotated[
        float, typer.Option("--utilisation", help="Share of the time that an instance may be busy; 1: no head-room", rich_help_panel=_LOAD)
    ] = 1.0,
    total_gpus: Annotated[
        int, typer.Option("--total-gpus", min=0, help="Share out so many GPUs for the highest rate", rich_help_panel=_LOAD)
    ] = 0,
    prefill_tokens_per_s: Annotated[
        float, typer.Option("--prefill-tokens-per-s", min=0.0, help="T_P: prompt tokens it computes", rich_help_panel=_SUPPLY)
    ] = 0.0,
    decode_tokens_per_s: Annotated[
        float, typer.Option("--decode-tokens-per-s", min=0.0, help="T_D: tokens it generates, all its sequences", rich_help_panel=_SUPPLY)
    ] = 0.0,
    prefill_gpus: Annotated[int, typer.Option("--prefill-gpus", min=1, help="GPUs of a prefill instance", rich_help_panel=_SUPPLY)] = 1,
    decode_gpus: Annotated[int, typer.Option("--decode-gpus", min=1, help="GPUs of a decode instance", rich_help_panel=_SUPPLY)] = 1,
    per_gpu: Annotated[bool, typer.Option("--per-gpu", help="T_P and T_D are of one GPU", rich_help_panel=_SUPPLY)] = False,
    measure: Annotated[
        str, typer.Option("--measure", metavar="URL", help="Router whose workers to watch for T_P and T_D", rich_help_panel=_MEASURE)
    ] = "",
    seconds: Annotated[float, typer.Option("--for", min=1.0, help="Seconds to watch", rich_help_panel=_MEASURE)] = 30.0,
    itl_slo_ms: Annotated[
        float, typer.Option("--itl-slo-ms", min=0.0, help="Steps near it make T_D a capacity; 0: none", rich_help_panel=_MEASURE)
    ] = 0.0,
    config: ConfigOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> int:
    """How many prefill and how many decode instances a load needs, and R, their ratio. Secret and authority come from the settings."""
    from pd_serve.cli.plan_ratio_tables import RatioReport, show
    from pd_serve.plan.ratio import Supply, best_split, check, needs
    from pd_serve.plan.ratio import ratio as ratio_of
    from pd_serve.plan.trace_demand import read_trace_demand

    asked = read_trace_demand(trace, speed_up) if trace is not None else None
    found: Measured | None = None
    if measure:
        from pd_serve.cli.plan_measure import watch
        from pd_serve.config_sources import load_config

        found = watch(measure, load_config(sources(config, set_, ())).security, seconds, itl_slo_ms / 1e3)
    prefill_gpus_counted, decode_gpus_counted = (prefill_gpus, decode_gpus) if per_gpu else (1, 1)
    supply = Supply(
        _throughput("--prefill-tokens-per-s", prefill_tokens_per_s * prefill_gpus_counted, found.prefill if found else None, found),
        _throughput("--decode-tokens-per-s", decode_tokens_per_s * decode_gpus_counted, found.decode if found else None, found),
        prefill_gpus,
        decode_gpus,
    )
    demand = _demand(input_, output, hit_rate, asked, found)
    check(demand, supply)
    rates = _rates(rate, asked, found)
    report = RatioReport(
        demand=demand,
        supply=supply,
        ratio=ratio_of(demand, supply),
        needs=needs(rates, demand, supply, utilisation),
        split=best_split(total_gpus, demand, supply, utilisation) if total_gpus else None,
        trace=asked,
        measured=found,
    )
    show(report, as_json=json)
    return 0


def _throughput(option: str, given: float, phase: Phase | None, found: Measured | None) -> float:
    if given:
        return given
    if phase is not None:
        return phase.tokens_per_s
    if found is None:
        raise ConfigError(f"what does an instance do? give {option}, or --measure URL")
    if found.notes:
        raise ConfigError(f"nothing to take from what was watched ({'; '.join(found.notes)}); or give {option}")
    what = "computed prompts" if "prefill" in option else "decoded"
    raise ConfigError(f"no worker {what} in the {found.seconds:.0f} s that were watched: send load meanwhile, or give {option}")


def _demand(prompt: float, output: float, hit_rate: float, trace: TraceDemand | None, found: Measured | None) -> Demand:
    from pd_serve.plan.ratio import Demand

    if trace is not None:
        return Demand(prompt or trace.prompt_tokens, output or trace.output_tokens, hit_rate)
    if found is not None and found.seen.num_choices:
        return Demand(prompt or found.seen.prompt_tokens, output or found.seen.output_tokens, hit_rate)
    if not prompt or not output:
        raise ConfigError("how long are requests? give --input and --output, or --trace")
    return Demand(prompt, output, hit_rate)


def _rates(rate: float, trace: TraceDemand | None, found: Measured | None) -> dict[str, float]:
    """By what they are."""
    if rate:
        return {"given": rate}
    if trace is not None:
        return {"mean of the trace": trace.requests_per_s, "its busiest minute": trace.peak_requests_per_s}
    if found is not None and found.seen.num_choices:
        return {"measured": found.seen.num_choices / found.seconds}
    return {}
