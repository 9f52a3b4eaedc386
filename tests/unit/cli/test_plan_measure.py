"""Watching a running system: which addresses are asked, who is shown the secret, and what comes of what they answer."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from pd_serve.cli.http import EndpointError
from pd_serve.cli.plan_measure import observe
from pd_serve.plan.errors import PlanError
from pd_serve.plan.measured import Measured
from pd_serve.protocol.control import STATUS_PATH, BlockStatus, RouterStatus, WorkerStatus
from pd_serve.protocol.link import Role

_TYPE = "# TYPE pd_serve_request_prompt_tokens"
ROUTER, PREFILL, DECODE = "http://router:1", "http://p:1", "http://d:1"


def worker(name: str, role: Role, address: str) -> WorkerStatus:
    blocks = BlockStatus(total=10, free=10, cached=0, leased=0, quarantined=0)
    return WorkerStatus(
        id=name, role=role, incarnation=1, address=address, pid=1, rank_pids=(2,), ready=True, draining=False, blocks=blocks,
        leases=0, running=0, waiting=0, prefill_queue_tokens=0, peers=(),
    )  # fmt: skip


def status(*workers: WorkerStatus) -> str:
    return RouterStatus(router_id="r", model="demo", open_requests=0, queued_requests=0, workers=workers).model_dump_json()


def counts(looks: int, phase: str, tokens: float, seconds: float) -> str:
    """After so many looks, each of which found as many more."""
    return (
        "# TYPE pd_serve_computed_tokens_total counter\n"
        f'pd_serve_computed_tokens_total{{phase="{phase}"}} {looks * tokens}\n'
        "# TYPE pd_serve_compute_seconds_total counter\n"
        f'pd_serve_compute_seconds_total{{phase="{phase}"}} {looks * seconds}\n'
        "# TYPE pd_serve_step_seconds histogram\n"
        f"pd_serve_step_seconds_count {looks}\n"
        "# TYPE pd_serve_blocks gauge\n"
        'pd_serve_blocks{state="free"} 10\n'
    )


class System:
    """One prefill and one decode worker."""

    def __init__(self) -> None:
        self.looks = dict.fromkeys((ROUTER, PREFILL, DECODE), 0)
        self.shown: list[tuple[str, str | None]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        url = str(request.url)
        self.shown.append((url, request.headers.get("Authorization")))
        if url == ROUTER + STATUS_PATH:
            return httpx.Response(200, text=status(worker("p", Role.PREFILL, PREFILL), worker("d", Role.DECODE, DECODE)))
        place = url.removesuffix("/metrics")
        self.looks[place] += 1
        if place == ROUTER:
            return httpx.Response(200, text=f"{_TYPE} histogram\npd_serve_request_prompt_tokens_count {self.looks[place]}\n")
        told = ("prefill", 1000, 0.5) if place == PREFILL else ("decode", 40, 0.2)
        return httpx.Response(200, text=counts(self.looks[place], *told))


def observed(answer: Callable[[httpx.Request], httpx.Response], secret: str = "") -> Measured:
    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        return observe(http, ROUTER, secret, 0.0, 0.0)


def test_every_worker_is_looked_at_and_counted() -> None:
    system = System()
    found = observed(system)
    assert found.prefill is not None
    assert found.decode is not None
    assert (found.prefill.tokens_per_s, found.decode.tokens_per_s) == (pytest.approx(2000), pytest.approx(200))
    assert found.seen.num_choices == 1
    assert system.looks == {ROUTER: 2, PREFILL: 2, DECODE: 2}


def test_the_secret_is_for_the_routers_status_alone() -> None:
    system = System()
    observed(system, "hush")
    assert {url for url, shown in system.shown if shown} == {ROUTER + STATUS_PATH}
    assert system.shown[0][1] == "Bearer hush"


def test_what_cannot_be_measured_is_told() -> None:
    with pytest.raises(PlanError, match="has no workers"):
        observed(lambda _: httpx.Response(200, text=status()))
    with pytest.raises(EndpointError, match="not a pd-serve router"):
        observed(lambda _: httpx.Response(200, text="{}"))
    with pytest.raises(EndpointError, match="answered 401"):
        observed(lambda _: httpx.Response(401, json={"error": {"message": "wrong secret"}}))
