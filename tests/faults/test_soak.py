"""The soak's own parts. `make soak` runs it for three minutes, `python -m tests.faults.soak --minutes N` for as long as one likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.chaos import KINDS, ROUTER_KINDS, draw_faults
from tests.faults.mixed_load import Question, ask
from tests.faults.separate import SeparateCluster
from tests.faults.soak import Soak, soak

WORKERS = {"prefill": 2, "decode": 2}
NUM_PAIRS = len(KINDS) * len(WORKERS) + len(ROUTER_KINDS)
BODY = {"model": "demo", "prompt": [1], "max_tokens": 1}


def test_faults_are_drawn_from_the_seed_and_each_comes_once_before_any_comes_again() -> None:
    faults = list(islice(draw_faults(5, WORKERS), 2 * NUM_PAIRS))
    assert faults == list(islice(draw_faults(5, WORKERS), 2 * NUM_PAIRS)) != list(islice(draw_faults(6, WORKERS), 2 * NUM_PAIRS))
    for cycle in (faults[:NUM_PAIRS], faults[NUM_PAIRS:]):
        assert len({(fault.kind, fault.role) for fault in cycle}) == NUM_PAIRS
    assert {fault.kind for fault in faults if fault.role == "router"} == set(ROUTER_KINDS)


def reply(text: str) -> httpx.Response:
    choice, usage = {"text": text, "finish_reason": "length"}, {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return httpx.Response(200, json={"choices": [choice], "usage": usage})


async def answered(steps: list[Callable[[Soak], httpx.Response]], tmp_path: Path) -> Soak:
    """A soak after one question, to which these are the answers in turn; an undisturbed one is "yes"."""
    run = Soak(SeparateCluster(tmp_path), 1)
    left = [lambda run: reply("yes"), *steps]
    async with httpx.AsyncClient(base_url="http://router", transport=httpx.MockTransport(lambda request: left.pop(0)(run))) as client:
        question = Question(BODY, (await ask(client, BODY)).answer)
        await run.answer_one(client, question)
    assert not left
    return run


def breaks(run: Soak) -> httpx.Response:
    raise httpx.ReadError("reset")


def hangs(run: Soak) -> httpx.Response:
    raise httpx.ReadTimeout("nothing")


def breaks_as_the_router_dies(run: Soak) -> httpx.Response:
    run.chaos.num_router_deaths += 1
    run.chaos.router_is_up.clear()
    asyncio.get_running_loop().call_later(0.01, run.chaos.router_is_up.set)
    raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


async def test_a_connection_that_breaks_with_its_router_is_asked_again_and_counted(tmp_path: Path) -> None:
    run = await answered([breaks_as_the_router_dies, lambda run: reply("yes")], tmp_path)
    assert (run.report.broken_off, run.report.failures) == (1, [])


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([lambda run: reply("no")], id="a wrong answer"),
        pytest.param([breaks], id="a connection that breaks while its router lives"),
        pytest.param([hangs], id="no answer in time"),
        pytest.param([lambda run: httpx.Response(503, text="busy")], id="a refusal"),
        pytest.param([breaks_as_the_router_dies, lambda run: reply("no")], id="a wrong answer of the next router"),
        pytest.param([breaks_as_the_router_dies, breaks], id="a connection to the next router that breaks"),
    ],
)
async def test_anything_else_is_a_failure(steps: list[Callable[[Soak], httpx.Response]], tmp_path: Path) -> None:
    assert len((await answered(steps, tmp_path)).report.failures) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_load_cancels_kills_and_freezes_every_answer_is_right(tmp_path: Path, record_property: Any) -> None:
    report = soak(tmp_path, seed=180, seconds=180)
    record_property("figures", json.dumps(asdict(report)))
    assert sum(report.faults.values()) >= 9
    assert report.answers > 0
    assert report.asked_again > 0
    assert report.router_fds[1] <= report.router_fds[0] + 8
