"""A tiny OpenAI-compatible server in a thread: streams as many tokens as asked for, or misbehaves as told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MODEL = "stub"


@dataclass
class Stub:
    """`bodies`: of every POST, in order."""

    status: int = 200
    error: str = "no"
    refused_field: str = ""
    cut_after: int = -1
    """Tokens after which the connection is closed; -1: never."""
    error_after: int = -1
    """Tokens after which an error event ends the stream."""
    num_cached: int | None = None
    has_models: bool = True
    content_type: str = "text/event-stream"
    url: str = ""
    bodies: list[dict[str, object]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = dict(line.lower().split(": ", 1) for line in head.decode().splitlines()[1:] if ": " in line)
                self.keys.append(headers.get("authorization", ""))
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if head.startswith(b"GET"):
                    models = [{"id": MODEL, "object": "model"}] if self.has_models else []
                    _whole(writer, 200, {"object": "list", "data": models})
                elif not self._post(writer, json.loads(body)):
                    break
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _post(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> bool:
        """False: the connection is cut."""
        self.bodies.append(body)
        if self.status != 200:
            _whole(writer, self.status, {"error": {"message": self.error}})
            return True
        if self.refused_field in body:
            _whole(writer, 400, {"error": {"message": f"unknown field {self.refused_field}"}})
            return True
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {self.content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        num_tokens = int(str(body["max_tokens"]))
        for index in range(num_tokens):
            if index == self.cut_after:
                return False
            if index == self.error_after:
                _event(writer, {"error": {"message": "the worker was lost"}})
                break
            _event(writer, self._token(body))
        else:
            _event(writer, {"choices": [{"index": 0, "text": "", "delta": {}, "logprobs": None, "finish_reason": "length"}]})
            usage: dict[str, object] = {"prompt_tokens": len(str(body.get("prompt", ""))), "completion_tokens": num_tokens}
            if self.num_cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached}
            _event(writer, {"choices": [], "usage": usage})
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _token(self, body: dict[str, object]) -> dict[str, object]:
        """Without text, as one that ends inside a character: only its log-probability tells of it."""
        if "messages" in body:
            return {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        logprobs = {"tokens": ["?"], "token_logprobs": [-1.0]} if "logprobs" in body else None
        return {"choices": [{"index": 0, "text": "", "logprobs": logprobs, "finish_reason": None}]}


def _event(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    """In two pieces: what arrives is not always whole."""
    data = f"data: {json.dumps(event)}\n\n".encode()
    _chunk(writer, data[:9])
    _chunk(writer, data[9:])


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(stub.answer, "127.0.0.1", 0), loop).result()
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        asyncio.run_coroutine_threadsafe(_close(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(server: asyncio.Server) -> None:
    """And the connections that clients left open."""
    server.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
