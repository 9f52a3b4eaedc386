"""`pd-serve bench router`."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_serve.cli.bench_options import NameOption, OutOption
from pd_serve.cli.options import JsonOption
from pd_serve.errors import ConfigError

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench router\n\n"
    "  pd-serve bench router --parts requests --concurrency 32,256 --workers 2\n\n"
    "  pd-serve bench router --peer 'other=other-router --port {port} --worker-urls {upstream}'"
)


def router(
    parts: Annotated[str, typer.Option("--parts", help="What to measure")] = "requests,streams,paced,growth",
    model: Annotated[str, typer.Option("--model", help="Whose tokenizer the router uses")] = "demo",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes of the router")] = 1,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Requests at a time, one number or several")] = "1,32,256",
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Of each arm in each round")] = 1.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns that the arms take")] = 2,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Streams of the paced part")] = 1000,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME=COMMAND", help="Another router beside ours; its command has {port} and {upstream} in it"),
    ] = None,
    name: NameOption = "",
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """What the router costs: requests and streams through it to workers that answer at once, beside the direct way and other routers."""
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.results import result_path
    from pd_serve.bench.router import RouterOptions, run_router
    from pd_serve.cli.bench_show import show

    options = RouterOptions(
        parts=_words(parts),
        model=model,
        processes=workers,
        peers=_peers(peer or []),
        concurrency=_numbers(concurrency),
        seconds=seconds,
        rounds=rounds,
        num_streams=streams,
    )
    path = result_path(out, "router", name)
    with Bars(json) as bars:
        result = run_router(options, name, path, bars)
    show(result, path, as_json=json)
    return 0


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _numbers(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not words or not all(word.isascii() and word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--concurrency {text}: expected numbers such as 1,32,256")
    return tuple(map(int, words))


def _peers(given: list[str]) -> dict[str, str]:
    peers = dict(entry.partition("=")[::2] for entry in given)
    if not all(name and "{port}" in command and "{upstream}" in command for name, command in peers.items()):
        raise ConfigError("--peer: expected NAME=COMMAND with {port} and {upstream} in the command")
    return peers
