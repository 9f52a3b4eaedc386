"""Policies in a simulated fleet: bursts are shared out by tokens, conversations find what is cached, and mistakes in either are seen."""

from __future__ import annotations

from functools import cache

import pytest

from pd_serve.protocol.link import Load
from router.policy.base import Demand
from router.throughput import Throughput
from tests.sim.routing import FleetSpec, Outcome
from tests.sim.sessions import burst, conversations, stream
from tests.unit.router.routes import config_of

ALIKE = FleetSpec((8000.0,) * 4, 4)
FEW = FleetSpec((8000.0,) * 2, 4)
UNLIKE = FleetSpec((2000.0, 2000.0, 4000.0, 8000.0), 4)


def over_mean(outcome: Outcome) -> float:
    """Tokens of the most loaded prefill worker, by the mean."""
    return max(outcome.assigned.values()) * len(outcome.assigned) / sum(outcome.assigned.values())


@cache
def talked(policy: str, spec: FleetSpec = ALIKE, local_max: int = 0, names_sessions: bool = False) -> Outcome:
    config = config_of({"policy": policy}, local_max_uncached_tokens=local_max)
    return conversations(spec, config, seed=1, number=80, per_s=4.0 if spec is not FEW else 6.0, names_sessions=names_sessions)


@pytest.mark.parametrize("policy", ["least_tokens", "least_ttft", "cache_aware", "power_of_two"])
@pytest.mark.parametrize("seed", range(3))
def test_burst_of_mixed_lengths_is_shared_by_tokens(policy: str, seed: int) -> None:
    """F35: 4 prefill workers, 200 prompts within 100 ms."""
    outcome = burst(ALIKE, config_of({"policy": policy}), seed)
    assert len(outcome.ttfts) == 200
    assert over_mean(outcome) < 1.3


def test_burst_is_shared_where_all_may_start_at_once() -> None:
    """With no window that holds prompts back, only what was sent and not reported tells the workers apart."""
    config = config_of().model_copy(update={"engine": config_of().engine.model_copy(update={"max_batch_tokens": 10**9})})
    assert over_mean(burst(ALIKE, config, 0)) < 1.3


def test_load_that_is_known_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what was sent counts when it is reported, not before."""

    def reported(worker: object, load: Load) -> int:
        return load.prefill_queue_tokens

    monkeypatch.setattr("router.load._backlog_tokens", reported)
    config = config_of().model_copy(update={"engine": config_of().engine.model_copy(update={"max_batch_tokens": 10**9})})
    assert over_mean(burst(ALIKE, config, 0)) > 2


def test_conversations_find_their_prefixes_again() -> None:
    plain = talked("round_robin")
    for policy in ("cache_aware", "least_ttft"):
        aware = talked(policy)
        assert aware.hit_rate > plain.hit_rate + 0.25
        assert aware.ttft(0.5) < 0.5 * plain.ttft(0.5)
        assert aware.ttft(0.99) < plain.ttft(0.99)


def test_named_sessions_find_their_prefixes_without_any_knowledge_of_caches() -> None:
    named = talked("least_tokens", names_sessions=True)
    assert named.hit_rate > talked("least_tokens").hit_rate + 0.1
    assert named.ttft(0.5) < 0.6 * talked("least_tokens").ttft(0.5)


def test_speeds_are_learned_and_used() -> None:
    """On workers of which some are four times as quick as others; against the same with all taken for alike."""
    loads = {"seed": 3, "number": 400, "per_s": 9.0}
    learned = stream(UNLIKE, config_of({"policy": "least_ttft"}), **loads)  # type: ignore[arg-type]
    turns = stream(UNLIKE, config_of({"policy": "round_robin"}), **loads)  # type: ignore[arg-type]
    assert learned.ttft(0.9) < 0.5 * turns.ttft(0.9)
    assert learned.assigned["prefill-3"] > 2 * learned.assigned["prefill-0"]


def test_speeds_that_are_not_learned_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = {"seed": 3, "number": 400, "per_s": 9.0}
    learned = stream(UNLIKE, config_of({"policy": "least_ttft"}), **loads)  # type: ignore[arg-type]
    monkeypatch.setattr(Throughput, "tokens_per_s", lambda self, peer: 1000.0)
    alike = stream(UNLIKE, config_of({"policy": "least_ttft"}), **loads)  # type: ignore[arg-type]
    assert learned.ttft(0.9) < 0.5 * alike.ttft(0.9)


def test_later_turns_are_computed_where_they_decode_when_prefill_is_short() -> None:
    always, conditional = talked("least_ttft", FEW), talked("least_ttft", FEW, 512)
    assert conditional.kinds["local/cached_on_decode"] > 100
    assert conditional.kinds["disaggregated/load"] > 100, "first turns are long"
    assert conditional.hit_rate > always.hit_rate + 0.2
    assert conditional.ttft(0.5) < 0.3 * always.ttft(0.5)
    assert conditional.ttft(0.99) < 0.3 * always.ttft(0.99)


def test_what_is_not_known_to_be_cached_is_not_computed_where_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the router is blind to caches."""
    monkeypatch.setattr(Demand, "num_uncached", lambda self, peer: self.num_tokens)
    blind = conversations(FEW, config_of({"policy": "least_ttft"}, local_max_uncached_tokens=512), seed=1, number=80, per_s=6.0)
    assert blind.kinds["local/cached_on_decode"] == 0
    assert blind.hit_rate < talked("least_ttft", FEW, 512).hit_rate - 0.2


def test_same_seed_same_fleet() -> None:
    config = config_of({"policy": "power_of_two"})
    first, second = (conversations(ALIKE, config, seed=9, number=10) for _ in range(2))
    assert first == second
