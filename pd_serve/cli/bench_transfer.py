"""`pd-serve bench transfer`."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_serve.cli.bench_options import NameOption, OutOption
from pd_serve.cli.options import JsonOption
from pd_serve.errors import ConfigError

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench transfer\n\n"
    "  pd-serve bench transfer --lanes shm --layout 30x3x64x16 --layout 32x8x128x16\n\n"
    "  pd-serve bench transfer --transport nixl"
)


def transfer(
    transport: Annotated[str, typer.Option("--transport", help="ucx or nixl")] = "ucx",
    lanes: Annotated[str, typer.Option("--lanes", help="One or several: shm,tcp,rdma")] = "shm,tcp",
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", metavar="LxHxDxB", help="KV layout: layers, KV heads, head dim, block size; may be repeated"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a whole KV transfer")] = 2048,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each case is written")] = 12,
    perftest: Annotated[str, typer.Option("--perftest", help="Path of ucx_perftest; `none` leaves it out [default: found]")] = "",
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Move bytes between two processes as workers do: by size of write and as whole KV, beside memcpy and ucx_perftest."""
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.transfer import SMOLLM2, TransferOptions
    from pd_serve.bench.transfer_report import run_transfer
    from pd_serve.cli.bench_show import show

    chosen = tuple(filter(None, (lane.strip() for lane in lanes.split(","))))
    if not chosen or not set(chosen) <= {"shm", "tcp", "rdma"} or len(set(chosen)) != len(chosen):
        raise ConfigError(f"--lanes {lanes}: expected one or several of shm, tcp, rdma")
    options = TransferOptions(
        transport=transport, lanes=chosen, layouts=tuple(layout or (SMOLLM2,)), num_tokens=tokens, rounds=rounds, perftest=perftest
    )
    path = result_path(out, "transfer", name)
    with Bars(json) as bars:
        result = run_transfer(options, name, path, bars)
    show(result, path, as_json=json)
    return 0
