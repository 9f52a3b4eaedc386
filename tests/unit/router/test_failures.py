"""Workers that refuse, fail, stall or vanish; clients that go away; queues and deadlines. Every test ends with empty tables."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pd_serve.protocol.client import ControlClient
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.link import BlockCounts, Cancel, FailureReason, Open, Prefill, RefusalReason, Role
from pd_serve.protocol.openai_responses import ChatCompletion, Completion
from router.dispatcher import Dispatcher
from router.load import LoadBook
from tests.fakes_worker import Board, Script, mock_worker, running
from tests.unit.router.cluster import chat_body, cluster, completion_body, events_of, until

ANSWER = "hello world, this is a long answer"


async def test_stream_moves_when_its_decode_worker_vanishes(tmp_path: Path) -> None:
    board = Board()
    prefill = mock_worker("prefill-0", Role.PREFILL, board=board)
    decodes = [mock_worker(f"decode-{i}", Role.DECODE, script=Script(close_after=5, interval_s=0.001), board=board) for i in range(2)]
    async with cluster(tmp_path, prefill, *decodes) as c:
        task = asyncio.create_task(c.chat(max_tokens=100, stream=True, stream_options={"include_usage": True}))
        await until(lambda: sum(worker.num_links for worker in decodes) > 2, "one link was cut", 5)
        for worker in decodes:
            worker.script.close_after = -1
        *events, done = events_of((await task).text)
        assert done == "[DONE]"
        text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])  # type: ignore[index,union-attr]
        assert text == ANSWER
        usage = events[-1]["usage"]  # type: ignore[index]
        assert usage["completion_tokens"] == len(ANSWER) + 1  # type: ignore[index]
        assert await c.metric("pd_serve_moves_total", '{reason="peer_lost"}') >= 1
        moved = [frame for worker in decodes for frame in worker.of(Open) if isinstance(frame, Open) and frame.num_output_tokens]
        assert moved[0].sampling.max_tokens == 100 - moved[0].num_output_tokens
        assert len(moved[0].token_ids) == usage["prompt_tokens"] + moved[0].num_output_tokens  # type: ignore[index]


async def test_engine_error_moves_to_the_other_worker(tmp_path: Path) -> None:
    bad = mock_worker("both-0", Role.BOTH, script=Script(fail_after=3))
    good = mock_worker("both-1", Role.BOTH)
    async with cluster(tmp_path, bad, good, policy="round_robin") as c:
        for _ in range(4):
            answer = ChatCompletion.model_validate_json((await c.chat(max_tokens=100)).content)
            assert answer.choices[0].message.content == ANSWER


async def test_error_before_the_first_byte_has_its_status(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH, script=Script(fail_after=0)), max_moves=2) as c:
        for stream in (False, True):
            response = await c.chat(stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
            assert response.json()["error"]["code"] == "engine_error"
        assert await c.metric("pd_serve_requests_total", '{code="500"}') == 2


async def test_error_after_the_first_byte_is_one_event_and_no_finish(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH, script=Script(fail_after=3, interval_s=0.01)), max_moves=0) as c:
        response = await c.chat(stream=True)
        assert response.status_code == 200
        events = events_of(response.text)
        assert isinstance(events[-1], dict)
        assert events[-1]["error"]["code"] == "engine_error"  # type: ignore[index]
        assert "[DONE]" not in events
        assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])  # type: ignore[index,union-attr]
        assert sum("error" in event for event in events) == 1
        openai = pytest.importorskip("openai")
        client = openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="x", max_retries=0)
        chunks = []

        async def read() -> None:
            async for chunk in await client.chat.completions.create(**chat_body(stream=True)):
                chunks.append(chunk)

        with pytest.raises(openai.APIError) as broken:
            await read()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER[:3]
        assert (broken.value.code, broken.value.type) == ("engine_error", "server_error")
        await client.close()


async def test_prefill_failure_cancels_decode_and_moves(tmp_path: Path) -> None:
    board = Board()
    bad = mock_worker("prefill-0", Role.PREFILL, script=Script(fail_prefill=FailureReason.ENGINE), board=board)
    good = mock_worker("prefill-1", Role.PREFILL, board=board)
    decode = mock_worker("decode-0", board=board)
    async with cluster(tmp_path, bad, good, decode, policy="round_robin") as c:
        for _ in range(2):
            assert (await c.chat()).status_code == 200
    assert len(decode.of(Cancel)) == len(bad.of(Prefill)) >= 1


async def test_a_lost_record_costs_the_handover_timeout_and_not_the_transfers(tmp_path: Path) -> None:
    board = Board()
    prefill = mock_worker("prefill-0", Role.PREFILL, script=Script(lost_records=1), board=board)
    decodes = [mock_worker(f"decode-{i}", board=board) for i in range(2)]
    async with cluster(tmp_path, prefill, *decodes, handover_timeout_s=0.3, transfer_timeout_s=60.0) as c:
        began = asyncio.get_running_loop().time()
        assert (await c.complete()).status_code == 200
        assert 0.25 < asyncio.get_running_loop().time() - began < 60.0
        assert await c.metric("pd_serve_moves_total", '{reason="timeout"}') == 1
        assert (await c.complete()).status_code == 200
        await asyncio.sleep(0.4)
        assert await c.metric("pd_serve_moves_total", '{reason="timeout"}') == 1, "only the lost one"
    assert [len(worker.of(Cancel)) for worker in decodes].count(1) == 1
    assert not prefill.of(Cancel)


async def test_no_prefill_worker_prompts_are_computed_where_they_decode(tmp_path: Path) -> None:
    decode = mock_worker()
    async with cluster(tmp_path, decode) as c:
        assert (await c.chat()).status_code == 200
        assert await c.metric("pd_serve_routing_decisions_total", '{kind="local",reason="no_prefill_worker"}') == 1
    assert decode.of(Open)[0].writer is None  # type: ignore[union-attr]


async def test_no_decode_worker_is_503_with_retry_after(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker("prefill-0", Role.PREFILL), wait_ready=False, queue_timeout_s=0.2) as c:
        ready = await c.http.get("/ready")
        assert ready.status_code == 503
        assert "decode" in ready.json()["reason"]
        response = await c.complete()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "no_worker"


async def test_queue_is_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, wait_ready=False, queue_timeout_s=1.0, max_queued_requests=2) as c:
        responses = await asyncio.gather(*(c.complete() for _ in range(5)))
        assert sorted(response.status_code for response in responses) == [429, 429, 429, 503, 503]
        rejected = next(response for response in responses if response.status_code == 429)
        assert rejected.headers["retry-after"] == "1"
        assert rejected.json()["error"]["type"] == "rate_limit_error"
        assert await c.metric("pd_serve_rejections_total", '{reason="queue_full"}') == 3


async def test_open_requests_are_bounded(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(interval_s=0.05))
    async with cluster(tmp_path, worker, max_open_requests=2) as c:
        responses = await asyncio.gather(*(c.complete() for _ in range(4)))
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]


async def test_queued_requests_start_when_a_worker_comes(tmp_path: Path) -> None:
    late = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, wait_ready=False) as c:
        waiting = [asyncio.create_task(c.complete()) for _ in range(3)]
        await until(lambda: c.services.dispatcher.num_queued == 3, "queued")
        async with running(late) as address, ControlClient(c.url) as control:
            peer = late.info.info.peer
            await control.register(
                RegisterWorker(worker_id=peer.worker_id, incarnation=peer.incarnation, address=address, role=late.role, ready=True)
            )
            assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 3
            await c.services.pool.close()


async def test_capacity_refusals_wait_for_room(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(refuse=RefusalReason.NO_CAPACITY))
    async with cluster(tmp_path, worker) as c:
        began = asyncio.get_running_loop().time()
        task = asyncio.create_task(c.complete())
        await until(lambda: len(worker.of(Open)) >= 3, "it is tried again")
        assert len(worker.of(Open)) <= 3 + 20 * (asyncio.get_running_loop().time() - began), "but not without pause"
        worker.script.refuse = None
        assert (await task).status_code == 200
        assert await c.metric("pd_serve_moves_total", '{reason="no_capacity"}') == 0


async def test_full_pool_is_not_tried_at_all(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH)
    worker.blocks = BlockCounts(total=256, free=0, cached=0, leased=0, quarantined=0)
    async with cluster(tmp_path, worker) as c:
        task = asyncio.create_task(c.complete())
        await asyncio.sleep(0.25)
        assert not worker.of(Open)
        worker.blocks = None
        assert (await task).status_code == 200


@pytest.mark.parametrize("phase", ["queued", "prefill", "streaming", "whole"])
async def test_client_that_goes_away_leaves_nothing(tmp_path: Path, phase: str) -> None:
    board = Board()
    prefill = mock_worker("prefill-0", Role.PREFILL, script=Script(prefill_delay_s=30 if phase == "prefill" else 0), board=board)
    decode = mock_worker("decode-0", script=Script(interval_s=0.01, eos_after=False), board=board)
    if phase == "queued":
        decode.blocks = BlockCounts(total=256, free=0, cached=0, leased=0, quarantined=0)
    async with cluster(tmp_path, prefill, decode) as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(chat_body(max_tokens=1000, stream=phase != "whole")).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        if phase == "queued":
            await until(lambda: c.services.dispatcher.num_queued, "queued")
        elif phase == "prefill":
            await until(lambda: prefill.of(Prefill), "prefill heard of it")
        elif phase == "whole":
            await until(lambda: decode.open_attempts, "decoding")
            await asyncio.sleep(0.05)
        else:
            await reader.readuntil(b"finish_reason")
        writer.close()
        await until(c.services.dispatcher.is_empty, "clean")
        await until(lambda: c.services.admission.num_open == 0, "left")
        legs = {"queued": (), "prefill": (prefill, decode)}.get(phase, (decode,))
        for worker in legs:
            await until(lambda worker=worker: len(worker.of(Cancel)) == 1, f"{worker.info.info.peer} was told")
        assert await c.metric("pd_serve_requests_total", '{code="499"}') == 1


async def test_silent_worker_is_lost_and_comes_back(tmp_path: Path) -> None:
    stuck = mock_worker("both-0", Role.BOTH, script=Script(stall_after=3))
    async with cluster(tmp_path, stuck, worker_timeout_s=0.4) as c:
        task = asyncio.create_task(c.chat(max_tokens=100))
        await until(lambda: stuck.of(Open), "started")
        stuck.is_silent = True
        await until(lambda: not c.services.pool.workers, "suspected", 2)
        stuck.script.stall_after = -1
        stuck.is_silent = False
        answer = ChatCompletion.model_validate_json((await task).content)
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage.completion_tokens == len(ANSWER) + 1


async def test_request_deadline_ends_both_legs(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(stall_after=2))
    async with cluster(tmp_path, worker, request_timeout_s=1.0) as c:
        events = events_of((await c.chat(stream=True)).text)
        assert events[-1]["error"]["type"] == "server_error"  # type: ignore[index]
        worker.script.stall_after = 0
        assert (await c.chat()).status_code == 503
    assert len(worker.of(Cancel)) == 2


async def test_draining_worker_gets_nothing_new(tmp_path: Path) -> None:
    leaving, staying = mock_worker("both-0", Role.BOTH), mock_worker("both-1", Role.BOTH)
    async with cluster(tmp_path, leaving, staying) as c:
        leaving.is_draining = True
        leaving.report()
        await until(lambda: sum(worker.is_available for worker in c.services.pool.workers) == 1, "heard of it")
        assert [(await c.complete()).status_code for _ in range(3)] == [200] * 3
    assert not leaving.of(Open)


async def test_burst_at_second_zero(tmp_path: Path) -> None:
    board = Board()
    workers = [mock_worker(f"prefill-{i}", Role.PREFILL, board=board) for i in range(2)] + [mock_worker(board=board)]
    async with cluster(tmp_path, *workers, wait_ready=False) as c:
        bodies = [completion_body(prompt="x" * (1 + i % 90), max_tokens=2) for i in range(500)]
        answers = await asyncio.gather(*(c.post_raw("/v1/completions", body) for body in bodies))
        assert {status for status, _ in answers} == {200}
        assert all(Completion.model_validate_json(text).choices[0].text == "he" for _, text in answers)


async def test_emptiness_check_sees_a_planted_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The historic mistake: the client goes away and nobody is told."""
    monkeypatch.setattr(Dispatcher, "cancel", lambda self, generation: None)
    worker = mock_worker(role=Role.BOTH, script=Script(stall_after=1))

    async def impatient_client() -> None:
        async with cluster(tmp_path, worker) as c:
            asking = asyncio.create_task(c.complete())
            await until(lambda: worker.open_attempts, "it is open")
            asking.cancel()
            await asyncio.wait((asking,))

    with pytest.raises(AssertionError, match="nothing left"):
        await impatient_client()


async def test_emptiness_check_sees_a_planted_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load that stays after its request: the worker would look busy for ever."""
    monkeypatch.setattr(LoadBook, "release", lambda self, key, peers: None)
    with pytest.raises(AssertionError, match="nothing left"):
        async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
            assert (await c.complete()).status_code == 200


async def test_request_without_a_budget_that_came_before_any_worker_is_served_and_holds_up_nobody(tmp_path: Path) -> None:
    """What fits is only known once there is a worker: the budget is what is left there, and 400 where the client asked for more."""
    late = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, wait_ready=False) as c:
        requests = (c.chat(max_tokens=None), c.complete(max_tokens=3000), c.complete(max_tokens=8))
        waiting = [asyncio.create_task(request) for request in requests]
        await until(lambda: c.services.dispatcher.num_queued == 3, "queued")
        async with running(late) as address, ControlClient(c.url) as control:
            peer = late.info.info.peer
            await control.register(
                RegisterWorker(worker_id=peer.worker_id, incarnation=peer.incarnation, address=address, role=late.role, ready=True)
            )
            responses = await asyncio.gather(*waiting)
            assert [response.status_code for response in responses] == [200, 400, 200]
            assert responses[1].json()["error"]["code"] == "context_length_exceeded"
            opened = [frame for frame in late.of(Open) if isinstance(frame, Open)]
            assert {len(frame.token_ids) + frame.sampling.max_tokens for frame in opened} >= {2048}
            await c.services.pool.close()
