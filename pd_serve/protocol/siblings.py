"""What the processes of one router say to each other, by way of the supervisor that started them: over a socket pair each, inherited.

    WorkerRegistered   a worker registered at one process; the supervisor tells the others, and every process that starts later
    WorkerAdded, WorkerRemoved   an operator's word reached one process; told to the others and to every process that starts later, as above
    Question       one process asks all others; the supervisor passes it on under a number of its own
    Answer         of each, to the supervisor                     Answers   all together, to the one that asked
    Listening      a process takes requests

A stream of frames as in length_prefix.py. A process whose stream ends has ended, or its supervisor has.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from enum import Enum

from pd_serve.length_prefix import payloads, prefixed
from pd_serve.protocol.frame import Frame
from pd_serve.wire import Codec


class Topic(Enum):
    METRICS = "metrics"
    """The process's metrics, in Prometheus' text format."""
    READY = "ready"
    """Why it could serve no request now; empty: it could."""
    REQUESTS = "requests"
    """RecentRequests as JSON."""


class Listening(Frame, frozen=True, tag="listening"):
    pass


class WorkerRegistered(Frame, frozen=True, tag="worker_registered"):
    registration: bytes
    """RegisterWorker as JSON."""


class WorkerAdded(Frame, frozen=True, tag="worker_added"):
    address: str


class WorkerRemoved(Frame, frozen=True, tag="worker_removed"):
    worker_id: str
    """Empty: nobody had answered at the address."""
    incarnation: int
    address: str
    force: bool


class Question(Frame, frozen=True, tag="question"):
    question_id: int
    topic: Topic


class Answer(Frame, frozen=True, tag="answer"):
    question_id: int
    data: bytes


class Answers(Frame, frozen=True, tag="answers"):
    question_id: int
    data: tuple[bytes, ...]
    num_silent: int
    """Processes that did not answer in time."""


FleetChange = WorkerAdded | WorkerRemoved
SiblingFrame = Listening | WorkerRegistered | FleetChange | Question | Answer | Answers


class SiblingStream:
    """One end of a socket pair. Owned by an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._codec: Codec[SiblingFrame] = Codec(SiblingFrame)

    @classmethod
    async def over(cls, end: socket.socket) -> SiblingStream:
        """Takes the socket over."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, frame: SiblingFrame) -> None:
        """Queue a frame; lost without a word when the other end is gone: its end is noticed by `frames`."""
        if not self._writer.is_closing():
            self._writer.write(prefixed(self._codec.encode(frame)))

    async def frames(self) -> AsyncIterator[SiblingFrame]:
        """Until the other end closes. Raises ProtocolError on bytes that are no frame."""
        async for payload in payloads(self._reader, "the other end"):
            yield self._codec.decode(payload)

    def close(self) -> None:
        """Idempotent."""
        self._writer.close()
