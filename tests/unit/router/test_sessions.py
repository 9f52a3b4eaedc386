"""The session header, from a client's request to the workers."""

from __future__ import annotations

from pathlib import Path

from pd_serve.protocol.link import Open, Prefill, Role
from tests.fakes_worker import Board, MockWorker, mock_worker
from tests.unit.router.cluster import Cluster, cluster, completion_body


def fleet() -> list[MockWorker]:
    board = Board()
    prefills = [mock_worker(f"prefill-{index}", Role.PREFILL, board=board) for index in range(3)]
    return [*prefills, *(mock_worker(f"decode-{index}", board=board) for index in range(3))]


async def ask(c: Cluster, session: str, prompt: str = "hi") -> None:
    headers = {"X-Session-Id": session} if session else {}
    response = await c.http.post("/v1/completions", json=completion_body(prompt=prompt), headers=headers)
    assert response.status_code == 200


def used(workers: list[MockWorker]) -> set[tuple[str, str]]:
    """Names of workers that were sent something, and what."""
    return {(worker.info.info.peer.worker_id, kind.__name__) for worker in workers for kind in (Open, Prefill) for _ in worker.of(kind)}


async def test_requests_of_a_session_meet_the_same_workers_at_every_router(tmp_path: Path) -> None:
    places = []
    for number in range(2):
        workers = fleet()
        async with cluster(tmp_path / str(number), *workers) as c:
            for turn in range(6):
                await ask(c, "conversation-7", "hi " * (turn + 1))
            assert await c.metric("pd_serve_routing_decisions_total", '{kind="disaggregated",reason="session"}') == 6
        places.append(used(workers))
    assert [kind for _, kind in sorted(places[0])] == ["Open", "Prefill"]
    assert places[0] == places[1]


async def test_sessions_are_shared_out_and_the_header_can_be_ignored(tmp_path: Path) -> None:
    workers = fleet()
    async with cluster(tmp_path, *workers, policy="round_robin") as c:
        for number in range(24):
            await ask(c, f"conversation-{number}")
        assert len(used(workers)) == 6
        before = [len(worker.of(Open)) for worker in workers[3:]]
        for _ in range(6):
            await ask(c, "")
        assert [len(worker.of(Open)) - had for worker, had in zip(workers[3:], before, strict=True)] == [2, 2, 2]
