"""A fleet in virtual time under the router's own Assigner, load book and policies: who is chosen, what was cached, how long first tokens
took.

A prefill worker computes its prompts one after the other; KV goes to decode layer by layer beside it; a decode worker generates all its
sequences at a fixed pace, which stands still for as long as it computes a prompt itself. Workers report every 100 ms, and have prefix
caches that forget what was used longest ago. What the router knows of the caches is right.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

from pd_serve.config import Config
from pd_serve.ids import PeerId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import BlockCounts, Load, PeerState, PeerStatus, Role
from router.assignment import Assigner
from router.linked_worker import LinkedWorker
from router.policy.base import Demand, Route, WorkerView
from router.policy.registry import new_chooser
from router.throughput import Throughput
from tests.fakes import peer_id, peer_info, welcome

BLOCK = 16
NUM_BLOCKS = 1 << 16
REPORT_S = 0.1
HANDOVER_S = 0.003
STEP_S = 0.02
PROMPT_OVERHEAD_S = 0.002


class Prompt(NamedTuple):
    session: str
    num_tokens: int
    num_shared: int
    """Of its first tokens, those that all sessions begin with."""
    num_output: int


@dataclass(frozen=True)
class FleetSpec:
    prefill_rates: tuple[float, ...]
    """Prompt tokens per second of each prefill worker."""
    num_decode: int
    decode_rate: float = 4000.0
    """Prompt tokens per second of a decode worker that computes a prompt itself."""
    bandwidth: float = 2e9
    cache_tokens: int = 60_000


class Cache:
    """Prefixes by name; the longest under each name is kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[str, int] = OrderedDict()
        self._num_tokens = 0

    def match(self, prompt: Prompt) -> int:
        held = max(self._held.get(prompt.session, 0), min(self._held.get("", 0), prompt.num_shared))
        return min(held, prompt.num_tokens - 1) // BLOCK * BLOCK

    def put(self, name: str, num_tokens: int) -> None:
        before = self._held.pop(name, 0)
        self._held[name] = max(before, num_tokens)
        self._num_tokens += self._held[name] - before
        while self._num_tokens > self._capacity and len(self._held) > 1:
            self._num_tokens -= self._held.popitem(last=False)[1]

    def publish(self, prompt: Prompt, num_tokens: int) -> None:
        self.put(prompt.session, num_tokens)
        self.put("", prompt.num_shared)


@dataclass(eq=False)
class Request:
    """What the Assigner knows a Generation by, and what the simulation remembers of it."""

    key: int
    prompt: Prompt
    arrived_at: float
    cached: Mapping[PeerId, int] = field(default_factory=dict)
    named_session: str = ""
    charged: tuple[PeerId, ...] = ()
    prefilled_at: float = 0.0
    has_spoken: bool = False
    is_returned: bool = False
    ends_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and first token."""
        return self.prompt.num_tokens + 1

    @property
    def demand(self) -> Demand:
        return Demand(self.prompt.num_tokens, self.prompt.num_output, cached=self.cached, session=self.named_session)

    def charge(self, peers: tuple[PeerId, ...]) -> None:
        self.charged = peers


@dataclass(eq=False)
class Node:
    linked: LinkedWorker
    rate: float
    cache: Cache
    free_at: float = 0.0
    num_queued: int = 0
    num_assigned: int = 0
    running: dict[int, Request] = field(default_factory=dict)


@dataclass
class Outcome:
    ttfts: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed: int = 0
    stalled_s: float = 0.0
    """Of all streams together: prompts were computed beside them."""
    streamed_s: float = 0.0
    """Of all streams together, without that."""
    kinds: Counter[str] = field(default_factory=Counter)
    assigned: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by prefill worker."""

    @property
    def hit_rate(self) -> float:
        return 1 - self.num_computed / self.num_prompt_tokens

    @property
    def stalled_share(self) -> float:
        return self.stalled_s / (self.stalled_s + self.streamed_s)

    def ttft(self, share: float) -> float:
        ordered = sorted(self.ttfts)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class RoutingSim:
    """submit() requests at times, then run()."""

    def __init__(self, spec: FleetSpec, config: Config, follow_up: Callable[[Prompt, float], tuple[float, Prompt] | None]) -> None:
        """`follow_up` of a prompt that was answered, and when: the next request, and its time."""
        self._spec = spec
        self._follow_up = follow_up
        self.now = 0.0
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._keys = itertools.count(1)
        self._waiting: list[Request] = []
        self._num_open = 0
        rates = [*((Role.PREFILL, rate) for rate in spec.prefill_rates), *((Role.DECODE, spec.decode_rate) for _ in range(spec.num_decode))]
        self.nodes = {node.linked.peer: node for node in (self._node(i, role, rate) for i, (role, rate) in enumerate(rates))}
        self._join_all()
        self._speeds = Throughput()
        pool = SimpleNamespace(
            workers=tuple(node.linked for node in self.nodes.values()),
            is_joining=lambda worker: False,
            breakers=_NoBreakers(),
        )
        chooser = new_chooser(config, lambda: self._speeds.handover_s)
        self._assigner = Assigner(pool, chooser, self._speeds, lambda: self.now)  # type: ignore[arg-type]
        self._queue = SimpleNamespace(head=lambda: self._waiting[0] if self._waiting else None, short_head=lambda: None, num_passed_over=0)

    def submit(self, at: float, prompt: Prompt, session: str = "") -> None:
        self._num_open += 1
        self._after(at, lambda: self._arrive(prompt, session))

    def run(self) -> Outcome:
        self._after(0.0, self._report)
        while self._num_open:
            self.now, _, event = heapq.heappop(self._events)
            event()
        assert self._assigner.is_empty()
        self.outcome.assigned = {
            str(node.linked.peer.worker_id): node.num_assigned for node in self.nodes.values() if not node.linked.can_decode
        }
        return self.outcome

    # ---- the router

    def _arrive(self, prompt: Prompt, session: str) -> None:
        self._waiting.append(Request(next(self._keys), prompt, self.now, named_session=session))
        self._pump()

    def _pump(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            head.cached = {peer: node.cache.match(head.prompt) for peer, node in self.nodes.items()}
            found = self._assigner.next(self._queue, lambda generation, views: False)  # type: ignore[arg-type]
            if found is None:
                return
            del self._waiting[0]
            self._begin(head, found[1])

    def _begin(self, request: Request, route: Route) -> None:
        self._assigner.taken(request, route)  # type: ignore[arg-type]
        self.outcome.kinds[f"{route.kind.value}/{route.reason}"] += 1
        decode = self.nodes[route.decode.peer]
        computing = decode if route.prefill is None else self.nodes[route.prefill.peer]
        prompt = request.prompt
        num_new = prompt.num_tokens - computing.cache.match(prompt)
        missing = prompt.num_tokens - decode.cache.match(prompt)
        self._assigner.reserved(request, decode.linked.peer, self.now)  # type: ignore[arg-type]
        begins_at = max(self.now, computing.free_at)
        compute_s = PROMPT_OVERHEAD_S + num_new / computing.rate
        computing.free_at = ends_at = begins_at + compute_s
        computing.num_queued += num_new
        computing.num_assigned += prompt.num_tokens
        computing.cache.publish(prompt, prompt.num_tokens)
        self.outcome.num_prompt_tokens += prompt.num_tokens
        self.outcome.num_computed += num_new
        if computing is decode:
            self.outcome.stalled_s += compute_s * len(decode.running)
            for other in decode.running.values():
                other.ends_at += compute_s
            speaks_at = ends_at
        else:
            self._assigner.sent_prefill(request, computing.linked.peer, self.now)  # type: ignore[arg-type]
            transfer_s = missing * _layout().bytes_per_token / self._spec.bandwidth
            layers = _layout().num_layers
            speaks_at = max(ends_at + transfer_s / layers, begins_at + transfer_s) + HANDOVER_S
        self._after(ends_at, lambda: self._computed(request, computing, decode, num_new))
        self._after(speaks_at, lambda: self._spoke(request, decode))

    def _computed(self, request: Request, computing: Node, decode: Node, num_new: int) -> None:
        computing.num_queued -= num_new
        if computing is not decode:
            self._assigner.prefilled(request, computing.linked.peer, num_new, self.now)  # type: ignore[arg-type]
            self._pump()

    def _spoke(self, request: Request, decode: Node) -> None:
        self._assigner.spoke(request, 0, self.now)  # type: ignore[arg-type]
        self.outcome.ttfts.append(self.now - request.arrived_at)
        decode.cache.publish(request.prompt, request.prompt.num_tokens)
        decode.running[request.key] = request
        request.ends_at = self.now + STEP_S * request.prompt.num_output
        self.outcome.streamed_s += STEP_S * request.prompt.num_output
        self._after(request.ends_at, lambda: self._end(request, decode))
        self._pump()

    def _end(self, request: Request, decode: Node) -> None:
        if request.ends_at > self.now:
            self._after(request.ends_at, lambda: self._end(request, decode))
            return
        del decode.running[request.key]
        self._assigner.left(request, self.now)  # type: ignore[arg-type]
        prompt = request.prompt
        decode.cache.publish(prompt, prompt.num_tokens + prompt.num_output)
        self._num_open -= 1
        following = self._follow_up(prompt, self.now)
        if following is not None:
            self.submit(*following, session=request.named_session)
        self._pump()

    # ---- the fleet

    def _report(self) -> None:
        for node in self.nodes.values():
            context = sum(request.prompt.num_tokens for request in node.running.values())
            free = NUM_BLOCKS - context // BLOCK
            blocks = BlockCounts(NUM_BLOCKS, free, 0, 0, 0)
            node.linked.load = Load(0, node.linked.load.role, False, blocks, 0, len(node.running), 0, node.num_queued, context)
            self._assigner.book.reported(node.linked.peer, self.now, not node.num_queued)
        self._pump()
        self._after(self.now + REPORT_S, self._report)

    def _after(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _node(self, index: int, role: Role, rate: float) -> Node:
        peer = peer_id(f"{role.value}-{index}")
        load = Load(0, role, False, BlockCounts(NUM_BLOCKS, NUM_BLOCKS, 0, 0, 0), 0, 0, 0, 0, 0)
        linked = LinkedWorker(peer, "http://x", None, welcome(peer_info(peer, role, _layout()), 1 << 20), load, 0.0)  # type: ignore[arg-type]
        return Node(linked, rate, Cache(self._spec.cache_tokens))

    def _join_all(self) -> None:
        peers = tuple(self.nodes)
        for node in self.nodes.values():
            node.linked.peer_status = PeerStatus(tuple(PeerState(peer, True, "sim", True, self._spec.bandwidth, "") for peer in peers))
            node.linked.joined = frozenset(peers)


class _NoBreakers:
    """No worker here fails."""

    def usable(self, demand: Demand, views: tuple[WorkerView, ...], now: float) -> tuple[WorkerView, ...]:
        return views

    def sent(self, request: Request, now: float) -> None:
        return None

    spoke = ended = sent


def _layout() -> KVLayout:
    """Of a model of some 8 billion parameters: 128 KiB of KV per token."""
    return KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=BLOCK, num_blocks=NUM_BLOCKS, dtype=KVDtype.BFLOAT16)
