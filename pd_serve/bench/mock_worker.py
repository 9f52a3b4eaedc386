"""Workers that answer at once, for measuring what stands before them: `python -m pd_serve.bench.mock_worker`.

    /link                 as a real worker speaks it: every turn, one frame with one token for each open request
    POST /v1/completions  the same tokens as an OpenAI server would send them, for a client that goes directly and for other routers
    anything else         200, so that other routers' health checks are content

A turn follows the last at once, or after `--interval-ms`. No model, no tokenizer, no HTTP library: one event loop, so that it takes as
little as can be of the cores it shares with what is measured. Prints one line of JSON with its ports, then serves until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
from dataclasses import dataclass
from itertools import count

import msgspec
import uvloop
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from pd_serve.ids import AttemptId, Incarnation, PeerId, WorkerId, new_incarnation
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.framing import wrap_bare
from pd_serve.protocol.link import (
    BlockCounts,
    Cancel,
    Closed,
    FinishReason,
    Load,
    Open,
    PeerInfo,
    Peers,
    PeerStatus,
    Ping,
    Pong,
    Reserved,
    Role,
    Step,
    TokenOutput,
    Welcome,
    WorkerFrame,
    router_codec,
    worker_codec,
)
from pd_serve.wire import MAX_FRAME_NBYTES, PROTOCOL_VERSION

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 512
"""Of every byte-level vocabulary these are short pieces of plain text."""
LOAD_INTERVAL_S = 0.1
_NUM_BLOCKS = 1 << 22
_MAX_MODEL_LEN = 1 << 20
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"mock",'
    b'"choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_LAST_CHUNK = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"mock"}]}'


class _Body(msgspec.Struct):
    """Of a request, as far as it matters here."""

    max_tokens: int = 16
    stream: bool = False


_body = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class MockSettings:
    num_workers: int = 1
    vocab_size: int = 49152
    interval_s: float = 0.0


class Turns:
    """What every turn gives a token to. Sleeps while nothing is open."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._next_at = 0.0
        self._is_running = False
        self._connections: dict[MockConnection, None] = {}

    def wake(self, connection: MockConnection) -> None:
        """The connection has open requests."""
        self._connections[connection] = None
        if not self._is_running:
            self._is_running = True
            self._next_at = self._loop.time() + self._interval_s
            self._schedule()

    def _schedule(self) -> None:
        if self._interval_s:
            self._loop.call_later(max(0.0, self._next_at - self._loop.time()), self._turn)
        else:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._next_at = max(self._next_at + self._interval_s, self._loop.time())
        for connection in tuple(self._connections):
            if not connection.step():
                del self._connections[connection]
        self._is_running = bool(self._connections)
        if self._is_running:
            self._schedule()


class MockConnection(asyncio.Protocol):
    """One connection: a link, or requests one after the other."""

    def __init__(self, peer: PeerId, settings: MockSettings, turns: Turns) -> None:
        self._peer = peer
        self._settings = settings
        self._turns = turns
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._tokens_left = 0
        """Of the stream under way."""
        self.link: MockLink | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports do not subclass asyncio's
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.link is not None:
            self.link.close()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self.link is not None:
            self.link.received(data)
            return
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            if b"\r\nupgrade: websocket" in head:
                self.link = MockLink(self, self._transport, self._settings, _welcome(self._peer, self._settings))
                self.link.received(self._buffer)
                self._buffer = b""
                return
            length = _content_length(head)
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if path not in (b"/v1/completions", b"/v1/chat/completions"):
            self._transport.write(_whole(_MODELS if path == b"/v1/models" else b"{}"))
            return
        wanted = _body.decode(body)
        if wanted.stream:
            self._tokens_left = wanted.max_tokens
            self._transport.write(_STREAM_HEAD)
            self._turns.wake(self)
        else:
            self._transport.write(_answer_of(wanted.max_tokens))

    def woken(self) -> None:
        """The link has open requests."""
        self._turns.wake(self)

    def step(self) -> bool:
        """One token for each open request; False: nothing is open any more."""
        if self._transport is None:
            return False
        if self.link is not None:
            return self.link.step()
        if self._tokens_left > 0:
            self._tokens_left -= 1
            self._transport.write(_CHUNK if self._tokens_left else _CHUNK + _LAST_CHUNK)
        return self._tokens_left > 0


class MockLink:
    """The worker's end of a link."""

    def __init__(self, connection: MockConnection, transport: asyncio.Transport, settings: MockSettings, welcome: Welcome) -> None:
        self._connection = connection
        self._transport = transport
        self._welcome = welcome
        self._websocket = ServerProtocol(max_size=MAX_FRAME_NBYTES)
        self._encode = worker_codec().encode
        self._decode = router_codec().decode
        self._unsent: list[bytes] = []
        self._live: dict[AttemptId, int] = {}
        """Tokens left of each open attempt."""
        self._token_ids = count()
        self._seq = count(1)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        return len(self._live)

    def close(self) -> None:
        self._live.clear()
        if self._timer is not None:
            self._timer.cancel()

    def received(self, data: bytes) -> None:
        self._websocket.receive_data(data)
        for event in self._websocket.events_received():
            if isinstance(event, Request):
                self._websocket.send_response(self._websocket.accept(event))
                self._queue(self._welcome)
                self._report()
            elif isinstance(event, WebSocketFrame) and event.opcode is Opcode.BINARY:
                self._handle(self._decode(event.data))
        self._flush()

    def step(self) -> bool:
        outputs: list[TokenOutput] = []
        token_id = FIRST_TOKEN_ID + next(self._token_ids) % NUM_TOKEN_IDS
        ended: list[AttemptId] = []
        for attempt_id, left in self._live.items():
            if left > 1:
                outputs.append(TokenOutput(attempt_id, token_id))
                self._live[attempt_id] = left - 1
            else:
                outputs.append(TokenOutput(attempt_id, token_id, FinishReason.LENGTH))
                ended.append(attempt_id)
        for attempt_id in ended:
            del self._live[attempt_id]
        if outputs:
            self._queue(Step(tuple(outputs)))
            self._flush()
        return bool(self._live)

    def _handle(self, frame: object) -> None:
        match frame:
            case Open():
                self._live[frame.attempt_id] = frame.sampling.max_tokens
                self._queue(Reserved(frame.attempt_id, None, 0))
                self._connection.woken()
            case Cancel(attempt_id):
                self._live.pop(attempt_id, None)
                self._queue(Closed(attempt_id))
            case Peers():
                self._queue(PeerStatus(()))
            case Ping(nonce):
                self._queue(Pong(nonce))

    def _report(self) -> None:
        blocks = BlockCounts(_NUM_BLOCKS, _NUM_BLOCKS, 0, 0, 0)
        self._queue(Load(next(self._seq), Role.BOTH, False, blocks, 0, len(self._live), 0, 0, 0))
        self._flush()
        self._timer = self._loop.call_later(LOAD_INTERVAL_S, self._report)

    def _queue(self, frame: WorkerFrame) -> None:
        self._unsent += self._websocket.data_to_send()
        self._unsent.append(wrap_bare(self._encode(frame)))

    def _flush(self) -> None:
        data = b"".join([*self._unsent, *self._websocket.data_to_send()])
        self._unsent.clear()
        if data:
            self._transport.write(data)


def _welcome(peer: PeerId, settings: MockSettings) -> Welcome:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, num_blocks=_NUM_BLOCKS, dtype=KVDtype.BFLOAT16)
    info = PeerInfo(peer, Role.BOTH, PROTOCOL_VERSION, "mock", layout, "loopback", (b"",))
    return Welcome(info, "mock", _MAX_MODEL_LEN, settings.vocab_size, (0,), os.getpid(), ())


def _content_length(head: bytes) -> int:
    _, found, rest = head.partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _answer_of(num_tokens: int) -> bytes:
    usage = {"prompt_tokens": 8, "completion_tokens": num_tokens, "total_tokens": 8 + num_tokens}
    choice = {"index": 0, "text": " tok" * num_tokens, "logprobs": None, "finish_reason": "length"}
    answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "mock", "choices": [choice], "usage": usage}
    return _whole(json.dumps(answer).encode())


async def serve(settings: MockSettings) -> None:
    """Until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    turns = Turns(settings.interval_s)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    ports: list[int] = []
    servers: list[asyncio.Server] = []
    for index in range(settings.num_workers):
        peer = PeerId(WorkerId(f"mock-{index}"), Incarnation(new_incarnation()))
        server = await loop.create_server(lambda peer=peer: MockConnection(peer, settings, turns), "127.0.0.1", 0, backlog=4096)  # type: ignore[misc]
        servers.append(server)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"ports": ports}), flush=True)
    await stop.wait()
    for server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    given = parser.parse_args()
    uvloop.run(serve(MockSettings(given.workers, given.vocab_size, given.interval_ms / 1e3)))


if __name__ == "__main__":
    main()
