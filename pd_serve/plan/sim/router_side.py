"""The router in a simulation: its own Dispatcher with everything that it decides by, before simulated workers instead of links.

What is played here is what surrounds it: the pool (which workers are linked, frames in and out, what reports and cache events bring) and
metrics that cost little. Tokens are not carried: a request's first and last reach the dispatcher, those between are counted (requests.py).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import cast

from prometheus_client import CollectorRegistry

from pd_serve.config import Config
from pd_serve.ids import PeerId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.observe import METRICS, Histogram, Metrics
from pd_serve.plan.sim.events import VirtualLoop
from pd_serve.plan.sim.node import Node
from pd_serve.plan.sim.requests import CountedLifecycle, ask_in
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.cache_events import MAX_DIGESTS, CacheEvents
from pd_serve.protocol.client import Link
from pd_serve.protocol.link import PeerInfo, PeerState, PeerStatus, Role, RouterFrame, Welcome, WorkerFrame
from pd_serve.protocol.sampling import SamplingParams
from router.assignment import Assigner
from router.breaker import Breakers
from router.dispatcher import Dispatcher, DispatcherSettings
from router.generation import Generation
from router.lifecycle import LifecycleSettings
from router.linked_worker import LinkedWorker
from router.occupancy import OwnOccupancy
from router.overload import overload_settings
from router.policy.chooser import RouteChooser
from router.policy.registry import new_chooser
from router.pool import WorkerPool
from router.prefixes import CachedTokens, Prefixes
from router.throughput import Throughput

MAX_MODEL_LEN = 1 << 24
"""Of all workers: a simulation refuses no request for its length."""


class CountedMetrics(Metrics):
    """Sums by name and labels; histograms where somebody reads them."""

    def __init__(self) -> None:
        self.sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.last_rejection = ""
        """Label of the last of pd_serve_rejections_total."""
        self.gaps = GapHistogram()
        self._histograms: dict[str, Histogram] = {"pd_serve_inter_token_latency_seconds": self.gaps}

    def record(self, name: str, value: float, *labels: str) -> None:
        self.sums[name, *labels] += value
        if name == "pd_serve_rejections_total":
            self.last_rejection = labels[0]

    def histogram(self, name: str) -> Histogram:
        if name not in self._histograms:
            self._histograms[name] = Histogram(name, "", _buckets(name), CollectorRegistry())
        return self._histograms[name]

    def clear(self, name: str) -> None:
        return None


class GapHistogram(Histogram):
    """Of inter-token latency: the router sees a request's first and last token only, workers tell what lies between."""

    def __init__(self) -> None:
        name = "pd_serve_inter_token_latency_seconds"
        super().__init__(name, "", _buckets(name), CollectorRegistry())

    def observe(self, value: float) -> None:
        return None

    def add(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._buckets, value)] += count


class CountedDispatcher(Dispatcher):
    """Whose prompts are Asks."""

    def _new(
        self, token_ids: tuple[int, ...], sampling: SamplingParams, wake: Callable[[], None], wakes_on_token: bool, takes_what_fits: bool
    ) -> Generation:
        ask = ask_in(token_ids)
        generation = super()._new((), sampling, wake, wakes_on_token, takes_what_fits)
        generation.num_prompt_tokens = len(ask)
        generation.lifecycle = CountedLifecycle(self._settings.lifecycle, ask, sampling, self._new_attempt_id)
        return generation


class KeyedPrefixes(Prefixes):
    """Whose prompts have their keys with them."""

    def cached(self, token_ids: tuple[int, ...]) -> CachedTokens:
        ask = ask_in(token_ids)
        return self.cached_keys(ask.keys, len(ask))


class SimulatedPool:
    """Plays WorkerPool: link -> frames -> lose. A worker that has changed reports at once, but not sooner than the rhythm says after its
    last report."""

    def __init__(self, loop: VirtualLoop, config: Config, metrics: Metrics, chooser: RouteChooser, rhythm: Rhythm) -> None:
        self.prefixes = KeyedPrefixes(loop.now, chooser.reads_cached)
        self.workers: tuple[LinkedWorker, ...] = ()
        self.on_frame: Callable[[PeerId, WorkerFrame], None] = lambda peer, frame: None
        self.on_lost: Callable[[PeerId], None] = lambda peer: None
        self.on_change: Callable[[], None] = lambda: None
        self._loop = loop
        self._config = config
        self._rhythm = rhythm
        self._reads_cached = chooser.reads_cached
        self._linked: dict[PeerId, LinkedWorker] = {}
        self._nodes: dict[PeerId, Node] = {}
        self._reported_at: dict[PeerId, float] = {}
        """When each last did; the future: when it will."""
        self._seqs: Counter[PeerId] = Counter()
        self.breakers = Breakers(config.breaker, metrics, self._linked)

    # ---- for the router

    def is_joining(self, worker: LinkedWorker) -> bool:
        return False

    def find(self, worker_id: str) -> LinkedWorker | None:
        return next((worker for worker in self.workers if worker.peer.worker_id == worker_id), None)

    def send(self, peer: PeerId, frame: RouterFrame) -> bool:
        node = self._nodes.get(peer)
        if node is None:
            return False
        self._loop.soon(node.receive, frame)
        return True

    # ---- for the workers

    def hear(self, peer: PeerId, frame: WorkerFrame) -> None:
        if peer in self._linked:
            self.on_frame(peer, frame)

    def changed(self, node: Node) -> None:
        """It has something to report."""
        now, reported_at = self._loop.now(), self._reported_at.get(node.peer)
        if reported_at is not None and reported_at <= now:
            due_at = max(now, reported_at + self._rhythm.report_s)
            self._reported_at[node.peer] = math.nextafter(due_at, math.inf)
            self._loop.at(due_at, self.report, node)

    def report(self, node: Node) -> None:
        """Now."""
        worker = self._linked.get(node.peer)
        if worker is None:
            return
        self._reported_at[node.peer] = self._loop.now()
        worker.load = load = node.load()
        self.on_frame(node.peer, load)
        if node.pool.has_changes:
            self._tell_cache(node)
        self.on_change()

    # ---- who is linked

    def link(self, nodes: list[Node]) -> None:
        """They are up, and joined with all that are."""
        for node in nodes:
            self._nodes[node.peer] = node
            self._reported_at[node.peer] = self._loop.now()
            info = _info(node.peer, node.role, node.model, self._config)
            welcome = Welcome(info, "planned", MAX_MODEL_LEN, 1 << 17, (), 0, ())
            self._linked[node.peer] = LinkedWorker(node.peer, "simulated", cast(Link, None), welcome, node.load(), self._loop.now())
            self.prefixes.linked(node.peer, self._rhythm.cache_block_tokens)
            if self._reads_cached:
                self.prefixes.apply(node.peer, CacheEvents(0, b"", num_parts=1))
        self.workers = tuple(self._linked.values())
        peers = tuple(self._linked)
        joined, status = (
            frozenset(peers),
            PeerStatus(tuple([PeerState(peer, True, "nic", True, self._rhythm.bytes_per_s, "") for peer in peers])),
        )
        for worker in self.workers:
            worker.joined, worker.peer_status = joined, status
        self.on_change()

    def lose(self, node: Node) -> None:
        """Its link has ended."""
        del self._nodes[node.peer], self._linked[node.peer], self._reported_at[node.peer]
        self._seqs.pop(node.peer, None)
        self.workers = tuple(self._linked.values())
        self.prefixes.forget(node.peer)
        self.breakers.forget(node.peer)
        self.on_lost(node.peer)
        self.on_change()

    def _tell_cache(self, node: Node) -> None:
        stored, removed = node.pool.changes()
        for begin in range(0, max(len(stored), len(removed)), MAX_DIGESTS):
            part = slice(begin, begin + MAX_DIGESTS)
            self._seqs[node.peer] += 1
            self.prefixes.apply(node.peer, CacheEvents(self._seqs[node.peer], _packed(stored[part]), _packed(removed[part])))


class Rhythm:
    """What the pool tells of the cluster, and how often."""

    def __init__(self, report_s: float, cache_block_tokens: int, bytes_per_s: float) -> None:
        self.report_s = report_s
        self.cache_block_tokens = cache_block_tokens
        self.bytes_per_s = bytes_per_s


class RouterSide:
    """One router process."""

    def __init__(self, loop: VirtualLoop, config: Config, rhythm: Rhythm) -> None:
        """Raises ConfigError."""
        self.config = config
        self.metrics = CountedMetrics()
        self.occupancy = OwnOccupancy()
        speeds = Throughput()
        self.chooser = new_chooser(config, lambda: speeds.handover_s)
        self.pool = SimulatedPool(loop, config, self.metrics, self.chooser, rhythm)
        router = config.router
        settings = DispatcherSettings(
            lifecycle=LifecycleSettings(router.transfer_timeout_s, router.handover_timeout_s, router.max_moves),
            routing=self.chooser.settings,
            queue_timeout_s=router.queue_timeout_s,
            request_timeout_s=router.request_timeout_s,
            max_queued=router.max_queued_requests,
            share_prefix=config.kv.prefix_cache,
            overload=overload_settings(config),
        )
        pool = cast(WorkerPool, self.pool)
        self.assigner = Assigner(pool, self.chooser, speeds, loop.now)
        self.dispatcher = CountedDispatcher(pool, self.assigner, settings, self.metrics, loop, self.occupancy)

    def is_empty(self) -> bool:
        """Nothing is left of any request."""
        return self.dispatcher.is_empty() and not self.occupancy.num_open


def _info(peer: PeerId, role: Role, model: WorkerModel, config: Config) -> PeerInfo:
    """A layout of about as many bytes per token: for the router's predictions of transfers alone."""
    head_dim = max(1, round(model.kv_bytes_per_token / (model.num_layers * KVDtype.BFLOAT16.nbytes)))
    num_blocks = model.num_kv_tokens // config.kv.block_size
    layout = KVLayout(model.num_layers, 1, head_dim, config.kv.block_size, num_blocks, KVDtype.BFLOAT16, num_planes=1)
    return PeerInfo(peer, role, 0, "planned", layout, "simulated", (b"",))


def _packed(keys: list[int]) -> bytes:
    return array("Q", keys).tobytes()


def _buckets(name: str) -> tuple[float, ...]:
    return next(spec.buckets for spec in METRICS if spec.name == name)
