"""`pd-serve workers ...`: the fleet of a router, over its admin API (words in protocol/admin.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pd_serve.cli.options import ConfigOption, JsonOption, RouterOption, SetOption, sources
from pd_serve.config_sources import load_config
from pd_serve.protocol.admin import Fleet, FleetAddress, FleetWorker, RoleSwitched
from pd_serve.protocol.control import DrainRequest, RoleRequest
from pd_serve.protocol.link import Role

if TYPE_CHECKING:
    from pd_serve.cli.fleet_admin import FleetAdmin

DEFAULT_ROUTER = "http://127.0.0.1:8000"

workers = typer.Typer(
    name="workers",
    no_args_is_help=True,
    help="Show and change the workers of a running router: add, remove, drain, switch roles.",
    epilog="A worker joins by itself when it is started with --router; these commands are for everything else.\n\n"
    "The cluster's secret, where there is one, comes from the settings: PD_SERVE_SECURITY_CLUSTER_SECRET, or --config with the "
    "router's file.",
)

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `pd-serve workers list` shows it")]
WaitOption = Annotated[float, typer.Option("--wait", min=0.0, help="Seconds to wait for it; 0: return at once")]


def _admin(router: str, config: Path | None, sets: list[str] | None) -> FleetAdmin:
    from pd_serve.cli.fleet_admin import FleetAdmin  # with httpx, which help does without

    return FleetAdmin(router, load_config(sources(config, sets, ())).security)


@workers.command("list", epilog="Examples:\n\n  pd-serve workers list\n\n  pd-serve workers list --json | jq -r '.workers[].status.id'")
def list_(router: RouterOption = DEFAULT_ROUTER, json: JsonOption = False, config: ConfigOption = None, set_: SetOption = None) -> int:
    """Show the workers, the addresses without one and why, and what was removed."""
    with _admin(router, config, set_) as admin:
        fleet = admin.fleet()
    if json:
        print(fleet.model_dump_json())
        return 0
    console = Console(highlight=False)
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("worker", "role", "state", "running", "prompt tokens", "breaker", "address"):
        table.add_column(header)
    for worker in fleet.workers:
        status = worker.status
        breakers = ", ".join(f"{breaker.leg} {breaker.state}" for breaker in status.breakers if breaker.state != "closed")
        counts = (str(status.running), str(status.prefill_queue_tokens))
        table.add_row(status.id, status.role.value, _state(worker), *counts, breakers or "-", status.address)
    for place in fleet.unlinked:
        table.add_row(place.worker or "?", "-", f"not linked: {place.detail or 'connecting'}", "-", "-", "-", place.address)
    console.print(table if table.rows else "no workers: pd-serve workers add http://HOST:PORT, or start some with --router")
    if fleet.removed:
        console.print(f"removed: {', '.join(fleet.removed)}")
    return 0


@workers.command(
    epilog="Examples:\n\n"
    "  pd-serve workers add http://10.0.0.7:8201\n\n"
    "  pd-serve workers add http://10.0.0.7:8201 --wait 0     do not wait until it is linked"
)
def add(
    address: Annotated[str, typer.Argument(help="http(s)://host:port of the worker")],
    wait: WaitOption = 10.0,
    router: RouterOption = DEFAULT_ROUTER,
    json: JsonOption = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Have the router follow an address, and a worker that was removed come back. Exit 1 when it is not linked in time."""
    url = address.rstrip("/")

    def is_linked(fleet: Fleet) -> bool:
        return any(worker.status.address == url for worker in fleet.workers)

    with _admin(router, config, set_) as admin:
        place = admin.add(url)
        is_in_time = not wait or admin.wait(is_linked, wait)
        fleet = admin.fleet()
    places: tuple[FleetWorker | FleetAddress, ...] = (*fleet.workers, *fleet.unlinked)
    now = next((found for found in places if _address(found) == url), place)
    detail = now.detail if isinstance(now, FleetAddress) else ""
    _say(json, now, f"{url}: {'linked' if isinstance(now, FleetWorker) else detail or 'not linked yet'}")
    return 0 if is_in_time else 1


@workers.command(
    epilog="Examples:\n\n"
    "  pd-serve workers remove node7-decode-8201             after what runs there has ended\n\n"
    "  pd-serve workers remove node7-decode-8201 --force     at once; its requests go on elsewhere\n\n"
    "  pd-serve workers remove 10.0.0.7:8201                 an address where no worker answers"
)
def remove(
    worker: WorkerArgument,
    force: Annotated[bool, typer.Option("--force", help="Do not wait for what runs there: it is moved")] = False,
    wait: WaitOption = 60.0,
    router: RouterOption = DEFAULT_ROUTER,
    json: JsonOption = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Have the router let go of a worker. The worker goes on running; it is linked again once added, or started anew."""
    with _admin(router, config, set_) as admin:
        place = admin.remove(worker, force)
        is_gone = not wait or admin.wait(lambda fleet: all(each.status.id != worker for each in fleet.workers), wait)
    _say(json, place, f"{worker}: {'removed' if wait and is_gone else 'leaving: what runs there has not ended'}")
    return 0 if is_gone else 1


@workers.command(epilog="Example:\n\n  pd-serve workers drain node7-decode-8201 --deadline 120")
def drain(
    worker: WorkerArgument,
    deadline: Annotated[float, typer.Option("--deadline", min=0.0, help="Seconds for what runs; then it is moved")] = 30.0,
    router: RouterOption = DEFAULT_ROUTER,
    json: JsonOption = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Have a worker take nothing new from any router, finish what it has, and end."""
    body = DrainRequest(deadline_s=deadline)
    with _admin(router, config, set_) as admin:
        told = admin.call("POST", f"/{quote(worker, safe='')}/drain", body, FleetWorker.model_validate_json)
    _say(json, told, f"{worker}: draining, {deadline:g} s at most")
    return 0


@workers.command(
    epilog="Examples:\n\n"
    "  pd-serve workers role node7-decode-8201 prefill\n\n"
    "  pd-serve workers role node7-decode-8201 decode --deadline 5     what it still computes for others is moved after 5 s"
)
def role(
    worker: WorkerArgument,
    new_role: Annotated[Role, typer.Argument(metavar="ROLE", help="prefill, decode or both")],
    deadline: Annotated[float, typer.Option("--deadline", min=0.0, help="Seconds for what runs in the old role; then it is moved")] = 30.0,
    router: RouterOption = DEFAULT_ROUTER,
    json: JsonOption = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> int:
    """Switch a worker to another role, without reloading anything. The router does so by itself with roles.auto."""
    body = RoleRequest(role=new_role, deadline_s=deadline)
    with _admin(router, config, set_) as admin:
        switched = admin.call("POST", f"/{quote(worker, safe='')}/role", body, RoleSwitched.model_validate_json)
    took_ms = 1e3 * switched.seconds
    _say(json, switched, f"{worker}: {switched.previous.value} -> {new_role.value}, taking the new role's work after {took_ms:.0f} ms")
    return 0


def _address(place: FleetWorker | FleetAddress) -> str:
    return place.status.address if isinstance(place, FleetWorker) else place.address


def _state(worker: FleetWorker) -> str:
    if worker.leaving:
        return "leaving"
    return "draining" if worker.status.draining else "ready" if worker.status.ready else "not ready"


def _say(as_json: bool, told: BaseModel, text: str) -> None:
    print(told.model_dump_json() if as_json else text)
