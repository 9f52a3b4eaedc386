"""A large fleet is looked at by columns: what is chosen, and what is said of all workers together, is what single views give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.config import BreakerConfig
from pd_serve.ids import PeerId
from pd_serve.kv.prefix_chain import SHORT_NBYTES, chain_digests
from pd_serve.protocol.cache_events import CacheEvents
from pd_serve.protocol.link import PeerStatus, Role
from router import roster
from router.assignment import Assigner
from router.breaker import Breaker, Breakers
from router.linked_worker import LinkedWorker
from router.policy import column_chooser
from router.policy.base import Demand, Leg, Route, RoutingSettings, WorkerView
from router.policy.candidates import could_any_hold, longest_model_len, shortest_model_len, waits_for_compute_only
from router.policy.chooser import RouteChooser
from router.policy.columns import Columns, WorkerTable
from router.policy.registry import new_chooser, policy_names
from router.policy.session import digest, weight
from router.prefixes import Prefixes
from router.roster import as_worst_known
from router.throughput import Throughput
from router.totals import least_uncached, num_free_slots, totals_of
from tests.fakes import block_counts, joined, load, peer_id, peer_info, welcome
from tests.unit.router.routes import config_of, view

ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)
NUM_FLEETS = 60


class Both:
    """One fleet that changes, as views and as columns, and a chooser for each."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policies = {"prefill_policy": rng.choice(policy_names()), "decode_policy": rng.choice(policy_names())}
        limits = {
            "local_max_uncached_tokens": rng.choice((0, 0, 40, 400)),
            "balance_tokens": rng.choice((50, 1000)),
            "seed": rng.randrange(9),
        }
        config = config_of({**policies, "local_prefill_max_tokens": rng.choice((0, 0, 0, 20))}, **limits)
        few = RoutingSettings(config.router.local_prefill_max_tokens, 512, 8, short_prompt_tokens=rng.choice((0, 64)))
        self.choosers = [_with_settings(new_chooser(config, lambda: 0.004), few) for _ in range(2)]
        self.settings = few
        self.peers = tuple(peer_id(f"w{index}") for index in range(rng.randrange(1, 14)))
        self.share_joined = rng.choice((0.0, 0.2, 0.8, 1.0, 1.0))
        self.columns = Columns(rng.random() < 0.8)
        self.columns.arrange(self.peers, [-1] * len(self.peers))
        self.views: list[WorkerView | None] = [None] * len(self.peers)
        for row in range(len(self.peers)):
            self.put(row)

    def put(self, row: int) -> None:
        rng, peer = self.rng, self.peers[row]
        seen = view(
            peer.worker_id,
            rng.choice(ROLES),
            tuple(other for other in self.peers if rng.random() < self.share_joined),
            max_model_len=rng.choice((2048, 2048, 100)),
            num_pool_tokens=rng.choice((4096, 4096, 60)),
            num_free_tokens=rng.choice((4096, 4096, 50, -16)),
            prefill_backlog_tokens=rng.choice((0, 0, 100, 300, 600)),
            short_backlog_tokens=rng.choice((0, 350)),
            decode_tokens=rng.choice((0, 10, 400)),
            num_sequences=rng.choice((0, 1, 7, 8)),
            is_joining=rng.random() < 0.1,
            is_stale=rng.random() < 0.1,
            prefill_tokens_per_s=rng.choice((1000.0, 1000.0, 8000.0, 3333.3)),
            kv_bytes_per_token=rng.choice((0, 20_000, 131_072)),
            num_layers=rng.choice((1, 10, 32)),
            bandwidths={other: rng.choice((0.0, 1e6, 2e9)) for other in self.peers if rng.random() < 0.5},
        )
        self.views[row] = None if rng.random() < 0.1 else seen
        self.columns.put(row, self.views[row])

    def demand(self) -> Demand:
        rng = self.rng
        return Demand(
            num_tokens=rng.choice((10, 60, 500)),
            max_new_tokens=rng.choice((10, 10, 60)),
            avoid=frozenset(peer for peer in self.peers if rng.random() < 0.1) if rng.random() < 0.5 else frozenset(),
            beside=rng.choice((None, None, None, *self.peers)),
            cached={peer: rng.choice((16, 32, 48)) for peer in self.peers if rng.random() < 0.4} if rng.random() < 0.7 else {},
            session=rng.choice(("", "", "a", "b")),
        )

    def looks(self) -> tuple[tuple[WorkerView, ...], WorkerTable]:
        return tuple(as_worst_known([each for each in self.views if each is not None])), WorkerTable(self.columns)


def _with_settings(chooser: RouteChooser, few: RoutingSettings) -> RouteChooser:
    return RouteChooser(chooser._prefill_policy, chooser._decode_policy, few, chooser._conditional)


def differs(rng: random.Random) -> str:
    """Where choosers of views and of columns part, over some decisions; empty: nowhere."""
    both = Both(rng)
    one_by_one, by_columns = both.choosers
    assert by_columns._by_columns is not None
    for number in range(6):
        views, table = both.looks()
        demand = both.demand()
        first, second = one_by_one.choose(demand, views), by_columns.choose(demand, table)
        if first != second:
            return f"decision {number} of {demand} among {views}: {first} or {second}"
        said = [_said_of_all(look, demand, both.settings) for look in (views, table)]
        if said[0] != pytest.approx(said[1]):
            return f"{said[0]} or {said[1]} of {views}"
        if tuple(table) != views or len(table) != len(views):
            return f"{tuple(table)} instead of {views}"
        for row in range(len(both.peers)):
            if rng.random() < 0.3:
                both.put(row)
    return ""


def _said_of_all(look: Sequence[WorkerView], demand: Demand, routing: RoutingSettings) -> list[float]:
    totals = totals_of(look)
    return [
        waits_for_compute_only(demand, look, routing),
        could_any_hold(demand, look),
        longest_model_len(look),
        shortest_model_len(look, demand.num_tokens),
        num_free_slots(look, routing.max_sequences, 40.0),
        least_uncached(look, demand),
        *(getattr(totals, name) for name in totals.__dataclass_fields__),
    ]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 1 << 32))
def test_columns_give_the_route_that_views_give(seed: int) -> None:
    assert differs(random.Random(seed)) == ""


@pytest.mark.parametrize("name", ["first_least", "_at"])
def test_a_choice_that_ignores_ties_or_scores_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {"first_least": lambda scores: len(scores[0]) - 1, "_at": lambda scores, place: ()}
    monkeypatch.setattr(column_chooser, name, planted[name])
    assert any(differs(random.Random(seed)) for seed in range(NUM_FLEETS))


def test_partner_that_is_taken_unasked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Columns.put

    def all_joined(self: Columns, row: int, seen: WorkerView | None) -> None:
        real(self, row, seen)
        self.pairs[:] = True

    monkeypatch.setattr(Columns, "put", all_joined)
    assert any(differs(random.Random(seed)) for seed in range(NUM_FLEETS))


class _Unasked:
    """A policy that knows no columns."""

    looks_at_pairs = False
    reads_cached = False

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> object:
        return lambda worker, partner: (worker.num_sequences,)

    def chosen(self, worker: WorkerView) -> None:
        return None


def test_policy_without_columns_is_asked_for_each_worker() -> None:
    columns = Columns()
    columns.arrange((peer_id("d0"), peer_id("d1")), (-1, -1))
    for row, number in enumerate((3, 2)):
        columns.put(row, view(f"d{row}", Role.DECODE, num_sequences=number))
    route = RouteChooser(_Unasked(), _Unasked(), RoutingSettings(0, 512, 8)).choose(Demand(10, 10), WorkerTable(columns))  # type: ignore[arg-type]
    assert route is not None
    assert route.decode.peer == peer_id("d1")


def test_workers_with_an_open_breaker_are_left_out_of_columns_as_of_views() -> None:
    for seed in range(NUM_FLEETS):
        both = Both(random.Random(seed))
        breakers = Breakers(BreakerConfig(), SimpleNamespace(), both.peers)  # type: ignore[arg-type]
        for peer in both.peers:
            if both.rng.random() < 0.4:
                breakers._breakers[peer, both.rng.choice((Leg.PREFILL, Leg.DECODE))] = Breaker(BreakerConfig(), open_until=9.0)
        views, table = both.looks()
        demand = both.demand()
        assert tuple(breakers.usable(demand, table, 1.0)) == tuple(breakers.usable(demand, views, 1.0)), seed


def test_weights_of_a_session_are_those_of_columns() -> None:
    """Two routers, of a small and a large fleet, would say the same."""
    affine = new_chooser(config_of(), lambda: 0.0)._decode_policy
    peers = tuple(peer_id(f"d{index}") for index in range(40))
    columns = Columns()
    columns.arrange(peers, [-1] * len(peers))
    for row, peer in enumerate(peers):
        columns.put(row, view(peer.worker_id, Role.DECODE))
    import numpy as np

    from router.policy.columns import Look

    look = Look(WorkerTable(columns), Demand(10, 10, session="s"))
    _, scores = affine.score_columns(look, np.arange(len(peers)), None)  # type: ignore[attr-defined]
    assert [~int(score) & (1 << 64) - 1 for score in scores] == [weight(digest("s"), digest(peer.worker_id)) for peer in peers]


# ---- the standing table


class Pool:
    """Workers that come, go and say what a test wants."""

    def __init__(self) -> None:
        self.workers: tuple[LinkedWorker, ...] = ()
        self.now = 100.0
        self.breakers = SimpleNamespace(usable=lambda demand, views, now: views, sent=_nothing, spoke=_nothing, ended=_nothing)

    def is_joining(self, worker: LinkedWorker) -> bool:
        return self.now - worker.linked_at < 2.0


def _nothing(generation: object, now: float) -> None:
    return None


def _afresh(pool: Pool, assigner: Assigner, speeds: Throughput, stale_after_s: float) -> tuple[WorkerView, ...]:
    """The views, all of them made anew."""
    book = assigner.book
    for known in book._workers.values():
        known.view = None
    views = [
        book.view(worker, pool.is_joining(worker), speeds.tokens_per_s(worker.peer), pool.now - stale_after_s)
        for worker in pool.workers
        if worker.is_available
    ]
    return tuple(as_worst_known(views))


def roster_differs(seed: int) -> str:
    """What the standing table says otherwise than views made anew, over random events; empty: nothing."""
    rng, pool, speeds = random.Random(seed), Pool(), Throughput()
    config = config_of({"policy": "least_ttft"})
    chooser = new_chooser(config, lambda: 0.0)
    assigner = Assigner(pool, chooser, speeds, lambda: pool.now)  # type: ignore[arg-type]
    for number in range(90):
        pool.now += rng.choice((0.01, 0.1, 0.4))
        peers = [worker.peer for worker in pool.workers]
        worker = rng.choice(pool.workers) if pool.workers else None
        action = rng.randrange(9) if worker is not None else 0
        if worker is not None and rng.random() < 0.3:
            action = number // 15 % 2  # it grows, it shrinks
        if action == 0 and len(peers) < 7:
            peer = next(peer for index in range(9) if (peer := peer_id(f"w{index}")) not in peers)  # many come back
            role = rng.choice(ROLES)
            info = welcome(peer_info(peer, role), max_model_len=1 << 20)
            pool.workers += (LinkedWorker(peer, "http://x", None, info, load(role, block_counts(1000)), pool.now),)  # type: ignore[arg-type]
        if worker is None:
            continue
        if action == 1:
            pool.workers = tuple(other for other in pool.workers if other is not worker)
            assigner.forget(worker.peer)
        elif action == 2:
            worker.load = load(
                rng.choice((worker.load.role, rng.choice(ROLES))), block_counts(1000), prefill_queue_tokens=rng.randrange(300)
            )
            assigner.book.reported(worker.peer, pool.now, rng.random() < 0.5)
        elif action == 3:
            states = tuple(joined(peer) for peer in peers if rng.random() < 0.7)
            worker.peer_status, worker.joined = PeerStatus(states), frozenset(state.peer for state in states)
        elif action == 4:
            worker.is_leaving = rng.random() < 0.3
        elif action == 5:
            assigner.book.charge(number, rng.choice(peers), worker.peer, rng.randrange(1, 500))
        elif action == 6:
            assigner.book.release(rng.randrange(number + 1), tuple(peers))
        elif action == 7:
            speeds.began(worker.peer, number, pool.now)
            speeds.ended(worker.peer, number, rng.choice((10, 4000)), pool.now + rng.choice((0.01, 3.0)))
        elif action == 8:
            assigner.book.refused(worker.peer)
        if rng.random() < 0.7:
            said = tuple(assigner.views())
            expected = _afresh(pool, assigner, speeds, chooser.settings.stale_after_s)
            if said != expected:
                return f"seed {seed}, event {number}: {said} instead of {expected}"
    return ""


@pytest.mark.parametrize("many", [0, 4, 100])
def test_standing_table_says_what_views_made_anew_say(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As columns, as views, and over the number where it changes from the one to the other."""
    monkeypatch.setattr(roster, "MANY", many)
    assert [difference for seed in range(40) if (difference := roster_differs(seed))] == []


def test_a_change_that_nobody_is_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.linked_worker._LOOKS", frozenset())
    assert any(roster_differs(seed) for seed in range(20))


def test_a_look_takes_time_in_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, speeds = Pool(), Throughput()
    for index in range(200):
        info = welcome(peer_info(peer_id(f"w{index}"), Role.BOTH), max_model_len=1 << 20)
        pool.workers += (LinkedWorker(peer_id(f"w{index}"), "http://x", None, info, load(Role.BOTH, block_counts(1000)), 0.0),)  # type: ignore[arg-type]
    assigner = Assigner(pool, new_chooser(config_of(), lambda: 0.0), speeds, lambda: pool.now)  # type: ignore[arg-type]
    assigner.views()
    put: list[int] = []
    real = Columns.put
    monkeypatch.setattr(Columns, "put", lambda self, row, *seen: (put.append(row), real(self, row, *seen)))
    assigner.views()
    assert put == []
    assigner.book.charge(1, None, peer_id("w7"), 100)
    pool.workers[9].load = load(Role.BOTH, block_counts(1000))
    assigner.views()
    assert sorted(put) == [7, 9]


def test_what_prefixes_know_is_the_same_by_name_and_by_column() -> None:
    for seed in range(NUM_FLEETS):
        rng = random.Random(seed)
        prefixes = Prefixes(lambda: 0.0)
        peers = tuple(peer_id(f"w{index}") for index in range(rng.randrange(1, 30)))
        prompt = tuple(rng.randrange(100) for _ in range(200))
        for peer in peers:
            prefixes.linked(peer, 8)
            keys = b"".join(each[:SHORT_NBYTES] for each in chain_digests(prompt, 8, 0, rng.choice((0, 0, 1, 5, rng.randrange(25)))))
            prefixes.apply(peer, CacheEvents(0, keys, num_parts=1))
        cached = prefixes.cached(prompt)
        for _ in range(3):
            named = [cached.get(peer, 0) for peer in (*peers, peer_id("x"))]
            assert cached.column((*peers, peer_id("x"))).tolist() == named, seed
            assert dict(cached) == {peer: num for peer, num in zip(peers, named, strict=False) if num}
            assert (len(cached), bool(cached), cached.most()) == (sum(map(bool, named)), any(named), max(named))
            gone = rng.choice(peers)
            prefixes.forget(gone)
            if rng.random() < 0.5:
                prefixes.linked(gone, 8)


def route_of(chooser: RouteChooser, workers: Sequence[WorkerView], peer: PeerId) -> Route | None:
    return chooser.choose(Demand(10, 10, cached={peer: 16}), workers)


def test_route_of_a_stale_worker_shows_what_is_assumed_of_it() -> None:
    columns = Columns()
    columns.arrange((peer_id("d0"), peer_id("d1")), (-1, -1))
    seen = (view("d0", Role.DECODE, is_stale=True), view("d1", Role.DECODE, decode_tokens=70, num_sequences=8))
    for row, each in enumerate(seen):
        columns.put(row, each)
    route = route_of(new_chooser(config_of(), lambda: 0.0), WorkerTable(columns), peer_id("d0"))
    assert route is not None
    assert route.decode in as_worst_known(list(seen))
    assert msgspec.structs.replace(route.decode, decode_tokens=0, num_sequences=0) in (
        seen[0],
        msgspec.structs.replace(seen[1], decode_tokens=0, num_sequences=0),
    )
