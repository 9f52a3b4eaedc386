"""What each policy chooses, and that the chooser's short way gives what a list of all routes would."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from pd_serve.ids import PeerId, WorkerId
from pd_serve.protocol.link import Role
from router.policy.base import Demand, Leg, LegPolicy, RoutingSettings, WorkerView
from router.policy.cache_aware import BalanceSettings, CacheAware
from router.policy.chooser import RouteChooser
from router.policy.least_tokens import LeastTokens
from router.policy.least_ttft import LeastTTFT
from router.policy.power_of_two import PowerOfTwo
from router.policy.registry import new_chooser, policy_names
from router.policy.session import SessionAffinity
from tests.unit.router.routes import D0, D1, P0, P1, SETTINGS, chooser, config_of, fleet, possible_routes, view

OPEN = RoutingSettings(0, 10**9, 10**9)


def with_load(workers: tuple[WorkerView, ...], **backlogs: dict[str, object]) -> tuple[WorkerView, ...]:
    """Fields by name of worker."""
    return tuple(msgspec.structs.replace(worker, **backlogs.get(worker.peer.worker_id, {})) for worker in workers)


def names_of(router: RouteChooser, demand: Demand, workers: tuple[WorkerView, ...]) -> tuple[str | None, str]:
    route = router.choose(demand, workers)
    assert route is not None
    return route.prefill and route.prefill.peer.worker_id, route.decode.peer.worker_id


@pytest.mark.parametrize("name", policy_names())
def test_no_policy_is_asked_to_choose_among_no_decode_workers(name: str) -> None:
    full = (view("p0", Role.PREFILL, (D0,)), view("d0", Role.DECODE, (P0,), num_free_tokens=10))
    demand = Demand(100, 10, cached={P0: 16, D0: 16}, session="a session")
    router = new_chooser(config_of({"policy": name}), lambda: 0.0)
    for each in (demand, msgspec.structs.replace(demand, session="")):
        assert router.choose(each, full) is None
    fits = (full[0], msgspec.structs.replace(full[1], num_free_tokens=4096))
    moved = msgspec.structs.replace(demand, avoid=frozenset({D0}))
    assert names_of(router, moved, fits) == ("p0", "d0")


# ---- the short way


def random_workers(rng: random.Random) -> tuple[WorkerView, ...]:
    """A fleet of some size in which some are full, busy, joining, not joined or of another role."""
    names = [
        (f"w{index}", rng.choice((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH))) for index in range(rng.randrange(1, 9))
    ]
    peers = [PeerId(WorkerId(name), view("x", Role.BOTH).peer.incarnation) for name, _ in names]
    share = rng.choice((0.3, 0.8, 1.0))
    return tuple(
        view(
            name,
            role,
            tuple(peer for peer in peers if rng.random() < share),
            prefill_backlog_tokens=rng.choice((0, 0, 100, 300, 600)),
            decode_tokens=rng.randrange(500),
            num_sequences=rng.randrange(9),
            num_free_tokens=rng.choice((4096, 4096, 50)),
            is_joining=rng.random() < 0.1,
        )
        for name, role in names
    )


def differs_from_all_routes(seed: int) -> str:
    """Empty: of 200 random fleets the choice of each is the least of all routes."""
    rng = random.Random(seed)
    for number in range(200):
        workers = random_workers(rng)
        avoid = frozenset(worker.peer for worker in workers if rng.random() < 0.2)
        demand = Demand(rng.choice((10, 60)), 10, avoid, beside=rng.choice((None, None, None, workers[0].peer)))
        routes = possible_routes(demand, workers, SETTINGS)
        chosen = chooser("least_tokens").choose(demand, workers)

        def cost(route: object) -> tuple[int, int]:
            return route.computing.load(Leg.PREFILL), route.decode.load(Leg.DECODE)  # type: ignore[attr-defined]

        if (chosen is None) != (not routes):
            return f"seed {seed}, fleet {number}: {chosen} of {len(routes)}"
        if chosen is not None and cost(chosen) != min(map(cost, routes)):
            return f"seed {seed}, fleet {number}: {cost(chosen)} instead of {min(map(cost, routes))}"
    return ""


@pytest.mark.parametrize("seed", range(3))
def test_choice_is_the_least_of_all_routes(seed: int) -> None:
    assert differs_from_all_routes(seed) == ""


def test_partner_that_is_taken_unasked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.policy.chooser.are_joined", lambda prefill, decode: True)
    assert any(differs_from_all_routes(seed) for seed in range(3))


class _Counting:
    """A policy whose scores are counted."""

    looks_at_pairs = True
    reads_cached = False

    def __init__(self) -> None:
        self.num_scores = 0

    def scorer(self, workers: object, demand: Demand) -> object:
        def score(worker: WorkerView, partner: WorkerView | None) -> tuple[float, ...]:
            self.num_scores += 1
            return (0.0,)

        return score

    def chosen(self, worker: WorkerView) -> None:
        return None


@pytest.mark.parametrize("size", [10, 100])
def test_work_grows_with_workers_and_not_with_pairs(size: int) -> None:
    prefill, decode = _Counting(), _Counting()
    RouteChooser(prefill, decode, OPEN).choose(Demand(10, 10), fleet(size, size))  # type: ignore[arg-type]
    assert prefill.num_scores <= 2 * size + 1
    assert decode.num_scores == size


# ---- each policy


def test_legs_have_policies_of_their_own() -> None:
    """Turns on prefill, load on decode."""
    workers = with_load(fleet(2, 2), p0={"prefill_backlog_tokens": 100}, d0={"decode_tokens": 1000})
    router = new_chooser(config_of({"prefill_policy": "round_robin"}), lambda: 0.0)
    assert [names_of(router, Demand(10, 10), workers) for _ in range(4)] == [("p0", "d1"), ("p1", "d1")] * 2
    assert all(names_of(chooser("least_tokens"), Demand(10, 10), workers) == ("p1", "d1") for _ in range(2))


def test_every_policy_places_a_burst() -> None:
    for name in policy_names():
        router = new_chooser(config_of({"policy": name}), lambda: 0.0)
        assert router.choose(Demand(10, 10), fleet(3, 3)) is not None, name
        assert router.choose(Demand(10, 10), (view("b0", Role.BOTH),)) is not None, name
        assert router.choose(Demand(10, 10), ()) is None, name


def largest_load(policy: LegPolicy, num_workers: int, num_requests: int) -> float:
    """Of requests of 100 tokens that all stay, by the mean; the load is seen as it was up to 8 requests ago, as other routers see it."""
    held = [0] * num_workers
    seen = list(held)
    for number in range(num_requests):
        if number % 8 == 0:
            seen = list(held)
        workers = tuple(view(f"p{index}", Role.PREFILL, prefill_backlog_tokens=tokens) for index, tokens in enumerate(seen))
        score = policy.scorer(workers, Demand(100, 1))
        chosen = min(range(num_workers), key=lambda index: score(workers[index], None))
        held[chosen] += 100
    return max(held) / (sum(held) / num_workers)


def test_two_choices_do_better_than_one_and_do_not_herd() -> None:
    """With load that is known late, the least loaded is where everybody runs to."""
    one = random.Random(1)
    alone = [0] * 16
    for _ in range(320):
        alone[one.randrange(16)] += 1
    two = largest_load(PowerOfTwo(Leg.PREFILL, random.Random(1)), 16, 320)
    assert two < max(alone) / 20
    assert two < 1.4


def test_power_of_two_draws_the_same_from_the_same_seed() -> None:
    routers = [new_chooser(config_of({"policy": "power_of_two"}, seed=seed), lambda: 0.0) for seed in (5, 5, 6)]
    drawn = [[names_of(router, Demand(10, 10), fleet(8, 8)) for _ in range(20)] for router in routers]
    assert drawn[0] == drawn[1] != drawn[2]


def test_power_of_two_takes_another_where_neither_is_joined() -> None:
    workers = (view("d0", Role.DECODE, (P1,)), *(view(f"p{i}", Role.PREFILL, (D0,) if i == 1 else ()) for i in range(6)))
    router = chooser("power_of_two")
    assert {names_of(router, Demand(10, 10), workers) for _ in range(30)} == {("p1", "d0")}


def cache_aware(difference: int = 1000, ratio: float = 1.5) -> RouteChooser:
    settings = BalanceSettings(difference, ratio)
    return RouteChooser(CacheAware(Leg.PREFILL, settings), CacheAware(Leg.DECODE, settings), OPEN)


def test_cache_aware_goes_where_most_is_cached_while_loads_are_balanced() -> None:
    cached = {P1: 64, D0: 128, D1: 64}
    warm = Demand(200, 10, cached=cached)
    busy = {"prefill_backlog_tokens": 900}, {"decode_tokens": 900}
    workers = with_load(fleet(2, 2), p1=busy[0], d0=busy[1])
    assert names_of(cache_aware(), warm, workers) == ("p1", "d0")
    assert names_of(cache_aware(), Demand(200, 10), workers) == ("p0", "d1"), "nothing cached: the least loaded"
    assert names_of(cache_aware(difference=800), warm, workers) == ("p0", "d1"), "out of balance"
    both = with_load(workers, p0={"prefill_backlog_tokens": 700}, d1={"decode_tokens": 700})
    assert names_of(cache_aware(difference=100), warm, both) == ("p1", "d0"), "both busy: the ratio is small"


def test_least_ttft_counts_speed_cache_and_queue() -> None:
    router, demand = chooser("least_ttft", OPEN), Demand(1000, 10)
    base = fleet(2, 1, prefill_tokens_per_s=1000.0)
    assert names_of(router, demand, with_load(base, p0={"prefill_backlog_tokens": 10})) == ("p1", "d0")
    fast = with_load(base, p0={"prefill_backlog_tokens": 900, "prefill_tokens_per_s": 4000.0})
    assert names_of(router, demand, fast) == ("p0", "d0"), "1900 tokens at 4000/s are done before 1000 at 1000/s"
    warm = msgspec.structs.replace(demand, cached={P0: 960})
    assert names_of(router, warm, with_load(base, p0={"prefill_backlog_tokens": 900})) == ("p0", "d0")
    assert names_of(router, warm, with_load(base, p0={"prefill_backlog_tokens": 1000})) == ("p1", "d0")


def test_least_ttft_counts_the_transfer_of_the_pair() -> None:
    """The nearer prefill worker, though the other is a little less busy."""
    near = {"bandwidths": {D0: 1e9}, "prefill_backlog_tokens": 50}
    far = {"bandwidths": {D0: 1e6}}
    workers = with_load(fleet(2, 1, prefill_tokens_per_s=1000.0, kv_bytes_per_token=10_000, num_layers=4), p0=near, p1=far)
    assert names_of(chooser("least_ttft", OPEN), Demand(1000, 10), workers) == ("p0", "d0")
    known = Demand(1000, 10, cached={D0: 990})
    assert names_of(chooser("least_ttft", OPEN), known, workers) == ("p1", "d0"), "decode has nearly all of it"


def test_least_ttft_brings_a_decode_worker_what_it_lacks_least_of() -> None:
    workers = with_load(fleet(1, 2), d0={"decode_tokens": 500})
    router = chooser("least_ttft", OPEN)
    assert names_of(router, Demand(600, 10), workers) == ("p0", "d1")
    assert names_of(router, Demand(600, 10, cached={D0: 560}), workers) == ("p0", "d0")
    assert names_of(router, Demand(600, 10, cached={D0: 480}), workers) == ("p0", "d1")


# ---- sessions


def sessions_at(workers: tuple[WorkerView, ...], number: int = 200) -> dict[str, tuple[str | None, str]]:
    router = new_chooser(config_of(), lambda: 0.0)
    return {name: names_of(router, Demand(10, 10, session=name), workers) for name in (f"session-{index}" for index in range(number))}


def test_session_stays_whatever_the_load_within_bounds_and_whichever_the_router() -> None:
    quiet = fleet(4, 4)
    before = sessions_at(quiet)
    assert all(counted > 20 for counted in Counter(decode for _, decode in before.values()).values()), "shared out"
    busy = with_load(quiet, p0={"prefill_backlog_tokens": 400}, d0={"decode_tokens": 3000}, d1={"decode_tokens": 2000})
    assert sessions_at(busy) == before
    assert sessions_at(tuple(reversed(quiet))) == before


def test_only_sessions_of_a_worker_that_goes_move() -> None:
    before, after = sessions_at(fleet(4, 4)), sessions_at(fleet(4, 3))
    moved = {name for name in before if before[name][1] != after[name][1]}
    assert moved == {name for name, (_, decode) in before.items() if decode == "d3"}


def test_sessions_of_a_restarted_worker_come_back_to_it() -> None:
    again = tuple(
        msgspec.structs.replace(worker, peer=PeerId(worker.peer.worker_id, view("x", Role.BOTH).peer.incarnation)) for worker in fleet(4, 4)
    )
    assert sessions_at(again) == sessions_at(fleet(4, 4))


def test_overloaded_worker_lends_its_sessions_until_it_has_cooled() -> None:
    before = sessions_at(fleet(4, 4))
    hot = sessions_at(with_load(fleet(4, 4), d0={"decode_tokens": 20_000}))
    assert "d0" not in {decode for _, decode in hot.values()}
    assert {name for name in before if hot[name] != before[name]} == {name for name, (_, decode) in before.items() if decode == "d0"}
    assert len({hot[name][1] for name in before if before[name][1] == "d0"}) == 3, "shared out among the others"


def test_requests_without_a_session_are_placed_by_the_policy_within() -> None:
    affine = SessionAffinity(LeastTokens(Leg.DECODE), Leg.DECODE, 2.0, 100)
    workers = (view("d0", Role.DECODE, decode_tokens=50), view("d1", Role.DECODE))
    router = RouteChooser(LeastTokens(Leg.PREFILL), affine, SETTINGS)
    assert names_of(router, Demand(10, 10), workers) == (None, "d1")


def test_affinity_reads_what_the_policy_within_reads() -> None:
    for inner in (LeastTokens(Leg.PREFILL), LeastTTFT(Leg.PREFILL)):
        affine = SessionAffinity(inner, Leg.PREFILL, 2.0, 100)
        assert (affine.reads_cached, affine.looks_at_pairs) == (inner.reads_cached, inner.looks_at_pairs)
