"""What the live page is told, and under which secret."""

from __future__ import annotations

from pathlib import Path

from pd_serve.config import SecurityConfig
from pd_serve.protocol.link import Role
from pd_serve.protocol.overview import OVERVIEW_PATH, WATERFALL_PATH, Overview, Waterfall
from router.api.overview import Figures
from tests.fakes_traces import NUM_LAYERS, told_by
from tests.fakes_worker import Board, MockWorker, mock_worker
from tests.unit.router.cluster import Cluster, cluster, completion_body, until

EXPOSITION = """\
# TYPE pd_serve_requests_total counter
pd_serve_requests_total{code="200"} 3.0
pd_serve_requests_total{code="499"} 1.0
# TYPE pd_serve_request_seconds histogram
pd_serve_request_seconds_bucket{le="0.1"} 2.0
pd_serve_request_seconds_bucket{le="1.0"} 2.0
pd_serve_request_seconds_bucket{le="+Inf"} 5.0
pd_serve_request_seconds_count 5.0
pd_serve_request_seconds_sum 9.5
"""


def pair() -> tuple[MockWorker, MockWorker]:
    board = Board()
    workers = mock_worker("prefill-0", Role.PREFILL, board=board), mock_worker("decode-0", Role.DECODE, board=board)
    for worker in workers:
        worker.traces = told_by
    return workers


async def overview_of(c: Cluster, **headers: str) -> Overview:
    return Overview.model_validate_json((await c.http.get(OVERVIEW_PATH, headers=headers)).content)


def test_figures_are_read_from_the_exposition() -> None:
    figures = Figures(EXPOSITION)
    assert (figures.total("pd_serve_requests_total"), figures.total("pd_serve_moves_total")) == (4, 0)
    view = figures.histogram("pd_serve_request_seconds")
    assert (view.bounds, view.counts, view.sum) == ((0.1, 1.0), (2, 0, 3), 9.5)


async def test_workers_pairs_figures_and_requests_are_told(tmp_path: Path) -> None:
    async with cluster(tmp_path, *pair()) as c:
        await c.chat(max_tokens=5, ignore_eos=True)
        told = await overview_of(c)
        assert [(worker.id, worker.role) for worker in told.workers] == [("decode-0", Role.DECODE), ("prefill-0", Role.PREFILL)]
        assert [(pair.prefill, pair.decode, pair.joined) for pair in told.pairs] == [("prefill-0", "decode-0", True)]
        assert (told.not_ready, told.requests_ended, told.generated_tokens) == ("", 1, 5)
        assert [sum(view.counts) for view in (told.ttft, told.itl, told.tpot, told.e2e)] == [1, 4, 1, 1]
        (row,) = told.requests
        assert (row.outcome, row.output_tokens, row.moves) == ("length", 5, 0)
        assert row.response_id.startswith("chatcmpl-")
        assert row.ttft_s is not None
        assert row.total_s is not None
        assert 0 <= row.ttft_s <= row.total_s <= row.age_s


async def test_a_waterfall_joins_router_and_workers_whatever_name_is_asked_for(tmp_path: Path) -> None:
    async with cluster(tmp_path, *pair()) as c:
        await c.http.post("/v1/completions", json=completion_body(), headers={"x-request-id": "mine-1"})
        (row,) = (await overview_of(c)).requests
        for name in (row.id, row.response_id, "mine-1", str(row.choice)):
            told = Waterfall.model_validate_json((await c.http.get(WATERFALL_PATH.format(name=name))).content)
            (attempt,) = told.attempts
            assert (told.request_id, attempt.attempt_id) == ("mine-1", row.id)
            assert len(attempt.layers) == NUM_LAYERS
            assert all(leg.is_known and leg.is_same_clock for leg in attempt.legs)
            assert {span.place for span in attempt.spans} == {"router", "prefill", "transfer", "decode"}
        missing = await c.http.get(WATERFALL_PATH.format(name="nobody"))
        assert (missing.status_code, "nobody" in missing.text) == (404, True)


async def test_a_worker_that_tells_nothing_does_not_stand_in_the_way(tmp_path: Path) -> None:
    prefill, decode = pair()
    prefill.traces = lambda worker: b"{"
    decode.traces = None
    async with cluster(tmp_path, prefill, decode) as c:
        await c.chat(max_tokens=2)
        (row,) = (await overview_of(c)).requests
        told = Waterfall.model_validate_json((await c.http.get(WATERFALL_PATH.format(name=row.id))).content)
        assert [leg.is_known for leg in told.attempts[0].legs] == [False, False]
        assert all("not to be had" in leg.detail for leg in told.attempts[0].legs)
        assert told.outcome


async def test_both_are_under_the_cluster_secret_which_workers_are_asked_with(tmp_path: Path) -> None:
    workers = pair()
    async with cluster(tmp_path, *workers, security=SecurityConfig(cluster_secret="hush", api_keys=("key",))) as c:
        key, secret = {"authorization": "Bearer key"}, {"authorization": "Bearer hush"}
        await c.http.post("/v1/completions", json=completion_body(), headers=key)
        for path in (OVERVIEW_PATH, WATERFALL_PATH.format(name="1")):
            assert (await c.http.get(path)).status_code == 401
            assert (await c.http.get(path, headers=key)).status_code == 401
        (row,) = (await overview_of(c, **secret)).requests
        answer = await c.http.get(WATERFALL_PATH.format(name=row.id), headers=secret)
        assert answer.status_code == 200
        assert [worker.control_headers[-1]["authorization"] for worker in workers] == ["Bearer hush"] * 2
        assert "hush" not in answer.text


async def test_a_request_in_progress_has_no_end(tmp_path: Path) -> None:
    prefill, decode = pair()
    decode.script.stall_after = 1
    async with cluster(tmp_path, prefill, decode) as c:
        async with c.http.stream("POST", "/v1/completions", json=completion_body(stream=True)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            (row,) = (await overview_of(c)).requests
            assert (row.outcome, row.total_s) == ("", None)
            assert await c.metric("pd_serve_running_requests") == 1
            await lines.aclose()
        await until(lambda: c.services.dispatcher.num_open == 0, "cancelled")
