"""A worker without a model: speaks the link over a real socket and answers from a script, well or badly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from starlette.types import Receive, Scope, Send

from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.protocol.control import WORKER_TRACES_PATH
from pd_serve.protocol.link import (
    BlockCounts,
    Cancel,
    Closed,
    Failed,
    FailureReason,
    FinishReason,
    Lease,
    Load,
    Open,
    Peers,
    PeerStatus,
    Prefill,
    PrefillDone,
    RefusalReason,
    Refused,
    Reserved,
    Role,
    RouterFrame,
    Step,
    Target,
    TokenOutput,
    Welcome,
    WorkerFrame,
    router_codec,
    worker_codec,
)
from pd_serve.protocol.sampling import TokenLogprobs
from tests.fakes import byte_ids, joined, load, loopback_listener, peer_id, peer_info, serving, welcome


@dataclass
class Script:
    """How a mock worker behaves. `reply` gives the tokens of the whole answer from the original prompt."""

    reply: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda prompt: byte_ids("hello world, this is a long answer")
    eos_after: bool = True
    """The reply ends with the end-of-sequence token; otherwise it is repeated for as long as asked."""
    interval_s: float = 0.0
    refuse: RefusalReason | None = None
    capacity: int = 0
    """Attempts above which a worker refuses for want of room; 0: none."""
    fail_after: int = -1
    """Tokens after which every attempt fails (ENGINE); -1: never."""
    stall_after: int = -1
    """Tokens after which nothing comes any more; -1: never."""
    close_after: int = -1
    """Tokens after which the link is cut; -1: never."""
    num_cached_tokens: int = 0
    logprobs: bool = False
    prefill_delay_s: float = 0.0
    prefill_s_per_token: float = 0.0
    """Prompts are computed one after the other."""
    fail_prefill: FailureReason | None = None
    lost_records: int = 0
    """Prompts that are computed, but of which decode never hears."""


class Board:
    """Where mock prefill workers leave what decode workers wait for: the KV transfer between processes."""

    def __init__(self) -> None:
        self._arrived: dict[int, asyncio.Event] = {}

    def arrived(self, attempt_id: int) -> asyncio.Event:
        return self._arrived.setdefault(attempt_id, asyncio.Event())


@dataclass
class MockWorker:
    info: Welcome
    script: Script = field(default_factory=Script)
    board: Board = field(default_factory=Board)
    blocks: BlockCounts | None = None
    received: list[RouterFrame] = field(default_factory=list)
    received_at: list[float] = field(default_factory=list)
    """Monotonic seconds, of each."""
    traces: Callable[[MockWorker], bytes] | None = None
    """What it answers to GET /control/traces; None: 404."""
    control_headers: list[dict[str, str]] = field(default_factory=list)
    """Of each control call."""
    open_attempts: set[int] = field(default_factory=set)
    is_silent: bool = False
    is_draining: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    num_links: int = 0
    _send_frames: Callable[[tuple[WorkerFrame, ...]], None] | None = None
    _close: Callable[[], None] | None = None
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _engine: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def role(self) -> Role:
        return self.info.info.role

    def current_load(self) -> Load:
        frame = load(self.role, self.blocks, draining=self.is_draining)
        return msgspec.structs.replace(frame, running=len(self.open_attempts))

    def report(self) -> None:
        """Send a Load now."""
        self.send(self.current_load())

    def send(self, *frames: WorkerFrame) -> None:
        if self._send_frames is not None and not self.is_silent:
            self._send_frames(frames)

    def cut(self) -> None:
        """End the link, as a dying worker does."""
        if self._close is not None:
            self._close()

    def of(self, kind: type) -> list[RouterFrame]:
        return [frame for frame in self.received if isinstance(frame, kind)]

    # ---- ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            self.control_headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
            body = self.traces(self) if self.traces is not None and scope["path"] == WORKER_TRACES_PATH else None
            await send({"type": "http.response.start", "status": 404 if body is None else 200, "headers": []})
            await send({"type": "http.response.body", "body": body or b""})
            return
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        await receive()
        await send({"type": "websocket.accept"})
        self.num_links += 1
        outbox: asyncio.Queue[tuple[WorkerFrame, ...] | None] = asyncio.Queue()
        self._send_frames, self._close = outbox.put_nowait, lambda: outbox.put_nowait(None)
        outbox.put_nowait((self.info, self.current_load()))
        sender = asyncio.create_task(self._sender(outbox, send))
        heart = asyncio.create_task(self._heart())
        reader = asyncio.create_task(self._reader(receive))
        await asyncio.wait((sender, reader), return_when=asyncio.FIRST_COMPLETED)
        for task in (sender, reader, heart, *self._tasks.values()):
            task.cancel()
        self._send_frames = self._close = None
        self._tasks.clear()
        self.open_attempts.clear()

    async def _sender(self, outbox: asyncio.Queue[tuple[WorkerFrame, ...] | None], send: Send) -> None:
        codec = worker_codec()
        while (frames := await outbox.get()) is not None:
            for frame in frames:
                await send({"type": "websocket.send", "bytes": codec.encode(frame)})
        await send({"type": "websocket.close", "code": 1001})

    async def _heart(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.report()

    async def _reader(self, receive: Receive) -> None:
        codec = router_codec()
        while (message := await receive())["type"] == "websocket.receive":
            self._handle(codec.decode(message["bytes"]))

    def _handle(self, frame: RouterFrame) -> None:
        self.received.append(frame)
        self.received_at.append(time.monotonic())
        match frame:
            case Peers(peers=peers):
                mine = self.info.info.peer
                self.send(PeerStatus(tuple(joined(info.peer) for info in peers if info.peer != mine)))
            case Open():
                self._begin(frame.attempt_id, self._decode(frame))
            case Prefill():
                self._begin(frame.attempt_id, self._prefill(frame))
            case Cancel(attempt_id=attempt_id):
                task = self._tasks.pop(attempt_id, None)
                if task is not None:
                    task.cancel()
                self.open_attempts.discard(attempt_id)
                self.send(Closed(attempt_id))

    def _begin(self, attempt_id: AttemptId, life: Coroutine[None, None, None]) -> None:
        self.open_attempts.add(attempt_id)
        self._tasks[attempt_id] = asyncio.create_task(life)

    async def _prefill(self, frame: Prefill) -> None:
        if self.script.prefill_delay_s:
            await asyncio.sleep(self.script.prefill_delay_s)
        if self.script.prefill_s_per_token:
            async with self._engine:
                await asyncio.sleep(self.script.prefill_s_per_token * len(frame.token_ids))
        self.open_attempts.discard(frame.attempt_id)
        if self.script.fail_prefill is not None:
            self.send(Failed(frame.attempt_id, self.script.fail_prefill, "scripted"))
            return
        if self.script.lost_records:
            self.script.lost_records -= 1
        else:
            self.board.arrived(frame.attempt_id).set()
        self.send(PrefillDone(frame.attempt_id, len(frame.token_ids), 0))

    async def _decode(self, frame: Open) -> None:
        attempt, script = frame.attempt_id, self.script
        is_full = 0 < script.capacity < len(self.open_attempts)
        if script.refuse is not None or is_full:
            self.open_attempts.discard(attempt)
            self.send(Refused(attempt, script.refuse or RefusalReason.NO_CAPACITY, "scripted"))
            return
        if frame.writer is None:
            self.send(Reserved(attempt, None, script.num_cached_tokens))
        else:
            lease = Lease(LeaseId(attempt % 2**31), Epoch(1), self.info.info.peer)
            self.send(Reserved(attempt, Target(lease, (0,), 0), 0))
            await self.board.arrived(attempt).wait()
        for token in self._outputs(frame):
            count = token[0]
            if count == script.fail_after:
                self.open_attempts.discard(attempt)
                self.send(Failed(attempt, FailureReason.ENGINE, "scripted"))
                return
            if count == script.stall_after:
                await asyncio.Event().wait()
            if count == script.close_after:
                self.cut()
                return
            self.send(Step((token[1],)))
            if script.interval_s:
                await asyncio.sleep(script.interval_s)
        self.open_attempts.discard(attempt)

    def _outputs(self, frame: Open) -> list[tuple[int, TokenOutput]]:
        """(tokens sent before it in this attempt, token) of what is left of the answer."""
        script, sampling = self.script, frame.sampling
        prompt = frame.token_ids[: len(frame.token_ids) - frame.num_output_tokens]
        reply = script.reply(prompt)
        if script.eos_after:
            reply = (*reply, 0)
        total = frame.num_output_tokens + sampling.max_tokens
        answer = (reply * (total // len(reply) + 1))[frame.num_output_tokens : total]
        outputs: list[tuple[int, TokenOutput]] = []
        for count, token_id in enumerate(answer):
            is_stop = (token_id == 0 and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
            finish = FinishReason.STOP if is_stop else FinishReason.LENGTH if count + 1 == sampling.max_tokens else None
            logprobs = scripted_logprobs(token_id, sampling.num_logprobs) if sampling.num_logprobs >= 0 else None
            cached = script.num_cached_tokens if count == 0 else -1
            outputs.append((count, TokenOutput(frame.attempt_id, token_id, finish, logprobs, cached)))
            if finish is not None:
                break
        return outputs


def scripted_logprobs(token_id: int, num: int) -> TokenLogprobs:
    top_ids = tuple((token_id + shift) % 260 for shift in range(num))
    return TokenLogprobs(-0.25, top_ids, tuple(-0.25 - shift for shift in range(num)))


def mock_worker(
    name: str = "decode-0", role: Role = Role.DECODE, incarnation: int = 1, script: Script | None = None, board: Board | None = None
) -> MockWorker:
    info = peer_info(peer_id(name, incarnation), role)
    return MockWorker(welcome(info), script or Script(), board or Board())


@asynccontextmanager
async def running(worker: MockWorker, port: int = 0) -> AsyncIterator[str]:
    """Its address."""
    async with serving(worker, loopback_listener(port), lifespan="off") as address:
        yield address
