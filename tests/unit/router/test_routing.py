"""Policies, the candidates they choose from, and the load book."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from pd_serve.errors import ConfigError, IncompatibleError
from pd_serve.ids import WorkerId
from pd_serve.protocol.link import Role
from router.admission import limits_of
from router.compatibility import check_compatible
from router.load import REPORT_LAG_S, LoadBook
from router.policy.base import Demand, Leg, Route, RouteKind, RoutingSettings, WorkerView
from router.policy.candidates import waits_for_compute_only
from router.policy.chooser import RouteChooser
from router.policy.registry import new_policy
from tests.fakes import block_counts, kv_layout, load, peer_id, peer_info, welcome
from tests.unit.router.routes import D0, D1, P0, P1, SETTINGS, chooser, possible_routes, view


def names(routes: object) -> set[tuple[str | None, str]]:
    return {(route.prefill and route.prefill.peer.worker_id, route.decode.peer.worker_id) for route in routes}  # type: ignore[attr-defined]


def test_only_joined_pairs_are_used() -> None:
    workers = (
        view("p0", Role.PREFILL, (D0,)),
        view("p1", Role.PREFILL, (D0, D1)),
        view("d0", Role.DECODE, (P0, P1)),
        view("d1", Role.DECODE, (P0,)),
    )
    assert names(possible_routes(Demand(10, 10), workers, SETTINGS)) == {("p0", "d0"), ("p1", "d0"), (None, "d1")}


def test_pair_that_may_still_join_is_waited_for() -> None:
    workers = (view("p0", Role.PREFILL, is_joining=True), view("d0", Role.DECODE))
    assert possible_routes(Demand(10, 10), workers, SETTINGS) == ()


def test_prompts_are_prefilled_where_they_decode_without_prefill_workers() -> None:
    (route,) = possible_routes(Demand(10, 10), (view("d0", Role.DECODE),), SETTINGS)
    assert (route.kind, route.reason) == (RouteKind.LOCAL, "no_prefill_worker")


def test_busy_prefill_worker_is_waited_for() -> None:
    workers = (view("p0", Role.PREFILL, (D0,), prefill_backlog_tokens=512), view("d0", Role.DECODE, (P0,)))
    assert possible_routes(Demand(10, 10), workers, SETTINGS) == ()


SHORT = replace(SETTINGS, short_prompt_tokens=128)


def test_busy_prefill_worker_takes_short_prompts_that_the_next_step_has_room_for() -> None:
    busy = view("p0", Role.PREFILL, (D0,), prefill_backlog_tokens=2000, short_backlog_tokens=300)
    workers = (busy, view("d0", Role.DECODE, (P0,)))
    assert names(possible_routes(Demand(84, 10), workers, SHORT)) == {("p0", "d0")}
    assert possible_routes(Demand(85, 10), workers, SHORT) == ()
    assert possible_routes(Demand(129, 10), (msgspec.structs.replace(busy, short_backlog_tokens=0), workers[1]), SHORT) == ()


def test_what_waits_for_room_to_decode_is_not_waiting_for_compute_only() -> None:
    busy = view("p0", Role.PREFILL, (D0,), prefill_backlog_tokens=2000)
    assert waits_for_compute_only(Demand(500, 10), (busy, view("d0", Role.DECODE, (P0,))), SHORT)
    assert not waits_for_compute_only(Demand(500, 10), (busy, view("d0", Role.DECODE, (P0,), num_free_tokens=100)), SHORT)


def test_short_prompts_are_counted_apart_until_they_are_computed() -> None:
    book, peer, decode = LoadBook(short_tokens=16), peer_id("p0"), peer_id("d0")
    for key, num_tokens in enumerate((10, 16, 17)):
        book.charge(key, peer, decode, num_tokens)
    assert book._worker(peer).prefill.num_short_tokens == 26
    book.prefilled(0, peer)
    book.prefilled(0, peer)
    book.release(2, (peer, decode))
    assert book._worker(peer).prefill.num_short_tokens == 16


def test_full_or_short_decode_is_no_candidate() -> None:
    for fields in ({"num_free_tokens": 10}, {"num_sequences": 8}, {"max_model_len": 19}):
        assert possible_routes(Demand(10, 10), (view("d0", Role.DECODE, **fields),), SETTINGS) == ()


def test_prefill_worker_that_came_later_and_takes_less_is_no_candidate() -> None:
    """It would refuse prompt and answer together, however short the prompt."""
    workers = (view("p0", Role.PREFILL, (D0,), max_model_len=19), view("d0", Role.DECODE, (P0,)))
    assert names(possible_routes(Demand(10, 10), workers, SETTINGS)) == {(None, "d0")}
    assert names(possible_routes(Demand(10, 9), workers, SETTINGS)) == {("p0", "d0")}


def test_worker_to_avoid_is_used_only_alone() -> None:
    workers = (view("d0", Role.DECODE), view("d1", Role.DECODE))
    assert names(possible_routes(Demand(10, 10, frozenset({D0})), workers, SETTINGS)) == {(None, "d1")}
    assert names(possible_routes(Demand(10, 10, frozenset({D0})), workers[:1], SETTINGS)) == {(None, "d0")}


def test_short_prompts_stay_on_decode_where_configured() -> None:
    settings = replace(SETTINGS, local_prefill_max_tokens=32)
    workers = (view("p0", Role.PREFILL, (D0,)), view("d0", Role.DECODE, (P0,)))
    assert names(possible_routes(Demand(32, 10), workers, settings)) == {(None, "d0")}
    assert names(possible_routes(Demand(33, 10), workers, settings)) == {("p0", "d0")}


def test_sibling_goes_beside_its_prompt() -> None:
    workers = (view("p0", Role.PREFILL, (D0, D1)), view("d0", Role.DECODE, (P0,)), view("d1", Role.DECODE, (P0,)))
    (route,) = possible_routes(Demand(10, 10, beside=D1), workers, SETTINGS)
    assert (route.decode.peer, route.reason) == (D1, "cached")
    gone = possible_routes(Demand(10, 10, beside=peer_id("d9")), workers, SETTINGS)
    assert names(gone) == {("p0", "d0"), ("p0", "d1")}


def test_one_hot_worker_does_not_end_affinity() -> None:
    """What goes beside a prompt on a full worker goes where there is room; what goes beside one on another stays there."""
    full = {"num_free_tokens": 5}, {"num_sequences": 8}
    for hot in full:
        workers = (
            view("p0", Role.PREFILL, (D0, D1)),
            view("d0", Role.DECODE, (P0,), **hot),
            view("d1", Role.DECODE, (P0,)),
        )
        (kept,) = possible_routes(Demand(10, 10, beside=D1), workers, SETTINGS)
        assert (kept.prefill, kept.decode.peer, kept.reason) == (None, D1, "cached")
        assert names(possible_routes(Demand(10, 10, beside=D0), workers, SETTINGS)) == {("p0", "d1")}, "spilt over"
    cooled = (view("p0", Role.PREFILL, (D0, D1)), view("d0", Role.DECODE, (P0,)), view("d1", Role.DECODE, (P0,)))
    (back,) = possible_routes(Demand(10, 10, beside=D0), cooled, SETTINGS)
    assert back.decode.peer == D0


def test_colocated_and_disaggregated_workers_mix() -> None:
    workers = (view("b0", Role.BOTH), view("p0", Role.PREFILL, (D0,)), view("d0", Role.DECODE, (P0,)))
    assert names(possible_routes(Demand(10, 10), workers, SETTINGS)) == {(None, "b0"), ("p0", "d0")}


def test_round_robin_takes_turns() -> None:
    workers = tuple(view(f"d{i}", Role.DECODE) for i in range(3))
    turns, demand = chooser("round_robin"), Demand(10, 10)
    chosen = [chosen_of(turns, demand, workers).decode.peer.worker_id for _ in range(6)]
    assert sorted(chosen[:3]) == ["d0", "d1", "d2"]
    assert chosen[:3] == chosen[3:]
    with pytest.raises(ConfigError, match="known"):
        new_policy("magic", Leg.DECODE)


def chosen_of(router: RouteChooser, demand: Demand, workers: tuple[WorkerView, ...]) -> Route:
    route = router.choose(demand, workers)
    assert route is not None
    return route


def test_burst_spreads_by_tokens_before_any_report() -> None:
    """200 prompts of mixed length on 4 prefill workers, no Load in between: the most loaded has less than 1.3 times the mean."""
    rng = random.Random(3)
    book = LoadBook()
    peers = [peer_id(f"p{i}") for i in range(4)]
    decode = peer_id("d0")
    router = chooser("least_tokens", RoutingSettings(0, 10**9, 10**9))
    idle = load(Role.PREFILL)
    sent = dict.fromkeys(peers, 0)
    for key in range(200):
        workers = [
            view(peer.worker_id, Role.PREFILL, (decode,), prefill_backlog_tokens=book.prefill_backlog_tokens(peer, idle)) for peer in peers
        ]
        num_tokens = rng.choice((20, 100, 500, 1900))
        demand = Demand(num_tokens, 10)
        route = chosen_of(router, demand, (*workers, view("d0", Role.DECODE, tuple(peers), num_free_tokens=10**9)))
        assert route.prefill is not None
        book.charge(key, route.prefill.peer, decode, num_tokens)
        sent[route.prefill.peer] += num_tokens
    assert max(sent.values()) < 1.3 * sum(sent.values()) / 4


def test_new_empty_worker_is_not_flooded() -> None:
    """It gets what comes until it has as much as the others, and its share from then on: charged when sent, not when it reports."""
    book = LoadBook()
    decodes, idle = [peer_id(f"d{i}") for i in range(4)], load(Role.DECODE)
    router = chooser("least_tokens", RoutingSettings(0, 10**9, 10**9))
    for key in range(100):
        present = decodes if key >= 40 else decodes[:3]
        workers = tuple(
            view(
                peer.worker_id,
                Role.DECODE,
                decode_tokens=book.decode_tokens(peer, idle),
                num_sequences=book.num_sequences(peer, idle),
                prefill_backlog_tokens=0,
            )
            for peer in present
        )
        book.charge(key, None, chosen_of(router, Demand(100, 10), workers).decode.peer, 100)
    held = [book.num_sequences(peer, idle) for peer in decodes]
    assert sum(held) == 100
    assert max(held) <= 25 + 1, held


def test_backlog_follows_the_report_once_it_can_know() -> None:
    book, peer, decode = LoadBook(), peer_id("p0"), peer_id("d0")
    book.charge(1, peer, decode, 1000)
    book.told(1, peer, now=10.0)
    assert book.prefill_backlog_tokens(peer, load()) == 1000
    book.reported(peer, now=10.0 + REPORT_LAG_S / 2)
    assert book.prefill_backlog_tokens(peer, load(prefill_queue_tokens=0)) == 1000
    book.reported(peer, now=10.0 + 2 * REPORT_LAG_S)
    assert book.prefill_backlog_tokens(peer, load(prefill_queue_tokens=400)) == 400
    book.prefilled(1, peer)
    assert book.prefill_backlog_tokens(peer, load(prefill_queue_tokens=0)) == 0
    book.reported(peer, now=20.0)
    assert book.prefill_backlog_tokens(peer, load(prefill_queue_tokens=700)) == 700, "sent by another router"


def test_room_counts_what_the_report_cannot_know() -> None:
    book, peer = LoadBook(), peer_id()
    report = load(blocks=block_counts(total=10, free=6, cached=2))
    assert book.free_tokens(peer, report, 16) == 8 * 16
    book.charge(1, None, peer, 33)
    assert book.free_tokens(peer, report, 16) == 5 * 16
    book.reported(peer, 1.0)
    assert book.free_tokens(peer, report, 16) == 5 * 16, "not answered yet: the report is older than the grant"
    book.told(1, peer, 1.1)
    book.reported(peer, 1.2)
    assert book.free_tokens(peer, report, 16) == 8 * 16
    book.refused(peer)
    assert book.free_tokens(peer, report, 16) == 0
    book.reported(peer, 1.3)
    assert book.free_tokens(peer, report, 16) == 8 * 16
    book.release(1, (peer,))
    assert book.is_empty()


@pytest.mark.parametrize(
    ("field", "candidate"),
    [
        ("protocol version", welcome(msgspec.structs.replace(peer_info(), protocol_version=99))),
        ("model fingerprint", welcome(peer_info(fingerprint="model-b"))),
        ("vocabulary", welcome(vocab_size=261)),
        ("vocabulary", welcome(vocab_size=200)),
        ("KV layout", welcome(peer_info(layout=kv_layout(num_layers=3)))),
        ("transport", welcome(msgspec.structs.replace(peer_info(), transport="other"))),
        ("sizes that are impossible", msgspec.structs.replace(welcome(), max_model_len=1 << 62)),
        ("sizes that are impossible", welcome(peer_info(layout=kv_layout(num_blocks=1 << 60)))),
        ("end-of-sequence", msgspec.structs.replace(welcome(), eos_token_ids=(5,))),
    ],
)
def test_incompatible_workers_are_refused_with_both_values(field: str, candidate: object) -> None:
    with pytest.raises(IncompatibleError, match=field) as refused:
        check_compatible(candidate, 260, welcome(peer_info(peer_id("first"))), None)  # type: ignore[arg-type]
    assert len(str(refused.value).split(", ")) >= 2


def test_pools_of_other_sizes_are_compatible() -> None:
    check_compatible(welcome(peer_info(layout=kv_layout(num_blocks=7))), 260, welcome(), None)
    with pytest.raises(IncompatibleError, match="answers there"):
        check_compatible(welcome(), 260, None, WorkerId("other"))


def test_limits_without_workers_come_from_the_configuration() -> None:
    limits = limits_of((), 0, 260)
    assert (limits.max_context_tokens, limits.vocab_size) == (0, 260)
    assert limits_of((), 128, 260).output_budget(100, None) == 28
