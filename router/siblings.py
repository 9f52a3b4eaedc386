"""The other processes of this router, as one of them sees them. Absent (None in Services) where the router is one process.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.siblings import (
    Answer,
    Answers,
    FleetChange,
    Listening,
    Question,
    SiblingStream,
    Topic,
    WorkerAdded,
    WorkerRegistered,
    WorkerRemoved,
)
from router.occupancy import Occupancy, OwnOccupancy

ANSWER_TIMEOUT_S = 3.0
"""Longer than the supervisor waits for the others (supervisor.ANSWER_TIMEOUT_S)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of a process in its router; by default it is the only one."""

    occupancy: Occupancy = field(default_factory=OwnOccupancy)
    to_supervisor: socket.socket | None = None
    index: int = 0
    """What one process must do for all is done by the first."""


class Siblings:
    """run() while the process serves; what it is asked is answered by `answers`, what workers and operators said to another is told to
    `on_worker` and `on_fleet`."""

    def __init__(self, stream: SiblingStream) -> None:
        self._stream = stream
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answers]] = {}

    def listening(self) -> None:
        """This process takes requests now."""
        self._stream.send(Listening())

    def registered(self, worker: RegisterWorker) -> None:
        """A worker has registered here: the others shall know it."""
        self._stream.send(WorkerRegistered(worker.model_dump_json().encode()))

    def fleet_changed(self, change: FleetChange) -> None:
        """An operator has spoken to this process: the others shall do the same."""
        self._stream.send(change)

    async def ask(self, topic: Topic) -> Answers:
        """Of all other processes. Those that do not answer in time are counted in `num_silent`, at least one if the supervisor does not."""
        question_id = next(self._ids)
        asked = self._asked[question_id] = asyncio.get_running_loop().create_future()
        self._stream.send(Question(question_id, topic))
        try:
            return await asyncio.wait_for(asked, ANSWER_TIMEOUT_S)
        except TimeoutError:
            return Answers(question_id, (), 1)
        finally:
            del self._asked[question_id]

    async def run(
        self,
        answers: Mapping[Topic, Callable[[], bytes]],
        on_worker: Callable[[RegisterWorker], None],
        on_fleet: Callable[[FleetChange], None],
    ) -> None:
        """Until the supervisor's end closes. Raises ProtocolError."""
        async for frame in self._stream.frames():
            match frame:
                case WorkerRegistered(registration):
                    try:
                        on_worker(RegisterWorker.model_validate_json(registration))
                    except ValidationError:
                        continue  # of another version of this program: it will register here as well
                case WorkerAdded() | WorkerRemoved():
                    on_fleet(frame)
                case Question(question_id, topic):
                    self._stream.send(Answer(question_id, answers[topic]()))
                case Answers(question_id):
                    asked = self._asked.get(question_id)
                    if asked is not None and not asked.done():
                        asked.set_result(frame)
                case Listening() | Answer():
                    continue  # said by processes, not to them

    def close(self) -> None:
        self._stream.close()
