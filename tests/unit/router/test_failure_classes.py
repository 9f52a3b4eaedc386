"""Faults that users of disaggregated serving report, at the router: mixed answers, first-token edges, one death of two, start orders."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from pd_serve.protocol.client import ControlClient
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.link import Open, Prefill, Role
from pd_serve.protocol.openai_responses import Completion
from pd_serve.protocol.server import server_config
from tests import fakes
from tests.fakes import byte_ids, peer_id, peer_info, welcome
from tests.fakes_worker import Board, MockWorker, Script, mock_worker, running
from tests.ports import free_port
from tests.unit.router.cluster import Cluster, cluster, completion_body, events_of, until

BLOCK = 16


def fleet(num_prefill: int, num_decode: int, script: Script | None = None) -> list[MockWorker]:
    board, script = Board(), script or Script()
    prefills = [mock_worker(f"prefill-{i}", Role.PREFILL, script=script, board=board) for i in range(num_prefill)]
    return prefills + [mock_worker(f"decode-{i}", script=script, board=board) for i in range(num_decode)]


# ---- answers


async def test_every_answer_repeats_its_own_secret_word(tmp_path: Path) -> None:
    """256 concurrent prompts over two prefill and two decode workers, half of them streamed, 15 % of the clients gone at some moment."""
    rng = random.Random(15)
    script = Script(reply=lambda prompt: prompt[-10:], interval_s=0.001)

    async def ask(c: Cluster, number: int) -> bool:
        secret = f"w{number:04d}{rng.randrange(10**5):05d}"
        assert len(secret) == 10
        body = completion_body(prompt="x" * (number % 40) + secret, max_tokens=20, stream=number % 2 == 0)
        request = asyncio.create_task(c.post_raw("/v1/completions", body))
        if rng.random() < 0.15:
            await asyncio.sleep(rng.uniform(0, 0.3))
            request.cancel()
            await asyncio.wait((request,))
            return False
        status, text = await request
        assert status == 200, text
        if number % 2:
            assert Completion.model_validate_json(text).choices[0].text == secret
        else:
            events = events_of(text)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == secret  # type: ignore[index]
        return True

    async with cluster(tmp_path, *fleet(2, 2, script)) as c:
        answered = await asyncio.gather(*(ask(c, number) for number in range(256)))
    assert sum(answered) > 200


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
async def test_edges_of_the_first_token_answer_as_one_worker_does(tmp_path: Path, length: int) -> None:
    """The same JSON, but for ids and times, from a pair as from one colocated worker."""
    stop_id = byte_ids("s")[0]
    replies = {"s": byte_ids("stop"), "e": (), "a": byte_ids("ab cd"), "t": byte_ids("then STOP it")}
    script = Script(reply=lambda prompt: replies[chr(prompt[-1] - 4)])
    cases: list[dict[str, object]] = [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 1, "logprobs": 2},
        {"max_tokens": 9, "logprobs": 0, "stop_token_ids": [stop_id]},
        {"max_tokens": 9, "stop": ["b c"]},
        {"max_tokens": 20, "stop": ["STOP"], "logprobs": 1},
    ]
    pair, alone = fleet(1, 1, script), [mock_worker("both-0", Role.BOTH, script=script)]
    async with cluster(tmp_path / "pair", *pair) as two, cluster(tmp_path / "alone", *alone) as one:
        for fields, last, stream in itertools.product(cases, replies, (False, True)):
            body = {"prompt": "x" * (length - 1) + last, "stream": stream, **fields}
            answers = [(await c.complete(**body)) for c in (two, one)]
            assert {answer.status_code for answer in answers} == {200}
            left, right = ([_bare(event) for event in (events_of(a.text) if stream else [a.json()])] for a in answers)
            assert left == right, body
            if not stream and last == "e":
                choice = left[0]["choices"][0]  # type: ignore[index]
                assert (choice["text"], choice["finish_reason"]) == ("", "stop")
                assert left[0]["usage"]["completion_tokens"] == 1  # type: ignore[index]
            if not stream and last == "t" and fields.get("stop") == ["STOP"]:
                assert left[0]["choices"][0]["text"] == "then "  # type: ignore[index]
    assert all(frame.writer is not None for frame in pair[1].of(Open) if isinstance(frame, Open))


def _bare(event: object) -> object:
    return {key: value for key, value in event.items() if key not in ("id", "created")} if isinstance(event, dict) else event


async def test_no_worker_hears_of_a_prompt_too_long_for_any_of_them(tmp_path: Path) -> None:
    board = Board()
    prefill = MockWorker(welcome(peer_info(peer_id("p"), Role.PREFILL), max_model_len=100), Script(), board)
    decode = MockWorker(welcome(peer_info(peer_id("d")), max_model_len=60), Script(), board)
    async with cluster(tmp_path, prefill, decode) as c:
        for num_prompt, max_tokens, status in ((60, 1, 400), (59, 2, 400), (59, 1, 200), (99, None, 400), (50, None, 200), (101, 1, 400)):
            response = await c.complete(prompt="x" * num_prompt, **({} if max_tokens is None else {"max_tokens": max_tokens}))
            assert response.status_code == status, (num_prompt, max_tokens, response.text)
            if status == 400:
                assert response.json()["error"]["code"] == "context_length_exceeded"
                message = response.json()["error"]["message"]
                assert "60" in message
                assert "more were requested" not in message, "found too long in the queue, not before it"
    assert len(decode.of(Open)) == len(prefill.of(Prefill)) == 2


# ---- workers that go


async def test_death_of_one_decode_worker_touches_only_what_it_had(tmp_path: Path) -> None:
    workers = fleet(1, 2, Script(interval_s=0.01, eos_after=False))
    async with cluster(tmp_path, *workers) as c:
        tasks = [asyncio.create_task(c.complete(max_tokens=40)) for _ in range(10)]
        await until(lambda: all(len(worker.open_attempts) == 5 for worker in workers[1:]), "spread")
        await asyncio.sleep(0.05)
        workers[1].cut()
        assert {(await task).status_code for task in tasks} == {200}
        assert await c.metric("pd_serve_moves_total", '{reason="peer_lost"}') == 5
        assert [(await c.complete()).status_code for _ in range(4)] == [200] * 4
    assert sum(isinstance(frame, Open) and frame.num_output_tokens == 0 for frame in workers[2].of(Open)) >= 5


async def test_running_decodes_outlive_every_prefill_worker(tmp_path: Path) -> None:
    """And new prompts are computed where they decode until a prefill worker is back."""
    workers = fleet(2, 1, Script(interval_s=0.01, eos_after=False))
    decode = workers[2]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(running(worker)) for worker in workers[:2]]
        async with cluster(tmp_path, decode, wait_ready=False) as c:
            c.services.pool.start(tuple(addresses))
            await until(lambda: len(c.services.pool.workers) == 3 and not c.services.why_not_ready(), "all here")
            await until(lambda: len([w for w in c.services.pool.workers if w.joined]) == 3, "joined")
            tasks = [asyncio.create_task(c.complete(max_tokens=40)) for _ in range(6)]
            await until(lambda: len(decode.open_attempts) == 6 and all(not w.open_attempts for w in workers[:2]), "decoding")
            await asyncio.sleep(0.05)
            for worker in workers[:2]:
                worker.is_draining = True
                worker.cut()
            await until(lambda: sum(worker.is_available for worker in c.services.pool.workers) == 1, "prefill gone")
            assert (await c.complete(max_tokens=2)).status_code == 200
            assert decode.of(Open)[-1].writer is None  # type: ignore[union-attr]
            assert (await c.http.get("/ready")).status_code == 200
            assert {(await task).status_code for task in tasks} == {200}
            assert await c.metric("pd_serve_moves_total", '{reason="peer_lost"}') == 0
            for worker in workers[:2]:
                worker.is_draining = False
                worker.report()
            await until(lambda: sum(worker.is_available for worker in c.services.pool.workers) == 3, "prefill back")
            assert (await c.complete(max_tokens=2)).status_code == 200
            assert decode.of(Open)[-1].writer is not None  # type: ignore[union-attr]
            await c.services.pool.close()


async def test_worker_that_failed_for_a_while_is_used_again(tmp_path: Path) -> None:
    workers = [mock_worker("both-0", Role.BOTH, script=Script(fail_after=0)), mock_worker("both-1", Role.BOTH)]
    async with cluster(tmp_path, *workers, policy="round_robin") as c:
        assert {(await c.complete()).status_code for _ in range(4)} == {200}, "fewer failures than open its breaker"
        workers[0].script.fail_after = -1
        before = len(workers[0].of(Open))
        assert [(await c.complete()).status_code for _ in range(4)] == [200] * 4
        assert len(workers[0].of(Open)) == before + 2
        assert await c.metric("pd_serve_requests_total", '{code="200"}') == 8


async def test_first_request_after_a_link_died_in_silence(tmp_path: Path) -> None:
    """Nothing was open, so nobody was told; the request waits for the link instead of failing."""
    workers = fleet(1, 1)
    async with cluster(tmp_path, *workers) as c:
        for _ in range(2):
            await asyncio.sleep(0.15)
            for worker in workers:
                worker.cut()
            assert (await c.complete()).status_code == 200
            await until(lambda: len(c.services.pool.workers) == 2, "back")


async def test_links_and_pooled_connections_live_through_a_long_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a router and workers whose every timeout of idle connections is a few seconds or less: WebSocket pings and the answers to them,
    HTTP keep-alive (a client's pooled connection dies meanwhile), the silence after which a worker is suspected."""
    idle = partial(server_config, ws_ping_interval=0.3, ws_ping_timeout=2.5, timeout_keep_alive=1)
    monkeypatch.setattr(fakes, "server_config", idle)
    workers = fleet(1, 1)
    async with cluster(tmp_path, *workers, worker_timeout_s=2.5) as c:
        assert (await c.complete()).status_code == 200
        await asyncio.sleep(4.0)
        assert (await c.complete()).status_code == 200
        assert [worker.num_links for worker in workers] == [1, 1], "no link was made anew"


@pytest.mark.parametrize("order", list(itertools.permutations(("router", "prefill", "decode"))), ids="-".join)
@pytest.mark.parametrize("is_registering", [False, True], ids=["configured", "registering"])
async def test_every_start_order_converges(tmp_path: Path, order: tuple[str, ...], is_registering: bool) -> None:
    workers = dict(zip(("prefill", "decode"), fleet(1, 1), strict=True))
    ports = {name: free_port() for name in workers}
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports.values())

    async def register(c: Cluster, name: str) -> None:
        peer = workers[name].info.info.peer
        frame = RegisterWorker(
            worker_id=peer.worker_id,
            incarnation=peer.incarnation,
            address=f"http://127.0.0.1:{ports[name]}",
            role=workers[name].role,
            ready=True,
        )
        async with ControlClient(c.url) as control:
            await control.register(frame)

    async with AsyncExitStack() as stack:
        c: Cluster | None = None
        started: list[str] = []
        for name in order:
            if name == "router":
                configured = () if is_registering else urls
                c = await stack.enter_async_context(cluster(tmp_path, wait_ready=False, workers=configured))
            else:
                await stack.enter_async_context(running(workers[name], ports[name]))
                started.append(name)
            if c is not None and is_registering:
                for each in started:
                    await register(c, each)
            await asyncio.sleep(0.06)
        assert c is not None
        services = c.services
        await until(lambda: len(services.pool.workers) == 2 and all(worker.joined for worker in services.pool.workers), "converged")
        assert (await c.complete()).status_code == 200
        assert len(workers["prefill"].of(Prefill)) == 1
        await services.pool.close()


# ---- load


async def test_overload_by_impatient_clients_leaves_an_idle_system(tmp_path: Path) -> None:
    """Many times the capacity, clients that give up after a second: then the queue is empty and the next answer as quick as the first."""
    worker = mock_worker(role=Role.BOTH, script=Script(interval_s=0.02, eos_after=False, capacity=4))
    async with cluster(tmp_path, worker) as c:

        async def timed() -> float:
            started = asyncio.get_running_loop().time()
            assert (await c.complete(max_tokens=4)).status_code == 200
            return asyncio.get_running_loop().time() - started

        idle_s = await timed()

        async def impatient() -> bool:
            try:
                await c.http.post("/v1/completions", json=completion_body(prompt="x" * 300, max_tokens=10), timeout=1.0)
            except httpx.TimeoutException:
                return False
            return True

        tasks, most_queued = [], 0
        for _ in range(60):
            tasks.append(asyncio.create_task(impatient()))
            await asyncio.sleep(0.01)
            most_queued = max(most_queued, c.services.dispatcher.num_queued)
        assert most_queued > 10
        assert not all(await asyncio.gather(*tasks))
        await until(lambda: c.services.dispatcher.is_empty() and c.services.admission.num_open == 0, "empty")
        assert c.services.dispatcher.num_queued == 0
        for _ in range(8):
            if await timed() < idle_s + 0.1:
                return
        raise AssertionError("not one of 8 is as quick as the first")


async def test_choices_of_a_prompt_on_a_hot_worker_spill_over_and_others_stay_together(tmp_path: Path) -> None:
    """decode-0 has room for one attempt at a time; the choices of each prompt follow its first one wherever they can."""
    board = Board()
    prefill = mock_worker("prefill-0", Role.PREFILL, board=board)
    hot = mock_worker("decode-0", script=Script(interval_s=0.002, capacity=1), board=board)
    cool = mock_worker("decode-1", script=Script(interval_s=0.002), board=board)
    async with cluster(tmp_path, prefill, hot, cool) as c:
        replies = await asyncio.gather(*(c.complete(prompt=f"prompt {number}", n=3) for number in range(6)))
        assert {reply.status_code for reply in replies} == {200}
        assert all(len(reply.json()["choices"]) == 3 for reply in replies)
        assert await c.metric("pd_serve_routing_decisions_total", '{kind="local",reason="cached"}') >= 6
    firsts = {tuple(frame.token_ids) for frame in cool.of(Open) if isinstance(frame, Open) and frame.writer is not None}
    followers = [tuple(frame.token_ids) for frame in cool.of(Open) if isinstance(frame, Open) and frame.writer is None]
    assert hot.of(Open)
    assert len(followers) >= 6
    assert firsts >= set(followers)


async def test_burst_of_mixed_lengths_is_shared_by_tokens(tmp_path: Path) -> None:
    """200 prompts of mixed length within 100 ms on 4 prefill workers."""
    rng = random.Random(35)
    script = Script(prefill_s_per_token=0.00001)
    workers = fleet(4, 2, script)
    async with cluster(tmp_path, *workers) as c:
        lengths = [rng.choice((20, 60, 200, 900)) for _ in range(200)]
        bodies = [completion_body(prompt="x" * length, max_tokens=2) for length in lengths]
        assert {status for status, _ in await asyncio.gather(*(c.post_raw("/v1/completions", body) for body in bodies))} == {200}
    sent = [sum(len(frame.token_ids) for frame in worker.of(Prefill) if isinstance(frame, Prefill)) for worker in workers[:4]]
    assert sum(sent) == sum(lengths)
    assert max(sent) < 1.3 * sum(sent) / 4, sent
