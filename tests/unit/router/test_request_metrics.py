"""What is counted, measured and logged when a choice has ended."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.observe import Metrics, Side, setup_logging
from pd_serve.protocol.link import Role
from router.request_metrics import RequestMetrics
from router.timeline import Record, Timeline
from tests.fakes_worker import mock_worker
from tests.unit.router.cluster import cluster, completion_body

P1, D1 = (PeerId(WorkerId(name), Incarnation(1)) for name in ("p1", "d1"))


def ended(*, logs: bool = False, first_token_s: float | None = 0.5, num_tokens: int = 5) -> tuple[CollectorRegistry, list[Record]]:
    registry = CollectorRegistry()
    seen: list[Record] = []
    timeline = Timeline()
    timeline.on_end = RequestMetrics(Metrics(registry, Side.ROUTER), logs, seen.append).ended
    timeline.arrived(7, 30, 100.0)
    timeline.named(7, "mine", "cmpl-1")
    timeline.assigned(7, P1, D1, 100.25, 2**60)
    if first_token_s is not None:
        timeline.first_token(7, 100.0 + first_token_s)
    timeline.ended(7, "stop", num_tokens, 102.5)
    return registry, seen


def test_lengths_queue_and_time_per_token_are_measured_at_the_end() -> None:
    registry, (record,) = ended()
    sums = {
        "pd_serve_queue_seconds": 0.25,
        "pd_serve_time_per_output_token_seconds": 0.5,
        "pd_serve_request_prompt_tokens": 30,
        "pd_serve_request_generated_tokens": 5,
    }
    for name, value in sums.items():
        assert registry.get_sample_value(f"{name}_sum") == pytest.approx(value), name
        assert registry.get_sample_value(f"{name}_count") == 1, name
    assert (record.request_id, record.response_id, record.outcome, record.num_output_tokens) == ("mine", "cmpl-1", "stop", 5)


@pytest.mark.parametrize(("first_token_s", "num_tokens"), [(None, 0), (0.5, 1)])
def test_one_token_has_no_time_per_token(first_token_s: float | None, num_tokens: int) -> None:
    registry, _ = ended(first_token_s=first_token_s, num_tokens=num_tokens)
    assert registry.get_sample_value("pd_serve_time_per_output_token_seconds_count") == 0
    assert registry.get_sample_value("pd_serve_request_generated_tokens_count") == 1


async def test_json_lines_about_a_request_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        setup_logging("info", "json", "router")
        ended(logs=True)
        timeline = Timeline()
        timeline.arrived(8, 30, 100.0)
        timeline.named(8, "mine", "cmpl-2")
        timeline.assigned(8, P1, D1, 100.25, 2**60)
        timeline.left(8, "peer_lost", 3, 101.0)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["choice"], line["request_id"], line["response_id"], line["attempt_id"]) for line in lines] == [
        (7, "mine", "cmpl-1", str(2**60)),
        (8, "mine", "cmpl-2", str(2**60)),
    ]


async def test_the_router_measures_what_it_serves(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        await c.http.post("/v1/completions", json=completion_body(max_tokens=4, ignore_eos=True))
        for name in ("queue_seconds", "time_per_output_token_seconds", "request_prompt_tokens", "request_generated_tokens"):
            assert await c.metric(f"pd_serve_{name}_count") == 1, name
        assert await c.metric("pd_serve_request_generated_tokens_sum") == 4
        assert await c.metric("pd_serve_running_requests") == 0
