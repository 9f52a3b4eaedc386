"""The commands: their options, their help, and the one place that turns an error into a line on stderr and an exit code.

Exit codes: 0 done; 1 an error, told in one line; 2 wrong usage; 128 + n stopped by signal n. Each command imports what it runs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pd_serve import __version__
from pd_serve.cli.bench import bench
from pd_serve.cli.options import (
    ConfigOption,
    DeviceOption,
    DtypeOption,
    HostOption,
    JsonOption,
    KeyOption,
    ModelOption,
    PortOption,
    RanksOption,
    RouterOption,
    SetOption,
    sources,
)
from pd_serve.cli.plan import plan
from pd_serve.cli.workers import workers
from pd_serve.config_sources import RoleTable, Sources
from pd_serve.errors import PdServeError

DEBUG_FLAG = "--debug"
DEFAULT_ROUTER = "http://127.0.0.1:8000"
# Typer carries its own click; these are the classes it raises, whichever click it was built with.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_ClickError: type[Exception] = _UsageError.__bases__[0]

app = typer.Typer(
    name="pd-serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: [bold]pd-serve up[/bold], then [bold]pd-serve chat[/bold] in another terminal.",
)


app.add_typer(bench)
app.add_typer(plan)
app.add_typer(workers)


def run(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code. An error is one line on stderr; with --debug (anywhere) the traceback as well."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG_FLAG in given
    try:
        result = app([word for word in given if word != DEBUG_FLAG], prog_name="pd-serve", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", debug, 130)
    except _ClickError as error:
        is_usage = isinstance(error, _UsageError)
        return _complain(_usage_line(error), debug, 2 if is_usage else 1)
    except PdServeError as error:
        return _complain(error.message, debug, 1)
    return result if isinstance(result, int) else 0


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option(DEBUG_FLAG, help="Show the traceback of an error; may stand anywhere on the line")] = False,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit")] = False,
) -> None:
    """LLM serving with prefill and decode on separate workers; the KV cache is pushed layer by layer while it is computed."""


@app.command(
    epilog="Examples:\n\n"
    "  pd-serve up                                     one prefill and one decode worker, the demo model, port 8000\n\n"
    "  pd-serve up --prefill 2 --decode 2 --model Qwen/Qwen3-0.6B\n\n"
    "  pd-serve up --colocated 1 --port 0 --json       both phases in one worker, any free port, for scripts\n\n"
    "  pd-serve up --config configs/hetero.toml --set decode.engine.threads=4\n\n"
    "  pd-serve up --set prefill.tp=2                 two ranks to compute prompts, one to decode"
)
def up(
    prefill: Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers")] = None,
    decode: Annotated[int | None, typer.Option("--decode", min=0, help="Decode workers")] = None,
    colocated: Annotated[
        int | None, typer.Option("--colocated", min=0, help="Workers for both phases; alone: no others are started")
    ] = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    tp: RanksOption = None,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    restart: Annotated[bool | None, typer.Option("--restart/--no-restart", help="Start a process that died again, with back-off")] = None,
    log_dir: Annotated[Path | None, typer.Option("--log-dir", help="Folder for the logs of all processes")] = None,
    json: JsonOption = False,
) -> int:
    """Start a router and its workers on this machine, and stop them all with one Ctrl-C."""
    if colocated is not None and prefill is None and decode is None:
        prefill = decode = 0
    given = sources(
        config,
        set_,
        [
            ("--prefill", "launch.prefill", prefill),
            ("--decode", "launch.decode", decode),
            ("--colocated", "launch.colocated", colocated),
            ("--restart", "launch.restart", restart),
            ("--log-dir", "launch.run_dir", str(log_dir) if log_dir else None),
            ("--model", "model.id", model),
            ("--dtype", "model.dtype", dtype),
            ("--device", "engine.device", device),
            ("--tp", "engine.tp", tp),
            ("--host", "router.host", host),
            ("--port", "router.port", port),
        ],
    )
    from pd_serve.cli.up import launch

    return launch(given, as_json=json)


@app.command(
    epilog="Examples:\n\n"
    "  pd-serve router --port 8000 --model demo\n\n"
    "  pd-serve router --workers 4     four processes behind one port, for more clients than one core can serve"
)
def router(
    model: ModelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes that share the port")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Run a router in the foreground: the OpenAI endpoint that workers register at."""
    flags = [
        ("--model", "model.id", model),
        ("--host", "router.host", host),
        ("--port", "router.port", port),
        ("--workers", "router.processes", workers),
    ]
    from pd_serve.cli.roles import run_router

    return run_router(sources(config, set_, flags))


RoutersOption = Annotated[list[str] | None, typer.Option("--router", metavar="URL", help="Router to register at; may be repeated")]


def _worker_sources(
    routers: list[str] | None,
    model_flags: tuple[str | None, str | None, str | None, int | None],
    listen: tuple[str | None, int | None],
    settings: tuple[Path | None, list[str] | None],
) -> Sources:
    model, dtype, device, tp = model_flags
    host, port = listen
    file, sets = settings
    flags = [
        ("--router", "worker.routers", tuple(routers) if routers else None),
        ("--model", "model.id", model),
        ("--dtype", "model.dtype", dtype),
        ("--device", "engine.device", device),
        ("--tp", "engine.tp", tp),
        ("--host", "worker.host", host),
        ("--port", "worker.port", port),
    ]
    return sources(file, sets, flags)


@app.command(epilog="Example:\n\n  pd-serve prefill --router http://10.0.0.1:8000 --host 0.0.0.0 --port 8101")
def prefill(
    router: RoutersOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    tp: RanksOption = None,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Run a prefill worker in the foreground: it computes prompts and pushes their KV to decode workers."""
    return _run_worker(RoleTable.PREFILL, _worker_sources(router, (model, dtype, device, tp), (host, port), (config, set_)))


@app.command(epilog="Example:\n\n  pd-serve decode --router http://10.0.0.1:8000 --host 0.0.0.0 --port 8201")
def decode(
    router: RoutersOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    tp: RanksOption = None,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Run a decode worker in the foreground: it receives KV and generates tokens."""
    return _run_worker(RoleTable.DECODE, _worker_sources(router, (model, dtype, device, tp), (host, port), (config, set_)))


@app.command(epilog="Example:\n\n  pd-serve colocated --router http://127.0.0.1:8000")
def colocated(
    router: RoutersOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    tp: RanksOption = None,
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Run a worker for both phases in the foreground (chunked prefill beside decode)."""
    return _run_worker(RoleTable.COLOCATED, _worker_sources(router, (model, dtype, device, tp), (host, port), (config, set_)))


def _run_worker(role: RoleTable, given: Sources) -> int:
    from pd_serve.cli.roles import run_worker

    return run_worker(role, given)


@app.command(
    epilog="Examples:\n\n"
    "  pd-serve status                 a live table until Ctrl-C\n\n"
    "  pd-serve status --json | jq '.workers[].ready'\n\n"
    "  pd-serve status --pairs         which workers fit each other, and what their transfers convert\n\n"
    "  pd-serve status --config /tmp/pd-serve-up-x/router.toml       where pd-serve up has drawn a secret"
)
def status(
    router: RouterOption = DEFAULT_ROUTER,
    json: JsonOption = False,
    once: Annotated[bool, typer.Option("--once", help="Print the table once instead of keeping it up to date")] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Show which pairs of workers may work together, and which have joined")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks")] = 1.0,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Show the workers of a router: readiness, queues, KV blocks, lanes. Secret and authority (security) come from the settings."""
    from pd_serve.cli.status import View, show_status

    view = View.JSON if json else View.PAIRS if pairs else View.WORKERS
    return show_status(router, sources(config, set_, ()), view, once=once, interval_s=interval)


@app.command(
    epilog="Examples:\n\n"
    "  pd-serve chat                           talk; /reset forgets, /exit leaves\n\n"
    "  pd-serve chat 'Why is the sky blue?'    one answer, then exit\n\n"
    "  pd-serve chat --url https://llm.example:8000 --set security.tls_ca=ca.pem"
)
def chat(
    message: Annotated[str | None, typer.Argument(help="Ask this one thing and exit; - reads it from standard input")] = None,
    url: Annotated[str, typer.Option("--url", help="OpenAI-compatible endpoint")] = DEFAULT_ROUTER,
    model: Annotated[str, typer.Option("--model", help="Model name; empty: the first the endpoint lists")] = "",
    system: Annotated[str, typer.Option("--system", help="System message")] = "",
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy")] = 0.7,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens")] = 512,
    api_key: KeyOption = "",
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Chat with a running endpoint in the terminal. An authority of its own (security.tls_ca) comes from the settings."""
    from pd_serve.cli.chat import ChatSettings, run_chat
    from pd_serve.config_sources import load_config
    from pd_serve.tls import client_tls

    security = load_config(sources(config, set_, ())).security
    tls = client_tls(security) if security.tls_ca else None
    return run_chat(ChatSettings(url, model, system, temperature, max_tokens, api_key), message, tls)


@app.command(epilog="Example:\n\n  pd-serve doctor --model demo --port 8000")
def doctor(
    model: ModelOption = None,
    device: DeviceOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> int:
    """Check this machine: UCX and its lanes, GPU, RDMA, model folder, ports, shared memory, cores. Exit 1 when something must be mended."""
    flags = [("--model", "model.id", model), ("--device", "engine.device", device), ("--port", "router.port", port)]
    from pd_serve.cli.doctor import run_doctor

    return run_doctor(sources(config, set_, flags), as_json=json)


def _usage_line(error: Exception) -> str:
    full_message = getattr(error, "format_message", None)
    text = full_message() if callable(full_message) else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "pd-serve"
    return f"{text.rstrip('.')} (see {command} --help)"


def _complain(message: str, debug: bool, code: int) -> int:
    if debug:
        traceback.print_exc()
    print(f"pd-serve: {' '.join(message.split())}", file=sys.stderr)
    return code
