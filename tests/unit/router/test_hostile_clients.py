"""Clients that ask for too much or leave their stream unread, and a worker whose tokens are nonsense."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from pd_serve.ids import AttemptId
from pd_serve.protocol.link import Cancel, Load, PeerStatus, PrefillDone, Role, Step, TokenOutput
from pd_serve.protocol.sampling import TokenLogprobs
from router.tokenizer import FolderTokenizer
from tests.fakes import block_counts, joined, load, peer_id
from tests.fakes_worker import Script, mock_worker
from tests.patience import PATIENCE_S
from tests.unit.router.cluster import Cluster, chat_body, cluster, completion_body, until

LIMITS = {"max_prompt_tokens": 50, "max_messages": 3, "max_stop_strings": 2, "max_stop_string_length": 5, "max_logit_bias": 2, "max_n": 2}
TOO_MUCH: list[tuple[str, dict[str, object]]] = [
    ("stop", {"stop": ["a", "b", "c"]}),
    ("stop", {"stop": "abcdef"}),
    ("logit_bias", {"logit_bias": {"1": 0, "2": 0, "3": 0}}),
    ("n", {"n": 3}),
    ("prompt", {"prompt": "x" * 51}),
    ("prompt", {"prompt": [5] * 51}),
]


async def test_what_is_more_than_configured_is_refused_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), **LIMITS) as c:
        for param, fields in TOO_MUCH:
            reply = await c.http.post("/v1/completions", json=completion_body(**fields))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
        reply = await c.http.post("/v1/chat/completions", json=chat_body(messages=[{"role": "user", "content": "x"}] * 4))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
        kept = {"stop": ["a", "bcdef"], "logit_bias": {"1": 0, "2": 0}, "n": 2, "prompt": "x" * 50}
        assert (await c.complete(**kept)).status_code == 200


async def test_a_text_too_long_for_any_prompt_is_refused_before_it_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 tokens of at most 12 characters each cover no more than 600 characters."""
    encoded: list[int] = []
    encode = FolderTokenizer.encode

    def seen(codec: FolderTokenizer, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        encoded.append(len(text))
        return encode(codec, text, add_special_tokens)

    monkeypatch.setattr(FolderTokenizer, "encode", seen)
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), max_prompt_tokens=50) as c:
        for param, asked in (
            ("prompt", c.complete(prompt="x" * 10_000_000)),
            ("prompt", c.complete(prompt="x" * 601)),
            ("prompt", c.complete(prompt=["x", "x" * 601])),
            ("messages", c.chat(messages=[{"role": "user", "content": " " * 601}])),
            ("messages", c.chat(messages=[{"role": "user", "content": "x" * 300}] * 3)),
        ):
            reply = await asked
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
            assert reply.json()["error"]["code"] == "context_length_exceeded"
            assert reply.json()["error"]["type"] == "invalid_request_error"
        assert encoded == []
        assert (await c.complete(prompt="<|im_start|>" * 50)).status_code == 200
        assert encoded == [600]


async def test_a_long_chat_is_not_even_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates run on the event loop."""
    rendered: list[int] = []
    monkeypatch.setattr(FolderTokenizer, "render_chat", lambda codec, messages, template_kwargs: rendered.append(1) or "x")
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), max_prompt_tokens=50) as c:
        assert (await c.chat(messages=[{"role": "user", "content": "x" * 201}] * 3)).status_code == 400
        assert rendered == []
        assert (await c.chat(messages=[{"role": "user", "content": "x" * 200}] * 3)).status_code == 200
        assert rendered == [1]


LONG_CALL = {"function": {"name": "f", "arguments": "x" * 601}}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "x" * 601}]}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [LONG_CALL]}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 601}}]}),
    ],
)
async def test_all_that_a_template_may_show_is_bounded_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, param: str, fields: dict[str, object]
) -> None:
    rendered: list[int] = []
    monkeypatch.setattr(FolderTokenizer, "render_chat", lambda *_: rendered.append(1) or "x")
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), max_prompt_tokens=50) as c:
        reply = await c.chat(**fields)
    assert (reply.status_code, reply.json()["error"]["param"], rendered) == (400, param, [])


async def test_the_length_of_texts_can_be_bounded(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), max_prompt_chars=20) as c:
        assert (await c.complete(prompt="x" * 20)).status_code == 200
        reply = await c.complete(prompt="x" * 21)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


async def stalled(c: Cluster, **fields: object) -> asyncio.StreamWriter:
    """A client that asks for a stream and reads none of it; its socket takes little."""
    port = int(c.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    body = json.dumps(completion_body(stream=True, ignore_eos=True, **fields)).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await reader.read(1)
    writer.transport.pause_reading()
    return writer


async def test_a_stream_that_nobody_reads_is_cut_and_cancelled_while_others_go_on(tmp_path: Path) -> None:
    """The worker makes tokens for ever, as fast as it can; 5 choices with log-probabilities soon fill what the kernel takes."""
    worker = mock_worker(role=Role.BOTH, script=Script(eos_after=False, interval_s=0.0001))
    worker.info, worker.blocks = msgspec.structs.replace(worker.info, max_model_len=2**20), block_counts(2**16)
    async with cluster(tmp_path, worker, max_stream_backlog_tokens=500) as c:
        writer = await stalled(c, max_tokens=20_000, n=5, logprobs=5)
        await until(lambda: worker.open_attempts, "its choices run")
        most = 0

        def backlog() -> int:
            return sum(len(generation.tokens) for generation in c.services.dispatcher._open.values())

        async with asyncio.timeout(PATIENCE_S):
            while worker.open_attempts:
                most = max(most, backlog())
                reply = await c.complete(max_tokens=2)
                assert reply.status_code == 200
                await asyncio.sleep(0.02)
        assert len({frame.attempt_id for frame in worker.of(Cancel)}) >= 5
        assert most <= 500 + 5 * 50, "a turn of the loop may bring some more"
        writer.transport.abort()


NONSENSE = {
    "no such token": TokenOutput(0, 260),
    "negative": TokenOutput(0, -5),
    "uneven log-probabilities": TokenOutput(0, 5, None, TokenLogprobs(-1.0, (1, 2, 3), (-1.0,))),
    "no such likely token": TokenOutput(0, 5, None, TokenLogprobs(-1.0, (2**40,), (-1.0,))),
    "not a number": TokenOutput(0, 5, None, TokenLogprobs(float("nan"), (1,), (-1.0,))),
}


@pytest.mark.parametrize("token", NONSENSE.values(), ids=NONSENSE.keys())
async def test_a_worker_that_sends_nonsense_loses_its_link_and_its_requests_end(
    tmp_path: Path, token: TokenOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.pool.MAX_BACKOFF_S", 0.05)
    worker = mock_worker(role=Role.BOTH, script=Script(stall_after=1))
    async with cluster(tmp_path, worker, request_timeout_s=PATIENCE_S, queue_timeout_s=PATIENCE_S, max_moves=0) as c:
        for stream, is_chat in ((False, True), (True, True), (True, False)):
            await until(lambda: not c.services.why_not_ready(), "linked")
            ask = c.chat(stream=stream, logprobs=True, top_logprobs=1) if is_chat else c.complete(stream=stream, logprobs=1)
            asked = asyncio.create_task(ask)
            choices = c.services.dispatcher._open
            await until(lambda: any(choice.lifecycle.num_output_tokens for choice in choices.values()), "it runs")  # noqa: B023
            worker.send(Step((msgspec.structs.replace(token, attempt_id=next(iter(worker.open_attempts))),)))
            reply = await asked
            assert reply.status_code == (200 if stream else 503), reply.text
            assert "peer_lost" in reply.text
            assert "[DONE]" not in reply.text
            await until(lambda: not worker.open_attempts, "nothing is left of it")
        worker.script.stall_after = -1
        await until(lambda: not c.services.why_not_ready(), "linked")
        assert (await c.complete()).status_code == 200


@pytest.mark.parametrize(
    "report",
    [
        load(Role.BOTH, prefill_queue_tokens=1 << 63),
        load(Role.BOTH, prefill_queue_tokens=-1),
        PrefillDone(AttemptId(1), -5, 0),
        PeerStatus((msgspec.structs.replace(joined(peer_id("p0")), bandwidth=-1.0),)),
    ],
    ids=["huge", "negative", "computed", "bandwidth"],
)
async def test_a_worker_with_an_impossible_count_loses_its_link(
    tmp_path: Path, report: Load | PrefillDone | PeerStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No column could hold it: every decision would fail, whoever the worker for it were."""
    monkeypatch.setattr("router.pool.MAX_BACKOFF_S", 0.05)
    worker = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, worker) as c:
        await until(lambda: not c.services.why_not_ready(), "linked")
        linked = c.services.pool.workers
        worker.send(report)
        await until(lambda: c.services.pool.workers and c.services.pool.workers[0] is not linked[0], "linked anew")
        await until(lambda: not c.services.why_not_ready(), "ready again")
        assert (await c.complete()).status_code == 200
