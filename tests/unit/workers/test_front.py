"""A front with a fake rank: real processes, real sockets. What routers, operators and supervisors see of it."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pd_serve.protocol.control import REGISTER_PATH, Registered, RegisterWorker
from pd_serve.protocol.link import (
    FinishReason,
    Open,
    Ping,
    Pong,
    RouterFrame,
    Step,
    TokenOutput,
    Welcome,
    WorkerFrame,
    router_codec,
    worker_codec,
)
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.wire import PROTOCOL_VERSION
from tests.patience import PATIENCE_S, Waiting
from tests.pids import is_running
from tests.ports import free_port
from workers.host_identity import host_id

SECRET = "s3cret"
FAKE_RANK = Path(__file__).with_name("fake_rank.py")
RUN = (
    "import sys; from pd_serve.config_sources import *; from pd_serve.protocol.link import Role; from workers.front import serve_worker; "
    "sys.exit(serve_worker(load_config(Sources(sets=tuple(sys.argv[2:]))), Role.DECODE, (sys.executable, sys.argv[1])))"
)
REPORT_INTERVAL_S = 0.5
"""Three of them without a report read as a frozen rank: long enough for one that has no core."""
T = TypeVar("T")


def wait_until(look: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    waiting = Waiting(timeout_s, 0.01)
    while not (value := look()):
        assert not waiting.is_over(), f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


@dataclass
class Worker:
    process: subprocess.Popen[str]
    log: Path
    seen: Path

    @property
    def url(self) -> str:
        return "http://" + wait_until(lambda: self.log.read_text().partition("listens at http://")[2], "the address").partition(",")[0]

    @property
    def rank_pid(self) -> int:
        return int(wait_until(lambda: self.log.read_text().partition("rank process ")[2], "the rank").split()[0].strip(";"))

    def get(self, path: str, secret: str = SECRET) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {secret}"}, timeout=PATIENCE_S)

    def until_ready(self) -> Worker:
        wait_until(lambda: self.get("/ready").status_code == 200, "ready")
        return self

    def frames_seen(self) -> list[str]:
        return [json.loads(line)[0] for line in self.seen.read_text().splitlines()] if self.seen.exists() else []

    def exit_code(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def running(tmp_path: Path, *modes: str, settings: tuple[str, ...] = ()) -> Iterator[Worker]:
    """Whatever happens inside, the rank must be gone when the front is."""
    log, seen = tmp_path / "front.log", tmp_path / "seen.jsonl"
    sets = (
        f"security.cluster_secret={SECRET}",
        f"worker.report_interval_s={REPORT_INTERVAL_S}",
        "worker.heartbeat_s=0.1",
        "worker.routers=",
        *settings,
    )
    env = dict(os.environ, FAKE_RANK=" ".join(modes), FAKE_RANK_SEEN=str(seen), TMPDIR=str(tmp_path))
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", RUN, str(FAKE_RANK), *sets], stderr=file, stdout=file, env=env, text=True)
    worker = Worker(process, log, seen)
    try:
        yield worker
    finally:
        process.kill()
        process.wait()
        text = log.read_text()
        if "rank process " in text:
            pid = worker.rank_pid
            wait_until(lambda: not is_running(pid), "the rank is gone")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running(tmp_path_factory.mktemp("front"), settings=("worker.id=decode-7",)) as started:
        yield started.until_ready()


def link(worker: Worker, secret: str = SECRET, version: int = PROTOCOL_VERSION, router: str = "r1") -> connect:
    headers = {"Authorization": f"Bearer {secret}", "X-PD-Router": router, "X-PD-Protocol": str(version)}
    return connect(worker.url.replace("http", "ws") + "/link", additional_headers=headers, proxy=None, close_timeout=0.2)


async def receive(socket: ClientConnection) -> WorkerFrame:
    data = await asyncio.wait_for(socket.recv(), PATIENCE_S)
    assert isinstance(data, bytes)
    return worker_codec().decode(data)


async def send(socket: ClientConnection, frame: RouterFrame) -> None:
    await socket.send(router_codec().encode(frame))


# ---- what is open to all


def test_health_readiness_and_metrics_need_no_secret(worker: Worker) -> None:
    assert httpx.get(worker.url + "/health").json() == {"status": "alive", "detail": ""}
    assert httpx.get(worker.url + "/ready").json() == {"ready": True, "detail": ""}
    text = httpx.get(worker.url + "/metrics").text
    assert 'pd_serve_blocks{state="used"} 5.0' in text
    assert 'pd_serve_leases{state="granted"} 1.0' in text
    assert "pd_serve_handover_seconds_count" in text
    assert 'pd_serve_joined_peers{lane="posix",path="one_sided"} 1.0' in text


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/control/status"), ("GET", "/control/traces"), ("POST", "/control/drain"), ("POST", "/control/role")]
)
def test_control_refuses_a_wrong_or_missing_secret(worker: Worker, method: str, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": SECRET},
        {"Authorization": "Bearer s3cret\u00e4".encode("latin-1")},
    ):
        reply = httpx.request(method, worker.url + path, headers=headers, json={"role": "both", "deadline_s": 1})
        assert reply.status_code == 401, headers
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert worker.process.poll() is None
    assert worker.get("/control/status").json()["role"] != "both"


# ---- control


def test_status_tells_identity_and_load(worker: Worker) -> None:
    status = worker.get("/control/status").json()
    assert (status["id"], status["address"], status["pid"], status["rank_pids"]) == (
        "decode-7",
        worker.url,
        worker.process.pid,
        [worker.rank_pid],
    )
    assert status["blocks"] == {"total": 32, "free": 20, "cached": 4, "leased": 2, "quarantined": 1}
    assert (status["running"], status["waiting"], status["prefill_queue_tokens"], status["leases"]) == (3, 2, 17, 1)
    assert status["peers"][0]["lane"] == "posix"


def test_control_refuses_unknown_fields_and_values(worker: Worker) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    for path, body in (
        ("/control/role", {"role": "leader"}),
        ("/control/role", {"role": "both", "x": 1}),
        ("/control/drain", {"deadline_s": -1}),
    ):
        reply = httpx.post(worker.url + path, headers=headers, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_value")
    assert worker.get("/control/status").json()["draining"] is False


def test_role_is_switched_by_the_rank_and_then_reported(worker: Worker) -> None:
    for role in ("prefill", "decode"):
        reply = httpx.post(worker.url + "/control/role", headers={"Authorization": f"Bearer {SECRET}"}, json={"role": role})
        assert reply.status_code == 202
        wait_until(lambda role=role: worker.get("/control/status").json()["role"] == role, "the new role")


def test_traces_come_from_the_rank(worker: Worker) -> None:
    told = worker.get("/control/traces?limit=3").json()
    (trace,) = told["traces"]
    layer = {"chunk": 0, "layer": 1, "kv_written_s": 0.1, "push_start_s": 0.2, "push_end_s": 0.3, "nbytes": 64}
    measures = {"num_tokens": 16, "compute_end_s": 0.5, "flushed_s": 0.6, "lane": "posix", "overlap_ratio": 0.75, "origin_s": 0.0}
    assert trace == {"attempt_id": 9, **measures, "layers": [layer]}
    assert told["attempts"] == []
    assert told["host"] == host_id()
    assert worker.get("/control/traces?limit=0").status_code == 400


# ---- links


async def test_link_begins_with_the_welcome_and_carries_frames_both_ways(worker: Worker) -> None:
    async with link(worker) as socket:
        welcome = await receive(socket)
        assert isinstance(welcome, Welcome)
        assert welcome.info.peer.worker_id == "decode-7"
        await send(socket, Ping(5))
        assert await receive(socket) == Pong(5)
        await send(socket, Open(1, (41,), 0, SamplingParams(max_tokens=1), None, 1.0))
        assert await receive(socket) == Step((TokenOutput(1, 42, FinishReason.LENGTH),))
    wait_until(lambda: worker.frames_seen()[-1] == "LinkDown", "the rank hears of the end")


async def test_frames_go_to_the_link_they_are_for(worker: Worker) -> None:
    async with link(worker, router="a") as a, link(worker, router="b") as b:
        await receive(a), await receive(b)
        for number in range(50):
            await send(a, Ping(number))
            await send(b, Ping(1000 + number))
        assert [await receive(a) for _ in range(50)] == [Pong(number) for number in range(50)]
        assert [await receive(b) for _ in range(50)] == [Pong(1000 + number) for number in range(50)]


@pytest.mark.parametrize(
    ("options", "status"), [({"secret": "wrong"}, 401), ({"secret": ""}, 401), ({"version": 999}, 409), ({"router": "x" * 200}, 400)]
)
async def test_link_is_refused_before_it_opens(worker: Worker, options: dict[str, str], status: int) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with link(worker, **options):
            pass
    assert refused.value.response.status_code == status


@pytest.mark.parametrize("payload", [b"\xff\xff", b"", "text", b"\x81\xa4type\xa5bogus"])
async def test_bad_frame_costs_the_link_and_nothing_else(worker: Worker, payload: bytes | str) -> None:
    async with link(worker, router="good") as good, link(worker, router="bad") as bad:
        await receive(good), await receive(bad)
        await bad.send(payload)
        with pytest.raises(ConnectionClosed):
            await receive(bad)
        await send(good, Ping(1))
        assert await receive(good) == Pong(1)


async def test_router_that_links_again_replaces_its_dead_link(worker: Worker) -> None:
    async with link(worker, router="twin") as old:
        await receive(old)
        async with link(worker, router="twin") as new:
            await receive(new)
            with pytest.raises(ConnectionClosed):
                await receive(old)
            await send(new, Ping(2))
            assert await receive(new) == Pong(2)


async def test_router_that_does_not_read_loses_its_link_not_the_workers_memory(tmp_path: Path) -> None:
    with running(tmp_path, "flood") as worker:
        worker.until_ready()
        front = psutil.Process(worker.process.pid)
        async with link(worker) as socket:
            socket.transport.pause_reading()
            await asyncio.to_thread(wait_until, lambda: "reads too slowly" in worker.log.read_text(), "the link is dropped")
        assert front.memory_info().rss < 300 * 1024 * 1024
        assert worker.get("/health").status_code == 200


# ---- registration


class FakeRouter(http.server.BaseHTTPRequestHandler):
    registrations: list[tuple[str | None, RegisterWorker]]

    def do_POST(self) -> None:
        assert self.path == REGISTER_PATH
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.registrations.append((self.headers["Authorization"], RegisterWorker.model_validate_json(body)))
        reply = Registered(router_id="r", heartbeat_s=1, linked=False).model_dump_json().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_router(port: int = 0) -> Iterator[tuple[int, list[tuple[str | None, RegisterWorker]]]]:
    seen: list[tuple[str | None, RegisterWorker]] = []
    handler = type("Handler", (FakeRouter,), {"registrations": seen})
    with http.server.HTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port, seen
        finally:
            server.shutdown()
            thread.join()


def test_worker_registers_at_every_router_and_again_after_a_router_restart(tmp_path: Path) -> None:
    port = free_port()
    with (
        fake_router() as (port_b, seen_b),
        running(tmp_path, settings=(f"worker.routers=http://127.0.0.1:{port},http://127.0.0.1:{port_b}",)) as worker,
    ):
        wait_until(lambda: seen_b and seen_b[-1][1].ready, "a ready registration at the router that is up")
        authorization, registration = seen_b[-1]
        assert authorization == f"Bearer {SECRET}"
        assert registration.address == worker.url
        for _ in range(2):
            with fake_router(port) as (_, seen_a):
                wait_until(lambda seen=seen_a: seen and seen[-1][1] == registration, "registered at the router that came (back)")


# ---- ends


def test_dead_rank_ends_the_front_with_one_line_that_says_why(tmp_path: Path) -> None:
    with running(tmp_path, "exit") as worker:
        assert worker.exit_code() == 1
        errors = [line for line in worker.log.read_text().splitlines() if "ERROR" in line]
        assert len(errors) == 1
        assert "exit code 3" in errors[0]
        assert "no model at this address" in errors[0]


async def test_killed_rank_closes_the_links_and_ends_the_front(tmp_path: Path) -> None:
    with running(tmp_path) as worker:
        worker.until_ready()
        async with link(worker) as socket:
            await receive(socket)
            os.kill(worker.rank_pid, signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                await receive(socket)
        assert await asyncio.to_thread(worker.exit_code) == 1
        assert "killed by SIGKILL" in worker.log.read_text()
        assert not [name for name in os.listdir(tmp_path) if name.startswith("pd-serve-")]


def test_rank_that_sends_garbage_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, "garbage") as worker:
        assert worker.exit_code() == 1
        assert "bad frame" in worker.log.read_text()


def test_frozen_rank_reads_unhealthy_and_recovers(tmp_path: Path) -> None:
    with running(tmp_path) as worker:
        worker.until_ready()
        os.kill(worker.rank_pid, signal.SIGSTOP)
        wait_until(lambda: worker.get("/health").status_code == 503, "unhealthy")
        assert worker.get("/ready").status_code == 503
        assert "not reported" in worker.get("/health").json()["detail"]
        os.kill(worker.rank_pid, signal.SIGCONT)
        wait_until(lambda: worker.get("/health").status_code == 200, "healthy again")


def test_sigterm_drains_stops_the_rank_and_exits_0(tmp_path: Path) -> None:
    with running(tmp_path) as worker:
        worker.until_ready()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.exit_code() == 0
        assert worker.frames_seen() == ["Drain", "Stop"]


def test_drain_by_http_exits_0_too(tmp_path: Path) -> None:
    with running(tmp_path) as worker:
        worker.until_ready()
        reply = httpx.post(worker.url + "/control/drain", headers={"Authorization": f"Bearer {SECRET}"}, json={"deadline_s": 5})
        assert reply.status_code == 202
        assert reply.json()["draining"] is True
        assert worker.exit_code() == 0


def test_busy_rank_has_until_the_deadline_and_is_not_ready_meanwhile(tmp_path: Path) -> None:
    with running(tmp_path, "busy", settings=("worker.drain_deadline_s=0.5", "worker.report_interval_s=0.1")) as worker:
        worker.until_ready()
        began = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: worker.get("/ready").json()["detail"], "a reason") == "draining"
        assert worker.exit_code() == 0
        assert time.monotonic() - began >= 0.5


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "busy", "deaf") as worker:
        worker.until_ready()
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Drain" in worker.frames_seen(), "the drain has begun")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.exit_code() == 128 + signal.SIGTERM


def test_stop_while_the_model_loads_does_not_wait(tmp_path: Path) -> None:
    with running(tmp_path, "slow") as worker:
        assert worker.get("/ready").json()["detail"] == "the model is loading"
        assert worker.get("/health").status_code == 200
        worker.process.send_signal(signal.SIGINT)
        assert worker.exit_code() == 0


def test_rank_dies_with_a_front_that_was_killed(tmp_path: Path) -> None:
    with running(tmp_path, "deaf") as worker:
        pid = worker.until_ready().rank_pid
        os.kill(pid, signal.SIGSTOP)
        worker.process.kill()
        wait_until(lambda: not is_running(pid), "the rank is gone")


def test_front_refuses_to_listen_beyond_loopback_without_a_secret(tmp_path: Path) -> None:
    with running(tmp_path, settings=("worker.host=0.0.0.0", "security.cluster_secret=")) as worker:
        assert worker.exit_code() != 0
        assert "cluster_secret is needed" in worker.log.read_text()
