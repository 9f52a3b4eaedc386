"""The cheap client against the mock worker's own HTTP: answers, streams, refusals and lost connections are told apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pd_serve.bench.mock_worker import MockConnection, MockSettings, Turns
from pd_serve.bench.raw_client import ask_for, connect, request_bytes, stream_all
from tests.fakes import peer_id


@asynccontextmanager
async def mock() -> AsyncIterator[int]:
    settings = MockSettings()
    turns = Turns(settings.interval_s)
    async with await asyncio.get_running_loop().create_server(lambda: MockConnection(peer_id(), settings, turns), "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """A server that says just this to whatever comes, then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def request(**fields: object) -> bytes:
    return request_bytes("/v1/completions", json.dumps({"model": "mock", "prompt": "hi", **fields}).encode())


async def test_every_token_of_every_stream_is_timed() -> None:
    async with mock() as port:
        answers = await stream_all(port, [request(stream=True, max_tokens=17)] * 5)
    assert [(len(answer.event_s), answer.error) for answer in answers] == [(17, "")] * 5
    assert all(answer.sent_s <= answer.event_s[0] <= answer.event_s[-1] <= answer.done_s for answer in answers)


async def test_one_connection_asks_again_and_again() -> None:
    async with mock() as port:
        connection = await connect(port)
        answers = [await connection.ask(request(max_tokens=3, stream=stream)) for stream in (False, True, False)]
        connection.close()
        assert [answer.error for answer in answers] == [""] * 3
        assert not any(answer.error for answer in await ask_for(port, request(max_tokens=2), 3, 0.01))


async def test_a_refusal_and_a_broken_stream_are_errors() -> None:
    for said, error in (
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}", "429"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ndata\r\n", "lost"),
    ):
        async with answering(said) as port:
            (answer,) = await stream_all(port, [request(stream=True)])
        assert error in answer.error
