"""`pd-serve up`: what the user sees of a launch: progress, a spinner, a table and a curl line, or one line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pd_serve.cli.gpus import visible_gpus
from pd_serve.cli.launch import Launcher
from pd_serve.cli.launch_child import Child
from pd_serve.cli.launch_plan import LaunchPlan, Machine, plan_launch
from pd_serve.config_sources import Sources
from pd_serve.cores import usable_cores
from pd_serve.errors import ConfigError

ROLE_STYLES = {"router": "cyan", "prefill": "magenta", "decode": "green", "colocated": "yellow"}


def launch(sources: Sources, as_json: bool) -> int:
    """Returns when everything has stopped. Raises PdServeError."""
    console = Console(stderr=True, highlight=False)
    machine = Machine(usable_cores(), visible_gpus(os.environ))
    plan = plan_launch(sources, machine, lambda model_id, cache_dir: _resolve_model(console, model_id, cache_dir))
    _check_models(plan)
    run_dir = _run_dir(plan.config.launch.run_dir)
    view = TerminalView(console, plan, run_dir, as_json)
    with view:
        return asyncio.run(_run(plan, run_dir, view))


async def _run(plan: LaunchPlan, run_dir: Path, view: TerminalView) -> int:
    return await Launcher(plan, run_dir, view).run()


class TerminalView:
    """A LaunchView on a terminal (or a log file, where nothing moves)."""

    def __init__(self, console: Console, plan: LaunchPlan, run_dir: Path, as_json: bool) -> None:
        self._console = console
        self._plan = plan
        self._run_dir = run_dir
        self._as_json = as_json
        self._status = console.status("starting")

    def __enter__(self) -> TerminalView:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def waiting(self, missing: Sequence[str]) -> None:
        self._status.update(f"waiting for {', '.join(missing)}")

    def ready(self, children: Sequence[Child]) -> None:
        self._status.stop()
        if self._as_json:
            print(json.dumps(self._summary(children)), flush=True)
            return
        table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for header in ("role", "name", "pid", "address", "threads", "log"):
            table.add_column(header, justify="right" if header in ("pid", "threads") else "left", no_wrap=True)
        for child in children:
            plan = child.plan
            style = ROLE_STYLES[plan.role]
            table.add_row(f"[{style}]{plan.role}[/]", plan.name, str(child.pid), plan.address, str(plan.num_threads or ""), child.log.name)
        out = Console(highlight=False)
        out.print(f"[bold]{self._plan.config.model.name}[/] is served at [bold]{self._plan.router.address}/v1[/]; logs in {self._run_dir}")
        out.print(table)
        out.print("Try it (Ctrl-C here stops everything):", style="dim")
        print(self._curl(), flush=True)

    def died(self, child: Child, how: str, restart_in_s: float | None) -> None:
        then = "" if restart_in_s is None else f"; starting it again in {restart_in_s:g} s"
        self._say(f"[bold red]{child.plan.name}[/] (pid {child.pid}) died: {how}{then}; the end of {child.log}:")
        style = ROLE_STYLES[child.plan.role]
        for line in child.last_lines():
            self._console.print(f"  {child.plan.name} | ", style=style, end="", soft_wrap=True)
            self._console.print(line, markup=False, soft_wrap=True)

    def restarted(self, child: Child) -> None:
        self._say(f"{child.plan.name} started again (pid {child.pid})")

    def stopping(self, names: Sequence[str]) -> None:
        self._say(f"stopping {', '.join(names)}")

    def note(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _curl(self) -> str:
        security = self._plan.config.security
        auth = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if security.client_keys else ""
        authority = f" --cacert {security.tls_ca}" if security.tls_cert and security.tls_ca else ""
        body = json.dumps({"model": self._plan.config.model.name, "messages": [{"role": "user", "content": "Hello!"}]})
        return f"curl{authority} {self._plan.router.address}/v1/chat/completions -H 'Content-Type: application/json'{auth} -d '{body}'"

    def _summary(self, children: Sequence[Child]) -> dict[str, object]:
        return {
            "url": self._plan.router.address,
            "model": self._plan.config.model.name,
            "run_dir": str(self._run_dir),
            "processes": [
                {
                    "name": child.plan.name,
                    "role": child.plan.role,
                    "pid": child.pid,
                    "address": child.plan.address,
                    "threads": child.plan.num_threads,
                    "log": str(child.log),
                }
                for child in children
            ],
        }


def _run_dir(configured: str) -> Path:
    """Raises ConfigError."""
    if not configured:
        return Path(tempfile.mkdtemp(prefix="pd-serve-up-"))
    folder = Path(configured).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder for logs {folder}: {error.strerror}") from error
    return folder


def _check_models(plan: LaunchPlan) -> None:
    """Raises ModelError: said once and now, not by every worker after its start."""
    from pd_serve.engine.families.registry import describe

    for folder, load_format in {(worker.config.model.id, worker.config.model.load_format) for worker in plan.workers}:
        describe(Path(folder), has_weights=load_format != "random")


def _resolve_model(console: Console, model_id: str, cache_dir: str) -> Path:
    from pd_serve.model_store import resolve_model

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"model {model_id}", total=None)

        def on_progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        return resolve_model(model_id, cache_dir, on_progress)
