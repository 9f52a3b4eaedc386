"""Options that several commands share, and how they become Sources."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pd_serve.config_sources import Flag, FlagValue, Sources

_SETTINGS = "Settings"

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings, such as configs/1p1d.toml", rich_help_panel=_SETTINGS)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting, as in the file: kv.block_size=32, prefill.engine.threads=4",
        rich_help_panel=_SETTINGS,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Local folder, Hugging Face id, or `demo` (bundled SmolLM2-135M-Instruct)", rich_help_panel=_SETTINGS),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="Type of weights, activations and KV: bfloat16, float16, float32", rich_help_panel=_SETTINGS)
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Where the model runs: auto, cpu, cuda", rich_help_panel=_SETTINGS)]
RanksOption = Annotated[
    int | None, typer.Option("--tp", min=1, help="Ranks that share one model out (tensor parallelism)", rich_help_panel=_SETTINGS)
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on", rich_help_panel=_SETTINGS)]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0: a free one", rich_help_panel=_SETTINGS)]
RouterOption = Annotated[str, typer.Option("--router", metavar="URL", help="The router to ask")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text for people")]
KeyOption = Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Key to present, where the router asks for one")]


def sources(file: Path | None, sets: Iterable[str] | None, flags: Iterable[tuple[str, str, FlagValue | None]]) -> Sources:
    """What a command was given; a flag whose value is None was not."""
    given = tuple(Flag(option, key, value) for option, key, value in flags if value is not None)
    return Sources(file=file, env=os.environ, flags=given, sets=tuple(sets or ()))
