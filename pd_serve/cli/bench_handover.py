"""`pd-serve bench handover`."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_serve.cli.bench_options import BenchModelOption, ClusterSetOption, CoresOption, NameOption, OutOption, cluster_of, cores_of, numbers
from pd_serve.cli.options import JsonOption

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench handover                                 128, 512 and 2048 tokens, one core per role\n\n"
    "  pd-serve bench handover --lengths 2048 --requests 40 --cores-per-role 8 --model Qwen/Qwen3-0.6B"
)


def handover(
    lengths: Annotated[str, typer.Option("--lengths", help="Prompts, in words (about as many tokens)")] = "128,512,2048",
    requests: Annotated[int, typer.Option("--requests", min=1, help="At each length, one at a time")] = 12,
    colocated: Annotated[
        bool, typer.Option("--colocated/--no-colocated", help="Ask a colocated worker on the cores of prefill as well, in turn")
    ] = True,
    cores_per_role: CoresOption = 1,
    model: BenchModelOption = "",
    set_: ClusterSetOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompts")] = 0,
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Follow single requests through router, prefill and decode: phases, hand-over, overlap, exposed transfer; pictures of both."""
    from pd_serve.bench.handover import HandoverSettings, run_handover
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.runner import run
    from pd_serve.cli.bench_show import show

    settings = HandoverSettings(
        lengths=tuple(int(value) for value in numbers("--lengths", lengths)),
        num_requests=requests,
        cores=cores_of(cores_per_role),
        base=cluster_of(model, set_ or ()),
        has_colocated=colocated,
        seed=seed,
        name=name,
    )
    path = result_path(out, "handover", name)
    with Bars(json) as bars:
        result = run(run_handover(settings, path, bars))
    show(result, path, as_json=json)
    return 0
