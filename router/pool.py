"""The workers this router knows: registration, one link to each with reconnection, what they report, and who may work with whom.

A worker is (id, incarnation). A worker's address comes from its registration (every heartbeat) or from `router.workers`; the link tells the
rest. A link that ends or falls silent is a lost worker for every request on it; the address is tried again until another incarnation takes
the name or registration has ceased. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pd_serve.config import BreakerConfig
from pd_serve.errors import IncompatibleError, OverloadedError, PdServeError
from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.observe import Metrics
from pd_serve.protocol.admin import FleetAddress
from pd_serve.protocol.cache_events import CacheEvents, CacheSnapshot
from pd_serve.protocol.client import Link, LinkSettings, open_link
from pd_serve.protocol.control import RegisterWorker, WorkerStatus
from pd_serve.protocol.link import BlockCounts, Load, Peers, PeerStatus, Role, RouterFrame, Welcome, WorkerFrame
from router.breaker import Breakers
from router.compatibility import check_compatible, nonsense_in
from router.linked_worker import LinkedWorker
from router.once_a_turn import OnceATurn
from router.prefixes import Prefixes
from router.worker_status import status_of

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
WELCOME_TIMEOUT_S = 60.0
"""A worker whose model is still loading accepts the link and is silent until it has something to say."""
FORGET_AFTER_S = 60.0
"""An address that neither registers nor answers for this long is forgotten (configured ones never are)."""
MAX_ADDRESSES = 4096
"""Each has a task that tries to link: whoever may register cannot make ever more of them."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    link: LinkSettings
    worker_timeout_s: float
    join_grace_s: float
    """Seconds after a link came up in which missing joins may still succeed."""
    text_vocab_size: int
    """Tokens the router's tokenizer can produce; a model with fewer is refused."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    reads_cached: bool = True
    """What workers have cached matters to somebody here."""


@dataclass(slots=True)
class _Address:
    """One place where a worker is, or should be."""

    url: str
    is_configured: bool
    expected: PeerId | None
    last_registered_at: float
    task: asyncio.Task[None] | None = None
    worker: LinkedWorker | None = None
    link: Link | None = None
    refusal: str = ""
    refused: Welcome | None = None
    """What it presented itself as when it was not taken."""
    last_reason: str = ""


class WorkerPool:
    """start() -> frames and losses to the callbacks -> close().

    on_frame gets every frame about an attempt, and every Load; on_lost each linked worker that went; on_change is called when who can take
    what may have changed, of reports once a turn of the loop.
    """

    def __init__(self, settings: PoolSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._addresses: dict[str, _Address] = {}
        self._workers: dict[PeerId, LinkedWorker] = {}
        self._linked: tuple[LinkedWorker, ...] = ()
        self._removed: dict[WorkerId, tuple[Incarnation, str]] = {}
        """By an operator, with the address: not linked again as they are."""
        self.breakers = Breakers(settings.breaker, metrics, self._workers)
        self._is_closing = False
        self.prefixes = Prefixes(lambda: asyncio.get_running_loop().time(), settings.reads_cached)
        self.version = 0
        """Grows with every change of who is linked, in which role and with how large a pool: what is made of these may be kept."""
        self.on_frame: Callable[[PeerId, WorkerFrame], None] = lambda peer, frame: None
        self.on_lost: Callable[[PeerId], None] = lambda peer: None
        self.on_change: Callable[[], None] = lambda: None
        self._report_came = OnceATurn(lambda: self.on_change())

    # ---- for the dispatcher and the API

    @property
    def workers(self) -> tuple[LinkedWorker, ...]:
        """The same tuple until one comes or goes."""
        return self._linked

    def get(self, peer: PeerId) -> LinkedWorker | None:
        return self._workers.get(peer)

    def send(self, peer: PeerId, frame: RouterFrame) -> bool:
        """False: no live link; on_lost has come or is about to."""
        return (worker := self._workers.get(peer)) is not None and worker.link.send(frame)

    def is_joining(self, worker: LinkedWorker) -> bool:
        """If of one, then of all that came later."""
        return asyncio.get_running_loop().time() - worker.linked_at < self._settings.join_grace_s

    def statuses(self) -> tuple[WorkerStatus, ...]:
        now = asyncio.get_running_loop().time()
        return tuple(sorted((status_of(worker, self.breakers, now) for worker in self._workers.values()), key=lambda status: status.id))

    def refusals(self) -> tuple[str, ...]:
        """Why workers that answered are not used."""
        return tuple(address.refusal for address in self._addresses.values() if address.refusal)

    def refused(self) -> tuple[tuple[Welcome, str], ...]:
        """Workers that presented themselves and were not taken, with the reasons."""
        return tuple((address.refused, address.refusal) for address in self._addresses.values() if address.refused and address.refusal)

    # ---- registration

    def start(self, addresses: tuple[str, ...]) -> None:
        for url in addresses:
            self._follow(url.rstrip("/"), None, is_configured=True)

    def register(self, worker: RegisterWorker) -> bool:
        """Idempotent. True when a live link to this very incarnation is up. Raises OverloadedError above MAX_ADDRESSES."""
        peer = PeerId(WorkerId(worker.worker_id), Incarnation(worker.incarnation))
        url = worker.address.rstrip("/")
        self._check_room(url)
        if peer.worker_id in self._removed:
            if self._removed[peer.worker_id][0] == peer.incarnation:
                return False
            del self._removed[peer.worker_id]
        for address in list(self._addresses.values()):
            known = address.expected or (address.worker.peer if address.worker else None)
            if known is not None and known.worker_id == peer.worker_id and known != peer and address.url != url:
                self._unfollow(address, f"{peer} has taken its name")
        self._follow(url, peer, is_configured=False)
        return peer in self._workers

    def _check_room(self, url: str) -> None:
        if url not in self._addresses and len(self._addresses) >= MAX_ADDRESSES:
            raise OverloadedError(f"{len(self._addresses)} addresses of workers are known, which is the limit", FORGET_AFTER_S)

    # ---- for operators (fleet.py)

    def find(self, worker_id: str) -> LinkedWorker | None:
        return next((worker for worker in self._workers.values() if worker.peer.worker_id == worker_id), None)

    @property
    def removed(self) -> tuple[WorkerId, ...]:
        return tuple(self._removed)

    def unlinked(self) -> tuple[FleetAddress, ...]:
        return tuple(
            FleetAddress(
                address=address.url,
                worker=address.expected.worker_id if address.expected else None,
                configured=address.is_configured,
                detail=address.refusal or address.last_reason,
            )
            for address in self._addresses.values()
            if address.worker is None
        )

    def add(self, url: str) -> None:
        """Idempotent; tried for ever. What was removed there may come back. Raises OverloadedError above MAX_ADDRESSES."""
        self._check_room(url)
        self._removed = {worker_id: removed for worker_id, removed in self._removed.items() if removed[1] != url}
        self._follow(url, None, is_configured=True)
        self._addresses[url].is_configured = True

    def leave(self, worker: LinkedWorker) -> None:
        """Nothing new is sent there, and once its link has ended it is not linked again, unless added or started anew."""
        worker.is_leaving = True
        self.ban(worker.peer.worker_id, worker.peer.incarnation, worker.address)
        self.version += 1

    def ban(self, worker_id: str, incarnation: int, url: str) -> None:
        """Not to be linked."""
        self._removed[WorkerId(worker_id)] = (Incarnation(incarnation), url)

    def let_go(self, url: str) -> None:
        """Close the link, if there is one, and forget the address. Idempotent."""
        if (address := self._addresses.get(url)) is not None:
            self._unfollow(address, "removed by an operator")

    async def close(self) -> None:
        """Close every link (workers cancel what this router had there) and stop reconnecting. Idempotent."""
        self._is_closing = True
        tasks = [address.task for address in self._addresses.values() if address.task is not None]
        for address in list(self._addresses.values()):
            self._unfollow(address, "the router is closing")
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, url: str, peer: PeerId | None, is_configured: bool) -> None:
        if self._is_closing:
            return
        now = asyncio.get_running_loop().time()
        address = self._addresses.get(url)
        if address is None:
            address = self._addresses[url] = _Address(url, is_configured, peer, now)
            address.task = asyncio.create_task(self._keep_linked(address), name=f"link {url}")
            return
        address.last_registered_at = now
        if peer is not None and address.expected != peer:
            address.expected = peer
            if address.worker is not None and address.worker.peer != peer and address.link is not None:
                address.link.close(f"{peer} is at its address now")

    def _unfollow(self, address: _Address, reason: str) -> None:
        self._addresses.pop(address.url, None)
        if address.link is not None:
            address.link.close(reason)
        if address.task is not None:
            address.task.cancel()

    # ---- links

    async def _keep_linked(self, address: _Address) -> None:
        """The life of one address: connect, live, lose, again. A task root."""
        backoff_s = MIN_BACKOFF_S
        try:
            while not self._is_closing:
                began_at = asyncio.get_running_loop().time()
                reason = await self._one_link(address)
                now = asyncio.get_running_loop().time()
                backoff_s = MIN_BACKOFF_S if now - began_at > MAX_BACKOFF_S else min(2 * backoff_s, MAX_BACKOFF_S)
                logger.log(logging.DEBUG if reason == address.last_reason else logging.INFO, "no link to %s: %s", address.url, reason)
                address.last_reason = reason
                if not address.is_configured and now - max(address.last_registered_at, began_at if address.refusal else 0) > FORGET_AFTER_S:
                    self._addresses.pop(address.url, None)
                    return
                await asyncio.sleep(MAX_BACKOFF_S if address.refusal else backoff_s)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("the keeper of %s failed", address.url)
            self._addresses.pop(address.url, None)
        finally:
            if address.link is not None:
                address.link.close("no longer followed")

    async def _one_link(self, address: _Address) -> str:
        """Connect and stay until the link ends. Returns why."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def on_closed(link: Link, reason: str) -> None:
            try:
                self._link_ended(address, link, reason)
            finally:  # whatever a callback does, the address is tried again
                if not ended.done():
                    ended.set_result(reason)

        try:
            link = await open_link(address.url, self._settings.link, partial(self._frame_arrived, address), on_closed)
        except PdServeError as error:
            return error.message
        address.link = link
        watch = loop.call_later(self._settings.worker_timeout_s, self._watch, address, link)
        try:
            return await ended
        finally:
            watch.cancel()

    def _watch(self, address: _Address, link: Link) -> None:
        """Suspect a worker from which nothing was heard; re-arms itself while the link lives."""
        if address.link is not link:
            return
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - link.last_heard_at
        if address.worker is None and silent_s < WELCOME_TIMEOUT_S:
            loop.call_later(self._settings.worker_timeout_s, self._watch, address, link)
            return
        if silent_s >= self._settings.worker_timeout_s:
            logger.warning("%s: nothing heard for %.1f s, taken for lost", address.url, silent_s)
            link.abort("silent")
            self._link_ended(address, link, "silent")
            return
        loop.call_later(self._settings.worker_timeout_s - silent_s, self._watch, address, link)

    def _link_ended(self, address: _Address, link: Link, reason: str) -> None:
        if address.link is link:
            address.link = None
        worker = address.worker
        if worker is None or worker.link is not link:
            return
        address.worker = None
        del self._workers[worker.peer]
        if not self._is_closing:
            self._metrics.count("pd_serve_lost_links_total")
            logger.warning("lost %s at %s: %s", worker.peer, address.url, reason)
        self.prefixes.forget(worker.peer)
        self._export_workers()
        self.on_lost(worker.peer)
        worker.lost()
        self.breakers.forget(worker.peer)
        self._broadcast_peers()
        self.on_change()

    # ---- frames

    def _frame_arrived(self, address: _Address, link: Link, frame: WorkerFrame) -> None:
        worker = address.worker
        if worker is None or worker.link is not link:
            self._first_frame(address, link, frame)
        elif problem := nonsense_in(frame, worker.welcome.vocab_size):
            self._refuse(address, link, problem)
        elif isinstance(frame, Load):
            changed = frame.role is not worker.load.role
            if frame.blocks.total != worker.load.blocks.total:
                self.version += 1
            worker.load = frame
            if changed:
                self._export_workers()
                self._broadcast_peers()
            self.on_frame(worker.peer, frame)
            self._report_came()
            worker.reported()
        elif isinstance(frame, PeerStatus):
            worker.peer_status = frame
            worker.joined = frozenset(state.peer for state in frame.states if state.joined)
            self.on_change()
        elif isinstance(frame, CacheEvents):
            if self.prefixes.apply(worker.peer, frame):
                self._metrics.count("pd_serve_cache_event_gaps_total")
                link.send(CacheSnapshot())
        elif isinstance(frame, Welcome):
            self._refuse(address, link, "sent a second Welcome")
        else:
            self.on_frame(worker.peer, frame)

    def _first_frame(self, address: _Address, link: Link, frame: WorkerFrame) -> None:
        if not isinstance(frame, Welcome):
            self._refuse(address, link, f"began with {type(frame).__name__} instead of Welcome")
            return
        expected_id = address.expected.worker_id if address.expected else None
        try:
            check_compatible(frame, self._settings.text_vocab_size, self._reference(), expected_id)
        except IncompatibleError as error:
            self._metrics.count("pd_serve_refused_workers_total")
            self._refuse(address, link, error.message)
            address.refused = frame
            return
        peer = frame.info.peer
        if self._removed.get(peer.worker_id, (None, ""))[0] == peer.incarnation:
            self._refuse(address, link, f"{peer} was removed by an operator: add its address, or start it anew")
            return
        twin = next((worker for worker in self._workers.values() if worker.peer.worker_id == peer.worker_id), None)
        if twin is not None:
            if twin.peer == peer:
                self._refuse(address, link, f"{peer} is already linked at {twin.address}")
                return
            twin.link.abort(f"{peer} has taken its name")
            self._link_ended(self._addresses.get(twin.address, address), twin.link, f"{peer} has taken its name")
        load = Load(0, frame.info.role, True, _NO_BLOCKS, 0, 0, 0, 0, 0)  # draining: nothing is sent there before its first own Load
        address.refusal, address.refused, address.last_reason, address.expected, address.link = "", None, "", peer, link
        address.worker = self._workers[peer] = LinkedWorker(peer, address.url, link, frame, load, asyncio.get_running_loop().time())
        self.prefixes.linked(peer, frame.info.layout.block_size)
        logger.info("linked to %s (%s) at %s", peer, frame.info.role.value, address.url)
        self._export_workers()
        self._broadcast_peers()

    def _reference(self) -> Welcome | None:
        return next((worker.welcome for worker in self._workers.values()), None)

    def _refuse(self, address: _Address, link: Link, reason: str) -> None:
        if reason != address.refusal:
            logger.error("refused the worker at %s: %s", address.url, reason)
        address.refusal = reason
        link.close(reason)

    def _broadcast_peers(self) -> None:
        frame = Peers(tuple(msgspec.structs.replace(worker.welcome.info, role=worker.load.role) for worker in self._workers.values()))
        for worker in self._workers.values():
            worker.link.send(frame)

    def _export_workers(self) -> None:
        self.version += 1
        self._linked = tuple(self._workers.values())
        for role in Role:
            count = sum(worker.load.role is role for worker in self._workers.values())
            self._metrics.record("pd_serve_linked_workers", count, role.value)


_NO_BLOCKS = BlockCounts(0, 0, 0, 0, 0)
