"""What the router costs: requests and streams through it to a mock worker that answers at once, against the same answers served directly.

    python -m tests.bench.router_throughput [--seconds 3] [--tokens 16] [--concurrency 1 32]

Three processes on this machine (client, router, worker). `direct` is an HTTP server that answers every request with one prepared body:
the floor that client and kernel set. Figures move with the load of others: compare only what one run prints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY, socket

import psutil
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from pd_serve.config import Config, EngineConfig, ModelConfig, RouterConfig
from pd_serve.ids import AttemptId
from pd_serve.protocol.link import FinishReason, Open, Role, Step, TokenOutput, router_codec, worker_codec
from router.main import create_app
from router.tokenizer import FolderTokenizer
from tests.fakes import block_counts, load, loopback_listener, peer_id, peer_info, welcome, write_tokenizer

ANSWER = b'{"id":"x","choices":[{"text":"hello world, this"}]}'


def serve(app: object, listener: socket, ws: str = "none") -> None:
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", ws=ws, ws_per_message_deflate=False, log_config=None, access_log=False, proxy_headers=False
    )  # type: ignore[arg-type]
    uvicorn.Server(config).run([listener])


class StepWorker:
    """As a real worker speaks: each turn one frame with one token for every open request; no model, no waiting."""

    def __init__(self) -> None:
        peer = peer_id()
        self._first = (welcome(peer_info(peer, Role.BOTH)), load(Role.BOTH, block_counts(1_000_000)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            return
        await receive()
        await send({"type": "websocket.accept"})
        encode, decode = worker_codec().encode, router_codec().decode
        live: dict[AttemptId, int] = {}
        wake = asyncio.Event()

        async def step() -> None:
            for frame in self._first:
                await send({"type": "websocket.send", "bytes": encode(frame)})
            while True:
                if not live:
                    wake.clear()
                    await asyncio.wait((asyncio.ensure_future(wake.wait()),), timeout=0.5)
                outputs = []
                for attempt_id, left in list(live.items()):
                    outputs.append(TokenOutput(attempt_id, 100, None if left > 1 else FinishReason.LENGTH))
                    live[attempt_id] = left - 1
                    if left == 1:
                        del live[attempt_id]
                frame = Step(tuple(outputs)) if outputs else self._first[1]
                await send({"type": "websocket.send", "bytes": encode(frame)})
                await asyncio.sleep(0)

        task = asyncio.create_task(step())
        while (message := await receive())["type"] == "websocket.receive":
            frame = decode(message["bytes"])
            if isinstance(frame, Open):
                live[frame.attempt_id] = frame.sampling.max_tokens
                wake.set()
        task.cancel()


def run_worker(listener: socket) -> None:
    serve(StepWorker(), listener, "websockets-sansio")


def run_router(listener: socket, worker: str, folder: Path) -> None:
    config = Config(
        model=ModelConfig(name="tiny"),
        router=RouterConfig(workers=(worker,)),
        engine=EngineConfig(max_batch_tokens=100_000, max_running=4096),
    )
    serve(create_app(config, FolderTokenizer(folder)), listener)


def run_direct(listener: socket) -> None:
    async def app(scope: dict[str, str], receive: Callable[[], Awaitable[object]], send: Callable[[object], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})  # type: ignore[index]
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(ANSWER)).encode())]})
        await send({"type": "http.response.body", "body": ANSWER})

    serve(app, listener)


async def one_client(port: int, body: bytes, latencies: list[float], until: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        if b"content-length" in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        else:
            await reader.readuntil(b"0\r\n\r\n")
        latencies.append(time.perf_counter() - began)
    writer.close()


async def measure(port: int, body: bytes, concurrency: int, seconds: float) -> tuple[int, float, float]:
    """Requests, requests per second, and the median latency in ms."""
    latencies: list[float] = []
    began = time.perf_counter()
    await asyncio.gather(*(one_client(port, body, latencies, began + seconds) for _ in range(concurrency)))
    return len(latencies), len(latencies) / (time.perf_counter() - began), sorted(latencies)[len(latencies) // 2] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    folder = write_tokenizer(Path(tempfile.mkdtemp()) / "model")
    listeners = [loopback_listener() for _ in range(3)]
    worker, router, direct = (listener.getsockname()[1] for listener in listeners)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_worker, args=(listeners[0],)),
        context.Process(target=run_router, args=(listeners[1], f"http://127.0.0.1:{worker}", folder)),
        context.Process(target=run_direct, args=(listeners[2],)),
    ]
    for process in processes:
        process.start()
    try:
        time.sleep(3)
        fields = {"model": "tiny", "prompt": "hello there", "max_tokens": arguments.tokens, "temperature": 0}
        whole, stream = json.dumps(fields).encode(), json.dumps({**fields, "stream": True}).encode()
        print(f"load of the machine before: {os.getloadavg()[0]:.2f}; {arguments.tokens} tokens per request")
        for concurrency in arguments.concurrency:
            for name, port, body in (("direct", direct, whole), ("router", router, whole), ("router, streamed", router, stream)):
                cpu_s = [sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes[:2]]
                count, rate, p50 = uvloop.run(measure(port, body, concurrency, arguments.seconds))
                used = [
                    sum(psutil.Process(process.pid).cpu_times()[:2]) - before for process, before in zip(processes, cpu_s, strict=False)
                ]
                shares = ", ".join(f"{name} {1e6 * cpu / count:.0f}" for name, cpu in zip(("worker", "router"), used, strict=True))
                print(f"c={concurrency:<4} {name:18} {rate:9.0f} /s   p50 {p50:7.3f} ms   CPU us/request: {shares}", flush=True)
    finally:
        for process in processes:
            process.terminate()
            process.join()


if __name__ == "__main__":
    main()
