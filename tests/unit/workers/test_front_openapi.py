"""A worker front asked by Schemathesis from its own document; control calls of strangers are refused before their body is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
from schemathesis.generation import GenerationMode

from pd_serve.config import Config, WorkerConfig
from pd_serve.errors import ConfigError
from pd_serve.protocol.link import Role
from tests.fakes import serving, welcome
from tests.unit.protocol.test_hostile_links import SECRET, FakeFront
from tests.unit.router.test_openapi import ask_all
from workers.front import serve_worker
from workers.front_app import build_app
from workers.front_guard import MAX_CONTROL_NBYTES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Do not use the `random` module")
RIGHT = {"Authorization": f"Bearer {SECRET}"}
CONTROL = (("GET", "status"), ("GET", "traces"), ("POST", "drain"), ("POST", "role"))


@pytest.fixture(scope="module", params=["", SECRET], ids=["open", "secured"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a front in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    front = FakeFront()
    front.view.take_welcome(welcome())
    server = serving(build_app(front, request.param), lifespan="off")
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["as described", "not as described"])
def test_every_answer_of_a_front_is_one_that_is_described(url: str, mode: GenerationMode) -> None:
    seen = ask_all(url, mode)
    assert "/control/drain" in seen
    assert httpx.get(url + "/metrics").status_code == 200


BODIES = [b"", b"{", b"[]", b'{"deadline_s": NaN}', b'{"deadline_s": 1e999}', b'{"deadline_s": "\\ud800"}', b'{"\\ud800": 1}', b"\xff\xfe"]


@pytest.mark.parametrize("body", BODIES, ids=repr)
def test_a_stranger_gets_401_whatever_the_body_and_a_router_400(url: str, body: bytes) -> None:
    is_open = httpx.get(url + "/control/status").status_code == 200
    for method, path in CONTROL:
        reply = httpx.request(method, f"{url}/control/{path}", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 401 or is_open, reply.text
    for path in ("drain", "role"):
        reply = httpx.post(f"{url}/control/{path}", content=body, headers={**RIGHT, "content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_value"), reply.text


def test_bodies_are_bounded_for_all(url: str) -> None:
    is_open = httpx.get(url + "/control/status").status_code == 200
    large = b" " * (MAX_CONTROL_NBYTES + 1)
    assert httpx.post(url + "/control/drain", content=large, headers=RIGHT).status_code == 413
    assert httpx.post(url + "/control/drain", content=large).status_code == (413 if is_open else 401)
    assert httpx.request("GET", url + "/health", content=large).status_code == 413


def test_a_worker_does_not_listen_beyond_loopback_without_a_secret() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="cluster_secret"):
            serve_worker(Config(worker=WorkerConfig(host=host)), Role.DECODE)
