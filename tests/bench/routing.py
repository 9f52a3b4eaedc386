"""What routing costs and what it brings: time of a decision by number of workers, and policies on a simulated fleet (tests/sim/routing.py).

python -m tests.bench.routing            both
python -m tests.bench.routing decisions  on this machine, in this process
python -m tests.bench.routing policies   in virtual time: the same everywhere
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import msgspec

from pd_serve.config import Config
from pd_serve.ids import PeerId
from pd_serve.protocol.cache_events import CacheEvents
from router.assignment import Assigner
from router.policy.registry import new_chooser, policy_names
from router.prefixes import Prefixes
from router.throughput import Throughput
from tests.sim.routing import BLOCK, FleetSpec, Outcome, Prompt, Request, RoutingSim
from tests.sim.sessions import burst, conversations, stream
from tests.unit.router.routes import config_of

SIZES = (2, 10, 100, 1000)
NUM_DECISIONS = 500
FLEETS = {
    "4 prefill workers, alike": (FleetSpec((8000.0,) * 4, 4), 4.0),
    "2 prefill workers, short of them": (FleetSpec((8000.0,) * 2, 4), 6.0),
    "4 prefill workers, 8:4:2:2": (FleetSpec((2000.0, 2000.0, 4000.0, 8000.0), 4), 4.0),
}
CHOICES: dict[str, tuple[dict[str, object], dict[str, object], bool]] = {
    **{name: ({"policy": name}, {}, False) for name in policy_names()},
    "least_tokens, sessions named": ({"policy": "least_tokens"}, {}, True),
    "least_tokens, conditional": ({"policy": "least_tokens"}, {"local_max_uncached_tokens": 512}, False),
    "least_ttft, conditional": ({"policy": "least_ttft"}, {"local_max_uncached_tokens": 512}, False),
}


def decision_s(policy: str, num_workers: int, session: str = "", **routing: object) -> tuple[float, float]:
    """(median, 99 %) of processor seconds for one decision among so many workers, half of each role, all joined: from the queue's head to
    the charges, what workers have of its prompt looked up. Prompts are computed 50 decisions later and end after another 50; with each
    decision a worker reports and tells of its cache.
    """
    spec = FleetSpec((8000.0,) * (num_workers // 2), num_workers - num_workers // 2)
    config = config_of({"policy": policy}, **routing).model_copy(
        update={"engine": Config().engine.model_copy(update={"max_batch_tokens": 1 << 30})}
    )
    nodes = RoutingSim(spec, config, lambda prompt, now: None).nodes
    pool = SimpleNamespace(
        workers=tuple(node.linked for node in nodes.values()),
        is_joining=lambda worker: False,
        breakers=SimpleNamespace(usable=lambda demand, views, now: views, sent=_nothing, spoke=_nothing, ended=_nothing),
    )
    speeds = Throughput()
    assigner = Assigner(pool, new_chooser(config, lambda: speeds.handover_s), speeds, time.monotonic)  # type: ignore[arg-type]
    peers: tuple[PeerId, ...] = tuple(nodes)
    prefixes, keys = _known_prefixes(peers)
    taken: list[float] = []
    open_requests: list[Request] = []
    for number in range(NUM_DECISIONS):
        prompt = Prompt("s", 100 + number % 900, 0, 10)
        cached = prefixes.cached_keys(keys[: prompt.num_tokens // BLOCK], prompt.num_tokens)
        request = Request(number, prompt, 0.0, cached, session)
        queue = SimpleNamespace(head=lambda request=request: request, short_head=lambda: None, num_passed_over=0)
        began = time.thread_time()
        found = assigner.next(queue, lambda generation, views: False)  # type: ignore[arg-type]
        assert found is not None
        assigner.taken(request, found[1])  # type: ignore[arg-type]
        taken.append(time.thread_time() - began)
        open_requests.append(request)
        _go_on(assigner, open_requests)
        reporting = nodes[peers[number % num_workers]].linked
        reporting.load = msgspec.structs.replace(reporting.load, seq=number)
        assigner.book.reported(reporting.peer, time.monotonic())
        prefixes.apply(reporting.peer, CacheEvents(1 + number // num_workers, number.to_bytes(8, "little")))
    taken.sort()
    return taken[NUM_DECISIONS // 2], taken[NUM_DECISIONS * 99 // 100]


def _known_prefixes(peers: tuple[PeerId, ...]) -> tuple[Prefixes, list[int]]:
    """Each has a part of what all prompts begin with, of eight lengths; and the digests of that."""
    prefixes, keys = Prefixes(time.monotonic), [(1 << 63) + index for index in range(64)]
    for index, peer in enumerate(peers):
        prefixes.linked(peer, BLOCK)
        stored = b"".join(key.to_bytes(8, "little") for key in keys[: 4 * (index % 8)])
        prefixes.apply(peer, CacheEvents(0, stored, num_parts=1))
    return prefixes, keys


def _go_on(assigner: Assigner, open_requests: list[Request]) -> None:
    """The rest of the lives of those before."""
    now, request = time.monotonic(), open_requests[-1]
    assigner.reserved(request, request.charged[-1], now)  # type: ignore[arg-type]
    if len(request.charged) > 1:
        assigner.sent_prefill(request, request.charged[0], now)  # type: ignore[arg-type]
    if len(open_requests) > 50:
        request = open_requests[-50]
        assigner.prefilled(request, request.charged[0], request.prompt.num_tokens, now)  # type: ignore[arg-type]
        assigner.spoke(request, 0, now)  # type: ignore[arg-type]
    if len(open_requests) > 100:
        assigner.left(open_requests.pop(0), now)  # type: ignore[arg-type]


def _nothing(generation: object, now: float) -> None:
    return None


def print_decisions() -> None:
    print(f"| policy | {' | '.join(f'{size} workers, us (p50 / p99)' for size in SIZES)} |")
    print(f"|---|{'---|' * len(SIZES)}")
    arms: list[tuple[str, str, str, dict[str, object]]] = [(name, name, "", {}) for name in policy_names()]
    arms += [
        ("least_tokens, session", "least_tokens", "s", {}),
        ("least_ttft, conditional", "least_ttft", "", {"local_max_uncached_tokens": 512}),
    ]
    for title, policy, session, routing in arms:
        cells = [decision_s(policy, size, session, **routing) for size in SIZES]
        print(f"| {title} | " + " | ".join(f"{p50 * 1e6:.0f} / {p99 * 1e6:.0f}" for p50, p99 in cells) + " |")


def print_policies() -> None:
    for fleet, (spec, per_s) in FLEETS.items():
        print(f"\n{fleet}: 80 conversations of 6 turns, {per_s:g} begun per second\n")
        print("| | cached | TTFT ms p50 | p90 | p99 | computed at decode | streams stood still |\n|---|---|---|---|---|---|---|")
        for name, (router, routing, names_sessions) in CHOICES.items():
            found = conversations(spec, config_of(router, **routing), 1, number=80, per_s=per_s, names_sessions=names_sessions)
            print(f"| {name} | {_row(found)} |")
    print("\nBurst of 200 prompts of 20 to 1,900 tokens within 100 ms, 4 prefill workers alike: tokens of the most loaded by the mean\n")
    print("| policy | over the mean | 400 single prompts, 9/s, on 8:4:2:2: TTFT ms p50 | p90 |\n|---|---|---|---|")
    for name in policy_names():
        config = config_of({"policy": name})
        found = burst(FLEETS["4 prefill workers, alike"][0], config, 1)
        share = max(found.assigned.values()) * len(found.assigned) / sum(found.assigned.values())
        mixed = stream(FLEETS["4 prefill workers, 8:4:2:2"][0], config, 3, 400, 9.0)
        print(f"| {name} | {share:.2f} | {1e3 * mixed.ttft(0.5):.0f} | {1e3 * mixed.ttft(0.9):.0f} |")


def _row(found: Outcome) -> str:
    local = sum(count for kind, count in found.kinds.items() if kind.startswith("local"))
    times = " | ".join(f"{1e3 * found.ttft(share):.0f}" for share in (0.5, 0.9, 0.99))
    return f"{found.hit_rate:.0%} | {times} | {local / sum(found.kinds.values()):.0%} | {found.stalled_share:.1%}"


if __name__ == "__main__":
    what = sys.argv[1:] or ["decisions", "policies"]
    if "decisions" in what:
        print_decisions()
    if "policies" in what:
        print_policies()
