"""`pd-serve bench interference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_serve.cli.bench_options import (
    ArmOption,
    BenchModelOption,
    ClusterSetOption,
    CoresOption,
    NameOption,
    OutOption,
    cluster_of,
    cores_of,
    numbers,
)
from pd_serve.cli.options import JsonOption, KeyOption

_VICTIMS = "Victims"
_LONG = "Long prompts"
_COLOCATED = "The colocated arm"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench interference --sweep 64,128,256,512,1024,2048     chunk budgets of the colocated arm, kept for later runs\n\n"
    "  pd-serve bench interference                                      both arms, each with and without long prompts\n\n"
    "  pd-serve bench interference --no-clusters --arm ours=http://127.0.0.1:8000 --arm theirs=http://127.0.0.1:9000"
)


def interference(
    slots: Annotated[int, typer.Option("--slots", min=1, help="Short streams at any time", rich_help_panel=_VICTIMS)] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Output tokens of each", rich_help_panel=_VICTIMS)] = 256,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Prompt tokens of each", rich_help_panel=_VICTIMS)] = 16,
    long_tokens: Annotated[int, typer.Option("--long-tokens", min=1, help="Prompt tokens of each", rich_help_panel=_LONG)] = 2048,
    long_output: Annotated[
        int,
        typer.Option("--long-output", min=1, help="Output tokens of each: their decoding is load, not interference", rich_help_panel=_LONG),
    ] = 4,
    interval: Annotated[float, typer.Option("--interval", min=0.01, help="Seconds between two of them", rich_help_panel=_LONG)] = 2.5,
    count: Annotated[int, typer.Option("--count", min=1, help="In each round", rich_help_panel=_LONG)] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds, in which the arms take turns")] = 1,
    lead: Annotated[float, typer.Option("--lead", min=0.0, help="Seconds of each run before its gaps count")] = 2.0,
    sweep: Annotated[
        str,
        typer.Option("--sweep", help="Only measure these chunk budgets, and add them to the sweep: 64,128,256", rich_help_panel=_COLOCATED),
    ] = "",
    sweep_file: Annotated[
        Path | None,
        typer.Option("--sweep-file", help="Where the sweep lies; by default interference-sweep.json beside the results"),
    ] = None,
    budget: Annotated[int, typer.Option("--budget", min=0, help="Chunk budget; 0: the best of the sweep", rich_help_panel=_COLOCATED)] = 0,
    clusters: Annotated[bool, typer.Option("--clusters/--no-clusters", help="Start the disaggregated and the colocated arm")] = True,
    apart: Annotated[
        bool,
        typer.Option("--apart/--no-apart", help="Keep router, fronts and this client on the cores of prefill, where cores are pinned"),
    ] = True,
    arm: ArmOption = None,
    cores_per_role: CoresOption = 1,
    model: BenchModelOption = "",
    set_: ClusterSetOption = None,
    vocab: Annotated[int, typer.Option("--vocab", help="Token ids of prompts are below this")] = 32_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts")] = 0,
    api_key: KeyOption = "",
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Short streams while long prompts arrive: their gaps, disaggregated and colocated on the same cores, each beside its own baseline."""
    from pd_serve.bench.arms import ClientSettings, parse_arm
    from pd_serve.bench.interference import InterferenceSettings, run_interference, run_sweep
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.runner import run
    from pd_serve.bench.victims import VictimsTest
    from pd_serve.cli.bench_show import show

    base = cluster_of(model, set_ or ())
    budgets = tuple(int(value) for value in numbers("--sweep", sweep))
    settings = InterferenceSettings(
        test=VictimsTest(slots, prompt_tokens, tokens, long_tokens, long_output, count, interval, lead, vocab, seed),
        cores=cores_of(cores_per_role) if clusters or budgets else None,
        num_rounds=rounds,
        base=base,
        is_local=clusters,
        others=tuple(parse_arm(text, base) for text in arm or ()),
        budget=budget,
        client=ClientSettings(model, api_key),
        name=name,
        is_apart=apart,
    )
    path = result_path(out, "interference", name)
    kept = sweep_file or path.with_name("interference-sweep.json")
    with Bars(json) as bars:
        result = run(run_sweep(settings, budgets, kept, bars) if budgets else run_interference(settings, kept, path, bars))
    show(result, kept if budgets else path, as_json=json)
    return 0
