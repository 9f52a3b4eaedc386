"""The pairs that a router shows: who fits whom, who has joined whom, and who was not taken."""

from __future__ import annotations

from typing import cast

import msgspec

from pd_serve.ids import PeerId
from pd_serve.protocol.client import Link
from pd_serve.protocol.link import PeerInfo, PeerState, PeerStatus, Role
from router.linked_worker import LinkedWorker
from router.pairs import pair_statuses
from tests.fakes import kv_layout, load, peer_id, peer_info, welcome

PREFILL, DECODE = peer_id("prefill"), peer_id("decode")


def linked(info: PeerInfo, joined: tuple[PeerId, ...] = ()) -> LinkedWorker:
    states = tuple(PeerState(peer, True, "posix", True, 1e9, "") for peer in joined)
    return LinkedWorker(info.peer, "http://x", cast(Link, None), welcome(info), load(info.role), 0.0, PeerStatus(states), frozenset(joined))


def test_a_joined_pair_tells_its_lane_and_what_it_converts() -> None:
    writer = linked(peer_info(PREFILL, Role.PREFILL, kv_layout(block_size=16)), (DECODE,))
    target = linked(peer_info(DECODE, Role.DECODE, kv_layout(block_size=64)), (PREFILL,))
    (pair,) = pair_statuses((target, writer), ())
    assert (pair.prefill, pair.decode, pair.compatible, pair.joined) == ("prefill", "decode", True, True)
    assert (pair.lane, pair.conversion, pair.reason) == ("posix", "block 16->64", "")


def test_a_pair_of_which_one_side_has_joined_is_not_joined() -> None:
    writer, target = linked(peer_info(PREFILL, Role.PREFILL), (DECODE,)), linked(peer_info(DECODE, Role.DECODE))
    (pair,) = pair_statuses((writer, target), ())
    assert (pair.compatible, pair.joined, pair.lane, pair.conversion) == (True, False, "", "none")


def test_workers_of_both_roles_pair_with_everybody_but_themselves() -> None:
    workers = [linked(peer_info(peer_id(name), Role.BOTH)) for name in ("a", "b")]
    assert [(pair.prefill, pair.decode) for pair in pair_statuses(workers, ())] == [("a", "b"), ("b", "a")]


def test_a_refused_worker_is_shown_with_what_differs_or_else_with_the_routers_reason() -> None:
    writer = linked(peer_info(PREFILL, Role.PREFILL))
    other_model = welcome(peer_info(peer_id("stranger"), Role.DECODE, fingerprint="model-b"))
    other_eos = msgspec.structs.replace(welcome(peer_info(peer_id("zealot"), Role.DECODE)), eos_token_ids=(5,))
    first, second = pair_statuses((writer,), ((other_model, "refused"), (other_eos, "end-of-sequence ids differ")))
    assert (first.decode, first.compatible, first.conversion) == ("stranger", False, "")
    assert first.reason == "model fingerprint model-a and model-b"
    assert (second.decode, second.compatible, second.reason) == ("zealot", False, "end-of-sequence ids differ")
    assert not first.joined
