"""`pd-serve status`: a live table of a router's workers, or the same as JSON (names as in protocol/control.py: scripts rely on them)."""

from __future__ import annotations

import time
from enum import Enum

import httpx
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pd_serve.cli.http import EndpointError, refused, unreachable
from pd_serve.config_sources import Sources, load_config
from pd_serve.protocol.control import STATUS_PATH, BlockStatus, PairStatus, PeerLaneStatus, RouterStatus, WorkerStatus
from pd_serve.tls import client_tls

_BAR_WIDTH = 6
_COUNTS = ("run", "wait", "prefill", "leases")


class View(Enum):
    WORKERS = "workers"
    PAIRS = "pairs"
    JSON = "json"


def show_status(router: str, sources: Sources, view: View, once: bool, interval_s: float) -> int:
    """Raises EndpointError when the router cannot be asked, ConfigError for a mistake in the settings."""
    url = router.rstrip("/")
    security = load_config(sources).security
    headers = {"Authorization": f"Bearer {security.cluster_secret}"} if security.cluster_secret else {}
    console = Console(highlight=False)
    with httpx.Client(base_url=url, headers=headers, timeout=5.0, trust_env=False, verify=client_tls(security)) as client:
        status = _ask(client, url)
        if view is View.JSON:
            print(status.model_dump_json())
            return 0
        if once or not console.is_terminal:
            console.print(render(url, status, view))
            return 0
        try:
            with Live(render(url, status, view), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    try:
                        live.update(render(url, _ask(client, url), view), refresh=True)
                    except EndpointError as error:
                        live.update(Text(error.message, style="red"), refresh=True)
        except KeyboardInterrupt:
            return 0


def render(url: str, status: RouterStatus, view: View = View.WORKERS) -> RenderableType:
    head = Text.assemble(
        ("router ", "dim"),
        url,
        ("   model ", "dim"),
        status.model or "none yet",
        ("   open ", "dim"),
        str(status.open_requests),
        ("   queued ", "dim"),
        str(status.queued_requests),
    )
    if view is View.PAIRS:
        return Group(head, _pairs(status.pairs))
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("worker", "role", "state", *_COUNTS):
        table.add_column(header, justify="right" if header in _COUNTS else "left", no_wrap=True)
    for header in ("KV blocks in use", "peers"):  # where the terminal is narrow, these go on in a second line
        table.add_column(header)
    for worker in sorted(status.workers, key=lambda worker: (worker.role.value, worker.id)):
        counts = (worker.running, worker.waiting, worker.prefill_queue_tokens, worker.leases)
        table.add_row(
            worker.id, _role(worker), _state(worker), *(str(count) for count in counts), _blocks(worker.blocks), _peers(worker.peers)
        )
    return Group(head, table) if status.workers else Group(head, Text("no workers: start some with pd-serve prefill | decode | colocated"))


def _pairs(pairs: tuple[PairStatus, ...]) -> RenderableType:
    """By pair: whether requests can be placed on it, and what its transfers convert; or why the two never will work together."""
    if not pairs:
        return Text("no pairs: there have to be a prefill and a decode worker")
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("prefill", "decode", "state", "lane"):
        table.add_column(header, no_wrap=True)
    table.add_column("conversion, or why not")
    for pair in pairs:
        if not pair.compatible:
            state = Text("incompatible", style="red")
        else:
            state = Text("joined", style="green") if pair.joined else Text("not joined", style="yellow")
        detail = pair.conversion if pair.compatible else pair.reason
        table.add_row(pair.prefill, pair.decode, state, pair.lane or "-", Text(detail))
    return table


def _ask(client: httpx.Client, url: str) -> RouterStatus:
    try:
        reply = client.get(STATUS_PATH)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(url, error) from error
    if reply.status_code != httpx.codes.OK:
        raise refused(url, reply.status_code, reply.text)
    try:
        return RouterStatus.model_validate_json(reply.content)
    except ValidationError as error:
        raise EndpointError(f"{url} is not a pd-serve router of this version") from error


def _role(worker: WorkerStatus) -> str:
    """With the number of ranks, where there are several."""
    num_ranks = len(worker.rank_pids)
    return f"{worker.role.value} x{num_ranks}" if num_ranks > 1 else worker.role.value


def _state(worker: WorkerStatus) -> Text:
    if worker.draining:
        return Text("draining", style="yellow")
    broken = [breaker for breaker in worker.breakers if breaker.state != "closed"]
    if broken:
        return Text(", ".join(f"{breaker.leg} breaker {breaker.state}" for breaker in broken), style="red")
    return Text("ready", style="green") if worker.ready else Text("not ready", style="red")


def _blocks(blocks: BlockStatus) -> Text:
    """In use by anyone, cached ones apart: those can be had at once."""
    if blocks.total == 0:
        return Text("-")
    in_use = blocks.total - blocks.free - blocks.cached
    filled = round(_BAR_WIDTH * in_use / blocks.total)
    cached = min(_BAR_WIDTH - filled, round(_BAR_WIDTH * blocks.cached / blocks.total))
    text = Text.assemble(("█" * filled, "blue"), ("▒" * cached, "cyan"), ("░" * (_BAR_WIDTH - filled - cached), "dim"))
    text.append(f" {in_use}/{blocks.total}")
    if blocks.cached:
        text.append(f" +{blocks.cached} cached", style="dim")
    if blocks.quarantined:
        text.append(f" {blocks.quarantined} quarantined", style="yellow")
    return text


def _peers(peers: tuple[PeerLaneStatus, ...]) -> Text:
    lanes: dict[str, int] = {}
    for peer in peers:
        lane = peer.lane if peer.joined else "not joined"
        lanes[lane] = lanes.get(lane, 0) + 1
    return Text(", ".join(f"{count} {lane}" for lane, count in sorted(lanes.items())) or "-")
