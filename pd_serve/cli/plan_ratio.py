"""`pd-serve plan ratio`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pd_serve.cli.options import JsonOption

if TYPE_CHECKING:
    from pd_serve.plan.ratio import Demand, Need, Split, Supply

_LOAD = "The load"
_SUPPLY = "What an instance does"
_HEADROOM = 0.8

EPILOG = (
    "Examples:\n\n"
    "  pd-serve plan ratio --rate 30 --input 2000 --output 300 --prefill-tokens-per-s 20000 --decode-tokens-per-s 3000\n\n"
    "  pd-serve plan ratio --input 4000 --output 500 --prefill-tokens-per-s 4000 --decode-tokens-per-s 500 --per-gpu --total-gpus 16"
)


def ratio(
    rate: Annotated[float, typer.Option("--rate", min=0.0, help="Requests per second; 0: only the ratio", rich_help_panel=_LOAD)] = 0.0,
    input_: Annotated[float, typer.Option("--input", min=0.0, help="Prompt tokens of a request, mean", rich_help_panel=_LOAD)] = 0.0,
    output: Annotated[float, typer.Option("--output", min=0.0, help="Output tokens of a request, mean", rich_help_panel=_LOAD)] = 0.0,
    hit_rate: Annotated[
        float, typer.Option("--hit-rate", min=0.0, help="Share of prompt tokens found in prefix caches", rich_help_panel=_LOAD)
    ] = 0.0,
    prefill_tokens_per_s: Annotated[
        float,
        typer.Option("--prefill-tokens-per-s", min=0.0, help="T_P: prompt tokens a prefill instance computes", rich_help_panel=_SUPPLY),
    ] = 0.0,
    decode_tokens_per_s: Annotated[
        float, typer.Option("--decode-tokens-per-s", min=0.0, help="T_D: tokens a decode instance generates", rich_help_panel=_SUPPLY)
    ] = 0.0,
    prefill_gpus: Annotated[int, typer.Option("--prefill-gpus", min=1, help="GPUs of a prefill instance", rich_help_panel=_SUPPLY)] = 1,
    decode_gpus: Annotated[int, typer.Option("--decode-gpus", min=1, help="GPUs of a decode instance", rich_help_panel=_SUPPLY)] = 1,
    per_gpu: Annotated[bool, typer.Option("--per-gpu", help="T_P and T_D are of one GPU", rich_help_panel=_SUPPLY)] = False,
    total_gpus: Annotated[
        int, typer.Option("--total-gpus", min=0, help="Share out so many GPUs for the highest rate", rich_help_panel=_LOAD)
    ] = 0,
    utilisation: Annotated[
        float, typer.Option("--utilisation", help="Share of the time that an instance may be busy; 1: no head-room", rich_help_panel=_LOAD)
    ] = 1.0,
    json: JsonOption = False,
) -> int:
    """How many prefill and how many decode instances a load needs, and R, their ratio."""
    from pd_serve.plan.ratio import Demand, Supply, best_split, check, need

    demand = Demand(input_, output, hit_rate)
    supply = Supply(
        prefill_tokens_per_s * (prefill_gpus if per_gpu else 1),
        decode_tokens_per_s * (decode_gpus if per_gpu else 1),
        prefill_gpus,
        decode_gpus,
    )
    check(demand, supply)
    shares = sorted({utilisation, min(utilisation, _HEADROOM)}, reverse=True)
    needs = [need(rate, demand, supply, share) for share in shares] if rate else []
    split = best_split(total_gpus, demand, supply, utilisation) if total_gpus else None
    _show(demand, supply, needs, split, as_json=json)
    return 0


def _show(demand: Demand, supply: Supply, needs: list[Need], split: Split | None, as_json: bool) -> None:
    import msgspec

    from pd_serve.plan.ratio import ratio as ratio_of

    r = ratio_of(demand, supply)
    if as_json:
        print(msgspec.json.encode({"demand": demand, "supply": supply, "ratio": r, "needs": needs, "split": split}).decode())
        return
    print(f"R = {r:.4g} prefill instances per decode instance")
    for each in needs:
        print(
            f"{each.num_prefill}P{each.num_decode}D at {each.requests_per_s:g} requests/s, busy {each.utilisation:.0%} of the time at most"
        )
    if split is not None:
        print(f"{split.num_gpus} GPUs: {split.num_prefill}P{split.num_decode}D sustain {split.sustained_requests_per_s:.4g} requests/s")
