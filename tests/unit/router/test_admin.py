"""The admin API over a real router and mock workers: joining, leaving, draining and switching roles, and who may ask."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Request

from pd_serve.config import RolesConfig, SecurityConfig
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.link import Open, Role
from router.occupancy import OwnOccupancy
from router.role_loop import RoleLoop
from tests.fakes_worker import Board, MockWorker, Script, mock_worker, running
from tests.unit.router.cluster import Cluster, cluster, until

ADMIN = "/admin/workers"


def ids(reply: httpx.Response) -> list[str]:
    return [worker["status"]["id"] for worker in reply.json()["workers"]]


async def fleet(c: Cluster) -> httpx.Response:
    return (await c.http.get(ADMIN)).raise_for_status()


async def test_a_worker_joins_by_its_address_and_leaves_when_its_requests_have_ended(tmp_path: Path) -> None:
    staying, leaving = mock_worker("a", Role.BOTH), mock_worker("b", Role.BOTH, script=Script(interval_s=0.02))
    async with cluster(tmp_path, staying) as c, running(leaving) as address:
        assert (await c.http.post(ADMIN, json={"address": address})).status_code == 202
        await until(lambda: len(c.services.pool.workers) == 2, "linked")
        staying.script.refuse = None
        staying.is_draining = True
        staying.report()
        await until(lambda: [worker.is_available for worker in c.services.pool.workers].count(True) == 1, "one takes requests")
        answer = asyncio.create_task(c.complete(max_tokens=20, ignore_eos=True))
        await until(lambda: leaving.open_attempts, "it runs there")
        staying.is_draining = False
        staying.report()
        told = await c.http.delete(f"{ADMIN}/b")
        assert (told.status_code, told.json()["leaving"]) == (202, True)
        assert (await c.complete()).status_code == 200
        assert len(leaving.of(Open)) == 1, "nothing new goes there"
        assert (await answer).status_code == 200
        await until(lambda: len(c.services.pool.workers) == 1, "let go")
        after = await fleet(c)
        assert (ids(after), after.json()["removed"], after.json()["unlinked"]) == (["a"], ["b"], [])
        assert await c.metric("pd_serve_moves_total", '{reason="peer_lost"}') == 0


async def test_a_removed_worker_comes_back_when_added_or_started_anew_and_not_by_registration(tmp_path: Path) -> None:
    worker = mock_worker("b", Role.BOTH)
    async with cluster(tmp_path, mock_worker("a", Role.BOTH)) as c, running(worker) as address:
        registration = RegisterWorker(worker_id="b", incarnation=1, address=address, role=Role.BOTH, ready=True)
        c.services.pool.register(registration)
        await until(lambda: len(c.services.pool.workers) == 2, "linked")
        assert (await c.http.delete(f"{ADMIN}/b?force")).status_code == 202
        await until(lambda: len(c.services.pool.workers) == 1, "gone")
        assert not c.services.pool.register(registration)
        assert (await fleet(c)).json()["unlinked"] == []
        await c.http.post(ADMIN, json={"address": address})
        await until(lambda: len(c.services.pool.workers) == 2, "back")
        await c.http.delete(f"{ADMIN}/b?force")
        await until(lambda: len(c.services.pool.workers) == 1, "gone again")
        worker.info = msgspec.structs.replace(mock_worker("b", Role.BOTH, incarnation=2).info)
        c.services.pool.register(registration.model_copy(update={"incarnation": 2}))
        await until(lambda: len(c.services.pool.workers) == 2, "another incarnation")
        assert (await fleet(c)).json()["removed"] == []


async def test_requests_of_a_worker_removed_by_force_go_on_elsewhere(tmp_path: Path) -> None:
    slow = Script(interval_s=0.05)
    first, second = mock_worker("a", Role.BOTH, script=slow), mock_worker("b", Role.BOTH, script=slow)
    async with cluster(tmp_path, first, second) as c:
        expected = asyncio.create_task(c.complete(max_tokens=6, ignore_eos=True))
        await until(lambda: first.open_attempts or second.open_attempts, "it runs")
        victim = "a" if first.open_attempts else "b"
        await c.http.delete(f"{ADMIN}/{victim}?force=true")
        reply = await expected
        assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 6)
        assert await c.metric("pd_serve_moves_total", '{reason="peer_lost"}') == 1


async def test_an_address_without_a_worker_is_shown_with_the_reason_and_can_be_removed(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker("a", Role.BOTH)) as c:
        await c.http.post(ADMIN, json={"address": "http://127.0.0.1:9"})
        await until(lambda: any(place.detail for place in c.services.pool.unlinked()), "tried")
        (place,) = (await fleet(c)).json()["unlinked"]
        assert "cannot connect" in place["detail"]
        assert (await c.http.delete(f"{ADMIN}/127.0.0.1:9")).status_code == 202
        assert (await fleet(c)).json()["unlinked"] == []


@dataclass
class Controlled(MockWorker):
    """A mock worker that also takes control calls, as a front does."""

    def __post_init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        """(authorization, body) of each."""
        self._app = self._control()

    def _control(self) -> FastAPI:
        app = FastAPI(openapi_url=None)

        @app.post("/control/role")
        async def role(request: Request) -> dict[str, str]:
            body = await request.json()
            self.asked.append((request.headers.get("authorization", ""), json.dumps(body)))
            self.info = msgspec.structs.replace(self.info, info=msgspec.structs.replace(self.info.info, role=Role(body["role"])))
            self.report()
            return {}

        @app.post("/control/drain")
        async def drain(request: Request) -> dict[str, str]:
            self.asked.append((request.headers.get("authorization", ""), json.dumps(await request.json())))
            self.is_draining = True
            self.report()
            return {}

        return app

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def controlled(name: str, role: Role, board: Board) -> Controlled:
    return Controlled(mock_worker(name, role).info, Script(), board)


@asynccontextmanager
async def one_and_two(tmp_path: Path, secret: str = "") -> AsyncIterator[tuple[Cluster, dict[str, Controlled]]]:
    board = Board()
    made = {name: controlled(name, Role.PREFILL if name == "p0" else Role.DECODE, board) for name in ("p0", "d0", "d1")}
    async with cluster(tmp_path, *made.values(), security=SecurityConfig(cluster_secret=secret)) as c:
        yield c, made


async def test_a_role_is_switched_when_the_worker_has_told_and_requests_follow_it(tmp_path: Path) -> None:
    async with one_and_two(tmp_path, "hush") as (c, made):
        c.http.headers["authorization"] = "Bearer hush"
        reply = await c.http.post(f"{ADMIN}/d1/role", json={"role": "prefill", "deadline_s": 7})
        told = reply.json()
        assert (reply.status_code, told["previous"], told["worker"]["status"]["role"]) == (200, "decode", "prefill")
        assert 0 <= told["seconds"] < 5
        assert made["d1"].asked == [("Bearer hush", json.dumps({"role": "prefill", "deadline_s": 7.0}))]
        for _ in range(4):
            assert (await c.complete()).status_code == 200
        assert made["d1"].of(Open) == []
        assert await c.metric("pd_serve_role_switches_total", '{from="decode",reason="admin",to="prefill"}') == 1
        last = await c.http.post(f"{ADMIN}/d0/role", json={"role": "prefill"})
        assert (last.status_code, last.json()["error"]["code"]) == (409, "last_of_its_role")
        same = await c.http.post(f"{ADMIN}/d1/role", json={"role": "prefill"})
        assert same.json()["previous"] == "prefill"
        assert await c.metric("pd_serve_role_switches_total", '{from="prefill",reason="admin",to="prefill"}') == 0


async def test_the_controller_switches_what_it_may_and_no_more(tmp_path: Path) -> None:
    roles = RolesConfig(auto=True, interval_s=0.01, hold_s=0.0, min_dwell_s=0.0)
    long_queue = OwnOccupancy()
    long_queue.set_queued(50)
    async with one_and_two(tmp_path) as (c, made):
        services = c.services
        loop = RoleLoop(services.config.model_copy(update={"roles": roles}), services.pool, services.fleet, long_queue, services.metrics)
        running_loop = asyncio.create_task(loop.run())
        await until(lambda: made["d0"].role is Role.PREFILL, "the first decode worker computes prompts")
        await asyncio.sleep(0.1)
        running_loop.cancel()
        assert [len(worker.asked) for worker in made.values()] == [0, 1, 0], "one that decodes is left"
        assert await c.metric("pd_serve_role_switches_total", '{from="decode",reason="queue",to="prefill"}') == 1
        assert (await c.complete()).status_code == 200


async def test_a_worker_that_goes_on_failing_is_left_alone_and_shown(tmp_path: Path) -> None:
    failing, good = mock_worker("a", Role.BOTH, script=Script(fail_after=0)), mock_worker("b", Role.BOTH)
    async with cluster(tmp_path, failing, good) as c:
        for _ in range(20):
            assert (await c.complete()).status_code == 200
        assert len(failing.of(Open)) == 5
        (status, _) = (await c.http.get("/internal/v1/status")).json()["workers"]
        assert status["breakers"] == [{"leg": "decode", "state": "open", "failures": 5}]
        assert await c.metric("pd_serve_breaker_state", '{leg="decode",worker="a"}') == 2


async def test_a_drained_worker_gets_nothing_new(tmp_path: Path) -> None:
    async with one_and_two(tmp_path) as (c, made):
        reply = await c.http.post(f"{ADMIN}/d1/drain")
        assert (reply.status_code, made["d1"].asked) == (202, [("", '{"deadline_s": 30.0}')])
        await until(lambda: not all(worker.is_available for worker in c.services.pool.workers), "draining")
        for _ in range(3):
            assert (await c.complete()).status_code == 200
        assert made["d1"].of(Open) == []


async def test_refusals_look_like_openais_and_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(tmp_path, mock_worker("a", Role.BOTH), security=SecurityConfig(cluster_secret="hush")) as c:
        caplog.set_level(logging.INFO, "router.audit")
        with_secret = {"authorization": "Bearer hush"}

        async def ask(method: str, path: str, body: object = None, headers: dict[str, str] = with_secret) -> tuple[int, str]:
            reply = await c.http.request(method, ADMIN + path, json=body, headers=headers)
            return reply.status_code, reply.json()["error"]["code"]

        assert await ask("GET", "", headers={}) == (401, "invalid_api_key")
        assert await ask("POST", "/a/role", {"role": "both"}, headers={"authorization": "Bearer no"}) == (401, "invalid_api_key")
        assert await ask("POST", "", {"address": "gopher://x"}) == (400, "invalid_value")
        assert await ask("POST", "", {"address": "http://x:1", "more": 1}) == (400, "invalid_value")
        assert await ask("POST", "/a/role", {}) == (400, "invalid_value")
        assert await ask("POST", "/a/role", {"role": "judge"}) == (400, "invalid_value")
        assert await ask("POST", "/nobody/role", {"role": "both"}) == (404, "unknown_worker")
        assert await ask("DELETE", "/nobody") == (404, "unknown_worker")
        assert await ask("POST", "/a/drain") == (503, "unavailable"), "this worker has no such route"
        assert await ask("PUT", "") == (405, "method_not_allowed")
        assert (await c.http.post(f"{ADMIN}/a%1Bb/role")).status_code == 401
    said = "\n".join(_messages(caplog.records))
    assert "127.0.0.1: POST '/admin/workers/a/role' refused, wrong or missing secret" in said
    assert r"127.0.0.1: POST '/admin/workers/a\x1bb/role' refused, wrong or missing secret" in said
    assert "127.0.0.1 asked to make 'nobody' both: refused, there is no worker 'nobody'" in said


async def test_other_sites_pages_cannot_give_orders(tmp_path: Path) -> None:
    """Browsers send them everything but JSON without asking first; here no secret is needed."""
    page = {"origin": "http://elsewhere"}
    async with one_and_two(tmp_path) as (c, made):
        for path, content in (("", b'{"address": "http://x:1"}'), ("/d1/role", b'{"role": "prefill"}'), ("/d1/drain", b"{}")):
            for kind in ({"content-type": "text/plain"}, {"content-type": "text/plain; application/json"}, {}):
                reply = await c.http.post(ADMIN + path, content=content, headers=page | kind)
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content-type")
        assert (await c.http.post(f"{ADMIN}/d1/drain", headers=page)).status_code == 400
        registration = RegisterWorker(worker_id="x", incarnation=1, address="http://127.0.0.1:9", role=Role.BOTH, ready=True)
        told = await c.http.post("/internal/v1/workers", content=registration.model_dump_json(), headers={"content-type": "text/plain"})
        assert told.status_code == 400
        assert all(worker.asked == [] for worker in made.values())
        assert (
            await c.http.post(f"{ADMIN}/d1/drain", json={}, headers={"content-type": "application/json; charset=utf-8"})
        ).status_code == 202


def _messages(records: list[logging.LogRecord]) -> Iterator[str]:
    return (record.getMessage() for record in records if record.name == "router.audit")
