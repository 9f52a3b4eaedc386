"""The record of where choices were served."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pd_serve.config import SecurityConfig
from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.protocol.control import REQUESTS_PATH, RecentRequests
from pd_serve.protocol.link import Role
from router.timeline import NUM_KEPT, Timeline
from tests.fakes_worker import Board, Script, mock_worker
from tests.unit.router.cluster import cluster

P1, D1, D2 = (PeerId(WorkerId(name), Incarnation(1)) for name in ("p1", "d1", "d2"))


def test_every_place_of_a_choice_is_told_with_the_reason_it_was_left() -> None:
    timeline = Timeline()
    timeline.arrived(7, 30, 100.0)
    timeline.left(7, "first", 0, 100.0)
    timeline.assigned(7, P1, D1, 100.5)
    timeline.left(7, "peer_lost", 4, 101.0)
    timeline.assigned(7, None, D2, 101.25)
    (told,) = timeline.recent().requests
    assert (told.choice, told.prompt_tokens, told.ended_s, told.outcome) == (7, 30, None, "")
    first, second = told.attempts
    assert (first.prefill, first.decode, first.began_s, first.left_s) == (str(P1), str(D1), 0.5, 1.0)
    assert (first.left_because, first.output_tokens) == ("peer_lost", 4)
    assert (second.prefill, second.left_s, second.left_because) == (None, None, "")
    timeline.ended(7, "length", 9, 102.0)
    (told,) = timeline.recent().requests
    assert (told.ended_s, told.outcome) == (2.0, "length")
    assert (told.attempts[1].left_s, told.attempts[1].output_tokens) == (2.0, 9)


def test_the_steps_of_a_placement_are_told_in_seconds_since_the_choice_arrived() -> None:
    timeline = Timeline()
    timeline.arrived(7, 30, 100.0, 99.5)
    timeline.reserved(7, 100.0)
    timeline.assigned(7, P1, D1, 100.25, 12)
    timeline.reserved(7, 100.5)
    timeline.first_token(7, 101.0)
    timeline.prefilled(7, 101.5)
    (told,) = timeline.recent().requests
    (attempt,) = told.attempts
    assert (told.received_s, told.arrived_at_s) == (-0.5, 100.0)
    assert (attempt.attempt_id, attempt.began_s, attempt.reserved_s, attempt.first_token_s, attempt.prefilled_s) == (
        12,
        0.25,
        0.5,
        1.0,
        1.5,
    )


def test_only_the_newest_are_kept_and_the_oldest_may_still_end() -> None:
    timeline = Timeline()
    for key in range(NUM_KEPT + 3):
        timeline.arrived(key, 1, float(key))
    assert [request.choice for request in timeline.recent().requests] == list(range(NUM_KEPT + 2, 2, -1))
    for key in range(NUM_KEPT + 3):
        timeline.assigned(key, P1, D1, 1000.0)
        timeline.ended(key, "stop", 1, 1000.0)
    assert len(timeline.recent().requests) == NUM_KEPT
    assert not timeline._open


async def test_recent_requests_are_told_under_the_cluster_secret(tmp_path: Path) -> None:
    board = Board()
    workers = (
        mock_worker("prefill-0", Role.PREFILL, board=board),
        mock_worker("decode-0", Role.DECODE, script=Script(fail_after=3), board=board),
        mock_worker("decode-1", Role.DECODE, board=board),
    )
    async with cluster(tmp_path, *workers, policy="round_robin") as c:
        await asyncio.gather(*(c.chat(max_tokens=100) for _ in range(4)))
        recent = RecentRequests.model_validate_json((await c.http.get(REQUESTS_PATH)).content)
        assert {request.outcome for request in recent.requests} == {"stop"}
        moved = [request for request in recent.requests if len(request.attempts) > 1]
        assert moved
        assert moved[0].attempts[0].left_because == "engine_error"
        assert moved[0].attempts[0].decode.startswith("decode-0@")


async def test_recent_requests_need_the_secret_where_there_is_one(tmp_path: Path) -> None:
    secret = "of-the-cluster-and-nobody-else"
    async with cluster(tmp_path, wait_ready=False, security=SecurityConfig(cluster_secret=secret)) as c:
        assert (await c.http.get(REQUESTS_PATH)).status_code == 401
        assert (await c.http.get(REQUESTS_PATH, headers={"Authorization": f"Bearer {secret}"})).status_code == 200
