"""Rank 0's main thread: turns what its front, transport, engine and the other ranks say into events, and carries out what the
WorkerMachine decides.

    front socket ---+                                              +-> engine thread (RunBatch)
    transport ------+                                              +-> front socket (frames to routers)
    engine thread --+-> RankGroup -> WorkerMachine -> RankGroup ---+-> transport thread (everything about peers, windows, pushes)
    other ranks ----+                                              +-> other ranks, the same for their transports, and every batch

Thin on purpose: no decision is made here but when to report and when to end. The loop sleeps until something arrives, the machine's next
deadline, or the next report. A worker is as whole as its ranks: the end of one is the end of all.
"""

from __future__ import annotations

import logging
import selectors
from collections.abc import Iterable
from dataclasses import dataclass

from pd_serve.clock import Clock
from pd_serve.engine.batch import Batch, without_grammars
from pd_serve.errors import ProtocolError
from pd_serve.protocol.link import (
    Drain,
    Fatal,
    FromRouter,
    FrontFrame,
    GetTrace,
    LinkDown,
    LinkUp,
    Load,
    Open,
    Prefill,
    Report,
    Sample,
    SetRole,
    Stop,
    ToRouter,
)
from pd_serve.protocol.traces import Traces
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from workers.attempt_log import AttemptLog
from workers.attempt_traces import AttemptTraces
from workers.engine_thread import EngineFailed, EngineThread
from workers.events import (
    Action,
    CloseWindow,
    DrainRequested,
    Event,
    FrameReceived,
    LinkClosed,
    LinkOpened,
    Observe,
    RoleSet,
    RunBatch,
    SendFrame,
    StepDone,
    StepFailed,
    Tick,
    TransportReported,
)
from workers.front_socket import FrontSocket
from workers.inbox import Inbox
from workers.machine import WorkerMachine
from workers.rank_frames import Alive, FollowerFrame, FollowerReady, FollowerSocket, RunStep
from workers.rank_group import RankGroup, RankOutput
from workers.rank_start import RankMessage
from workers.rank_step import StepThreads
from workers.samples import SampleBuffer
from workers.step_samples import step_samples
from workers.transport_commands import SamplesObserved, TransportFailed
from workers.transport_thread import TransportThread

_log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""Seconds that a front which does not read is waited for at the end."""

FAILED_STEP_S = 5.0
"""Seconds after one rank has failed a step in which the others must have ended it: else they wait for a sum that will never come."""
FROZEN_RANK_S = 30.0
"""Seconds of silence after which another rank is taken for frozen; it speaks at every report interval."""

_REPORT_SLACK = 0.1
"""Share of its interval by which a report may be early."""
_BUSY_REPORT_S = 0.5
"""Longest interval of a rank that has work: how old its metrics may be."""


@dataclass(frozen=True, slots=True)
class RankParts:
    """What a control loop drives. Started and stopped by the rank's main function, not here."""

    front: FrontSocket
    inbox: Inbox[RankMessage]
    engine: EngineThread
    transport: TransportThread
    group: RankGroup
    followers: tuple[FollowerSocket, ...] = ()
    """To the ranks 1, 2, ..."""
    num_traces: int = 16
    """Attempts whose passage is remembered."""
    push_nbytes: int = 0
    """Least bytes of one push, as in transport.push_bytes."""


class ControlLoop:
    """run() once, on the thread that owns the machine and the front socket."""

    def __init__(self, machine: WorkerMachine, parts: RankParts, report_interval_s: float, clock: Clock) -> None:
        self._machine = machine
        self._front = parts.front
        self._inbox = parts.inbox
        self._transport = parts.transport
        self._group = parts.group
        self._followers = parts.followers
        self._engine = parts.engine
        self._step = StepThreads(parts.engine, parts.transport, parts.push_nbytes)
        self._report_interval_s = report_interval_s
        self._clock = clock
        self._samples = SampleBuffer()
        self._attempts = AttemptTraces(parts.num_traces)
        self._attempt_log = AttemptLog()
        self._report_at = clock.now()
        self._was_idle = True
        self._running: Batch | None = None
        self._ended_at = 0.0
        """Of the last step, at this rank."""
        self._begun_after: float | None = None
        """As step_samples says, of the running step."""
        self._is_step_ending = False
        self._give_up_at: float | None = None
        self._heard_at = dict.fromkeys((follower.rank for follower in parts.followers), clock.now())
        self._exit_code: int | None = None

    def run(self) -> int:
        """Until Stop (0), the end of the front, or a thread's failure (1). Raises ProtocolError when the front sends nonsense."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._inbox, selectors.EVENT_READ)
            writing: dict[FrontSocket | FollowerSocket, bool] = dict.fromkeys((self._front, *self._followers), False)
            for connection in writing:
                selector.register(connection, selectors.EVENT_READ)
            while self._exit_code is None:
                for connection, was_writing in writing.items():
                    if was_writing != connection.has_unsent:
                        writing[connection] = connection.has_unsent
                        selector.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0))
                selector.select(self._sleep_s())
                self._turn()
        for follower in self._followers:
            follower.send(Stop())
            follower.flush()
        self._front.flush_for(LAST_WORDS_S)
        return self._exit_code

    def _turn(self) -> None:
        for message in self._inbox.take_all():
            self._on_message(message)
        for follower in self._followers:
            self._hear(follower)
        for frame in self._front.receive():
            self._on_frame(frame)
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= self._clock.now():
            self._handle(Tick())
        if self._followers:
            self._look_at_ranks()
        self._report_if_due()
        for follower in self._followers:
            follower.flush()
        self._front.flush()
        if self._front.closed and self._exit_code is None:
            _log.error("the front has closed its socket; exiting")
            self._exit_code = 1

    def _sleep_s(self) -> float:
        deadline = self._machine.next_deadline()
        until = min(time for time in (self._report_at, deadline, self._give_up_at) if time is not None)
        return max(0.0, until - self._clock.now())

    def _look_at_ranks(self) -> None:
        """A worker one of whose ranks cannot go on must end: nobody else would notice."""
        now = self._clock.now()
        if not self._group.is_step_failing:
            self._give_up_at = None
        elif self._give_up_at is None:
            self._give_up_at = now + FAILED_STEP_S
        elif now >= self._give_up_at:
            self._die("a rank has failed a step, and another has not ended it")
        limit_s = max(FROZEN_RANK_S, 3 * self._report_interval_s)
        for rank, heard_at in self._heard_at.items():
            if now > heard_at + limit_s and self._exit_code is None:
                self._die(f"rank {rank} has said nothing for {now - heard_at:.0f} s")

    # ---- what is said

    def _on_message(self, message: RankMessage) -> None:
        match message:
            case SamplesObserved(samples):
                self._samples.add(samples)
            case TransportFailed(detail):
                self._die(f"the transport thread failed: {detail}")
            case EngineFailed(detail):
                self._die(f"the engine failed: {detail}")
            case StepDone(result):
                batch, begun_after = self._running, self._begun_after
                assert batch is not None
                self._ended_at = result.ended_at
                self._step.end(result.step_id)
                self._on_output(0, message)
                self._samples.add(step_samples(result, batch, begun_after))
            case StepFailed(step_id, _):
                self._step.end(step_id)
                self._on_output(0, message)
            case _:
                self._on_output(0, message)

    def _on_output(self, rank: int, output: RankOutput) -> None:
        self._is_step_ending = isinstance(output, StepDone)
        for event in self._group.events(rank, output):
            self._handle(event)
        self._is_step_ending = False
        if strays := self._group.take_strays():
            _log.warning("dropped %d records that came from ranks which have no say in them", strays)
            self._samples.add((Sample("pd_serve_malformed_notices_total", float(strays)),))

    def _hear(self, follower: FollowerSocket) -> None:
        try:
            for frame in follower.receive():
                self._heard_at[follower.rank] = self._clock.now()
                self._on_follower_frame(follower.rank, frame)
        except ProtocolError as error:
            self._die(f"rank {follower.rank}: {error}")
        if follower.closed and self._exit_code is None:
            self._die(f"rank {follower.rank} has ended")

    def _on_follower_frame(self, rank: int, frame: FollowerFrame) -> None:
        match frame:
            case SamplesObserved(samples):
                self._samples.add(samples)
            case Fatal(message):
                self._die(f"rank {rank}: {message}")
            case Alive():
                pass
            case FollowerReady():
                self._die(f"rank {rank} has started twice")
            case PeerJoined() | PeerRefused() | PeerLost() | PeerFenced():
                self._on_output(rank, TransportReported(frame))
            case _:
                self._on_output(rank, frame)

    def _on_frame(self, frame: FrontFrame) -> None:
        match frame:
            case FromRouter(link_id, inner):
                if isinstance(inner, Open | Prefill) and inner.sampling.grammar is not None:
                    self._engine.expect(inner.sampling.grammar)
                self._handle(FrameReceived(link_id, inner))
            case LinkUp(link_id, router_id):
                self._handle(LinkOpened(link_id, router_id))
            case LinkDown(link_id):
                self._handle(LinkClosed(link_id))
            case Drain(deadline_s):
                self._handle(DrainRequested(deadline_s))
                self._report_at = self._clock.now()
            case SetRole(role, deadline_s):
                self._handle(RoleSet(role, deadline_s))
                self._report_at = self._clock.now()
            case GetTrace(limit):
                self._front.send(Traces(self._transport.recent_traces(limit), self._attempts.recent(limit)))
            case Stop():
                self._exit_code = 0

    # ---- what is done

    def _handle(self, event: Event) -> None:
        now = self._clock.now()
        actions = self._machine.handle(event, now)
        # First what others wait for: an idle processor has all of this to fetch from memory.
        self._carry_out(actions)
        self._attempts.observe(event, actions, now)
        self._attempt_log.observe(event, actions)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """In order, but a step that does not concern the transport first: until its batch has reached the engine thread, this one still has
        the interpreter and sends what clients wait for. A window that is closed waits for the end: nobody else does, and the transport
        thread, awake, would be in the way of both."""
        is_closing = False
        for action in sorted(actions, key=_is_behind):
            match action:
                case SendFrame(link_id, frame):
                    self._front.send(ToRouter(link_id, frame))
                    if not isinstance(frame, Load):
                        # A client waits for it: not until the other threads, which what follows wakes, have had the interpreter.
                        self._front.flush()
                case RunBatch():
                    self._run(action)
                case Observe(sample):
                    self._samples.add((sample,))
                case _:
                    for rank, command in self._group.commands(action):
                        if rank == 0:
                            self._transport.submit(command, is_urgent=not isinstance(command, CloseWindow))
                            is_closing |= isinstance(command, CloseWindow)
                        else:
                            self._followers[rank - 1].send(command)
        if is_closing:
            self._transport.wake()

    def _run(self, step: RunBatch) -> None:
        for follower in self._followers:
            follower.send(RunStep(without_grammars(step.batch), self._group.pushes(follower.rank, step.pushes)))
            follower.flush()
        self._step.begin(step.batch, self._group.pushes(0, step.pushes), self._group.completions(step.completions))
        self._running = step.batch
        self._begun_after = self._ended_at if self._is_step_ending else None

    def _report_if_due(self) -> None:
        """At every interval, and at once when a worker becomes idle: whoever drains it waits for that.

        Woken for something else shortly before, it is sent too: an idle worker wakes once for its report and its load.
        """
        now = self._clock.now()
        is_idle = self._machine.is_idle
        became_idle = is_idle and not self._was_idle
        if self._was_idle and not is_idle:
            self._report_at = min(self._report_at, now + _BUSY_REPORT_S)
        self._was_idle = is_idle
        if now < self._report_at - _REPORT_SLACK * self._report_interval_s and not became_idle:
            return
        self._report_at = now + (self._report_interval_s if is_idle else min(self._report_interval_s, _BUSY_REPORT_S))
        machine = self._machine
        self._front.send(Report(machine.load(), machine.peer_states(), machine.leases_by_state(), self._samples.take(), is_idle))

    def _die(self, message: str) -> None:
        _log.error("%s", message)
        self._front.send(Fatal(message))
        self._exit_code = 1


def _is_behind(action: Action) -> bool:
    return not isinstance(action, RunBatch) or bool(action.pushes or action.completions)
