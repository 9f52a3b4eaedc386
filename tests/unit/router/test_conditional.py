"""When a prompt is computed where it decodes: the rules, the costs, and that near costs do not flap."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec

from pd_serve.ids import PeerId
from router.policy.base import Demand, RoutingSettings
from router.policy.chooser import RouteChooser
from router.policy.conditional import ConditionalSettings, LocalOrRemote
from tests.unit.router.routes import D0, P0, chooser, fleet
from tests.unit.router.test_policies import with_load

COSTS = ConditionalSettings(max_uncached_tokens=512, margin=0.2, harm_weight=1.0)
OPEN = RoutingSettings(0, 10**9, 10**9)
WORKERS = fleet(1, 1, prefill_tokens_per_s=1000.0, kv_bytes_per_token=20_000, num_layers=10)


def router(costs: ConditionalSettings = COSTS, settings: RoutingSettings = OPEN, handover_s: float = 0.05) -> RouteChooser:
    return chooser("least_tokens", settings, conditional=LocalOrRemote(costs, lambda: handover_s))


def decided(chosen: RouteChooser, demand: Demand, **loads: dict[str, object]) -> tuple[bool, str]:
    route = chosen.choose(demand, with_load(WORKERS, **loads))
    assert route is not None
    return route.prefill is None, route.reason


def test_cheap_prompts_stay_and_dear_ones_go() -> None:
    assert decided(router(), Demand(100, 10)) == (True, "cheaper_local")
    assert decided(router(), Demand(100, 10), d0={"num_sequences": 4}) == (False, "load"), "four streams would stand still"
    assert decided(router(), Demand(513, 10)) == (False, "load"), "however cheap"
    assert decided(router(replace(COSTS, harm_weight=0.0)), Demand(100, 10), d0={"num_sequences": 4}) == (True, "cheaper_local")


def test_next_turn_of_a_conversation_stays_where_its_prefix_is() -> None:
    turn = Demand(800, 10, cached={D0: 784})
    assert decided(router(), turn, d0={"num_sequences": 4}) == (True, "cached_on_decode")
    both = Demand(800, 10, cached={D0: 784, P0: 784})
    assert decided(router(handover_s=0.0), both, d0={"num_sequences": 4}) == (False, "load"), "prefill has it as well"


def test_full_prefill_queue_sends_prompts_to_decode() -> None:
    busy = {"p0": {"prefill_backlog_tokens": 3000}, "d0": {"num_sequences": 2}}
    assert decided(router(), Demand(400, 10), **busy) == (True, "load")
    window = RoutingSettings(0, 512, 10**9)
    assert decided(router(settings=window), Demand(400, 10), **busy) == (True, "load"), "though none could start it now"
    assert chooser("least_tokens", window).choose(Demand(400, 10), with_load(WORKERS, **busy)) is None
    dear = {"p0": {"prefill_backlog_tokens": 600}, "d0": {"num_sequences": 8}}
    assert router(settings=window).choose(Demand(400, 10), with_load(WORKERS, **dear)) is None, "it is cheaper to wait"


def test_hard_rule_counts_what_is_not_cached() -> None:
    hard = chooser("least_tokens", RoutingSettings(32, 10**9, 10**9))
    assert decided(hard, Demand(32, 10)) == (True, "short_prompt")
    assert decided(hard, Demand(800, 10, cached={D0: 784})) == (True, "short_uncached")
    assert decided(hard, Demand(800, 10, cached={D0: 752})) == (False, "load")


def changes(margin: float) -> int:
    """Of way, while both cost about the same: 1,000 prompts of one length, between 3 and 5 streams running."""
    rng = random.Random(7)
    route_of = router(replace(COSTS, margin=margin), handover_s=0.4)
    ways = [decided(route_of, Demand(100, 10), d0={"num_sequences": rng.randrange(3, 6)})[0] for _ in range(1000)]
    return sum(before is not after for before, after in pairwise(ways))


def test_costs_that_are_near_each_other_do_not_flap() -> None:
    assert changes(margin=0.25) <= 1
    assert changes(margin=0.0) > 100, "without a margin they would"


def test_worker_that_is_gone_is_forgotten() -> None:
    near = Demand(100, 10)
    route_of = router(handover_s=0.4)
    assert decided(route_of, near, d0={"num_sequences": 0})[0]
    assert decided(route_of, near, d0={"num_sequences": 4})[0], "not dearer by the margin"
    route_of.forget(D0)
    assert not decided(route_of, near, d0={"num_sequences": 4})[0]


class Untouchable(Mapping[PeerId, int]):
    def __getitem__(self, peer: PeerId) -> int:
        raise AssertionError("nobody needs it: looking it up hashes the prompt")

    def __iter__(self) -> Iterator[PeerId]:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


def test_what_is_cached_is_not_looked_up_where_nothing_depends_on_it() -> None:
    demand = Demand(100, 10, cached=Untouchable())
    for name in ("least_tokens", "round_robin", "power_of_two"):
        plain = chooser(name)
        route = plain.choose(demand, WORKERS)
        assert route is not None
        assert plain.num_to_compute(demand, route) == 100
    aware, warm = chooser("cache_aware"), msgspec.structs.replace(demand, cached={P0: 64})
    route = aware.choose(warm, WORKERS)
    assert route is not None
    assert aware.num_to_compute(warm, route) == 36
