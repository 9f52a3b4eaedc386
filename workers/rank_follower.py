"""A rank beside rank 0: computes its share of every batch and moves its share of the KV, and decides nothing.

    rank 0's socket ---+-> engine thread (RunStep)          transport, engine -> rank 0's socket
                       +-> transport thread (everything about peers, windows, pushes)

Owned by the rank's main thread. Commands reach each thread in rank 0's order. It ends with rank 0: Stop (0), or the end of the socket (1).
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from dataclasses import replace

from pd_serve.clock import MonotonicClock
from pd_serve.protocol.link import Fatal, Stop
from workers.engine_thread import EngineFailed
from workers.events import StepDone, StepFailed, TransportReported
from workers.inbox import Inbox
from workers.rank_frames import Alive, FollowerReady, LeaderFrame, LeaderSocket, RunStep
from workers.rank_spec import RankSpec
from workers.rank_start import OpenRank, RankMessage, open_rank
from workers.rank_step import StepThreads
from workers.transport_commands import TransportFailed

_log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0


def connect_leader(spec: RankSpec) -> LeaderSocket:
    (descriptor,) = spec.group_fds
    return LeaderSocket(socket.socket(fileno=descriptor))


class Follower:
    """run() once."""

    def __init__(self, spec: RankSpec, leader: LeaderSocket) -> None:
        self._spec = spec
        self._leader = leader
        self._inbox: Inbox[RankMessage] = Inbox()
        self._exit_code: int | None = None

    def run(self) -> int:
        """The exit code. Raises PdServeError where the rank cannot start, ProtocolError when rank 0 sends nonsense."""
        rank = open_rank(self._spec, self._inbox.put)
        step = StepThreads(rank.engine, rank.transport, self._spec.config.transport.push_bytes)
        self._leader.send(FollowerReady(rank.ready.metadata, os.getpid()))
        clock, interval_s = MonotonicClock(), self._spec.config.worker.report_interval_s
        alive_at = clock.now()
        with selectors.DefaultSelector() as selector:
            selector.register(self._inbox, selectors.EVENT_READ)
            selector.register(self._leader, selectors.EVENT_READ)
            writing = False
            while self._exit_code is None:
                if clock.now() >= alive_at:
                    self._leader.send(Alive())
                    alive_at = clock.now() + interval_s
                self._leader.flush()
                if writing != self._leader.has_unsent:
                    writing = self._leader.has_unsent
                    selector.modify(self._leader, selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0))
                selector.select(max(0.0, alive_at - clock.now()))
                self._turn(rank, step)
        self._leader.flush_for(LAST_WORDS_S)
        rank.stop()
        return self._exit_code

    def _turn(self, rank: OpenRank, step: StepThreads) -> None:
        for message in self._inbox.take_all():
            self._on_message(step, message)
        for frame in self._leader.receive():
            self._on_frame(rank, step, frame)
        if self._leader.closed and self._exit_code is None:
            _log.error("rank 0 has closed its socket; exiting")
            self._exit_code = 1

    def _on_message(self, step: StepThreads, message: RankMessage) -> None:
        match message:
            case TransportFailed(detail):
                self._die(f"the transport thread failed: {detail}")
            case EngineFailed(detail):
                self._die(f"the engine failed: {detail}")
            case StepDone(result):
                step.end(result.step_id)
                # What was sampled is rank 0's to say.
                self._leader.send(StepDone(replace(result, sampled=())))
            case StepFailed(step_id, _):
                step.end(step_id)
                self._leader.send(message)
            case TransportReported(event):
                self._leader.send(event)
            case _:
                self._leader.send(message)

    def _on_frame(self, rank: OpenRank, step: StepThreads, frame: LeaderFrame) -> None:
        match frame:
            case RunStep(batch, pushes):
                step.begin(batch, pushes)
            case Stop():
                self._exit_code = 0
            case _:
                rank.transport.submit(frame)

    def _die(self, message: str) -> None:
        _log.error("%s", message)
        self._leader.send(Fatal(message))
        self._exit_code = 1
