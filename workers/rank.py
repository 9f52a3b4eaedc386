"""A rank process: one model, or one rank's share of it, on one device. `python -m workers.rank SETTINGS.json` (rank_spec.py), started by
its front.

    rank 0   read the settings, connect to the front -> open the rank (rank_start.py) -> wait for the other ranks -> RankReady
             -> control loop until Stop (exit 0); anything else that ends it is one line to the front (Fatal) and exit 1
    others   the same towards rank 0 (rank_follower.py)

Main thread: control (control_loop.py). It lets nothing but the front end it: Ctrl-C in a terminal is the front's to interpret.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pd_serve.clock import MonotonicClock
from pd_serve.engine.identity import identify
from pd_serve.engine.scheduler import SchedulerSettings
from pd_serve.errors import ConfigError, PdServeError, UnavailableError
from pd_serve.ids import new_epoch
from pd_serve.observe import setup_logging
from pd_serve.protocol.link import Fatal, PeerInfo, RankReady, Welcome
from pd_serve.wire import PROTOCOL_VERSION
from workers.control_loop import LAST_WORDS_S, ControlLoop, RankParts
from workers.front_socket import FrontSocket
from workers.inbox import Inbox
from workers.machine import WorkerMachine
from workers.rank_follower import Follower, connect_leader
from workers.rank_frames import Alive, FollowerReady, FollowerSocket, LeaderSocket
from workers.rank_group import RankGroup
from workers.rank_spec import RankSpec
from workers.rank_start import RankMessage, open_rank, secrets_of
from workers.settings import MachineSettings, pool_limited_len
from workers.transport_commands import TransportReady

if TYPE_CHECKING:
    from pd_serve.engine.loader import EnginePlan

_log = logging.getLogger("workers.rank")

FOLLOWERS_START_S = 600.0
"""Seconds that rank 0, itself ready, waits for the others: they read other parts of the same files."""


def main(arguments: list[str]) -> int:
    """The exit code. Everything that goes wrong is told in one line, to the front (or rank 0) where it can be reached, else to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(arguments) != 1:
        print("usage: python -m workers.rank SETTINGS.json", file=sys.stderr)
        return 2
    superior: FrontSocket | LeaderSocket
    try:
        spec = RankSpec.read(Path(arguments[0]))
        superior = connect_leader(spec) if spec.rank else FrontSocket.connect(spec.socket_path)
    except (ConfigError, OSError) as error:
        print(f"rank: {error}", file=sys.stderr)
        return 1
    observe = spec.config.observe
    name = f"{spec.worker_id}/rank{spec.rank or ''}"
    setup_logging(observe.log_level, observe.log_format, name, secrets_of(spec.config))
    try:
        return Follower(spec, superior).run() if isinstance(superior, LeaderSocket) else Rank(spec, superior).run()
    except PdServeError as error:
        message = str(error)
        _log.error("%s", message)
    except Exception as error:  # noqa: BLE001 - process root: told to the front, then the process ends
        message = f"internal error: {type(error).__name__}: {error}"
        _log.exception("the rank failed")
    superior.send(Fatal(message))
    superior.flush_for(LAST_WORDS_S)
    return 1


class Rank:
    """Everything of rank 0, in order of its making. run() once."""

    def __init__(self, spec: RankSpec, front: FrontSocket) -> None:
        self._spec = spec
        self._config = spec.config
        self._inbox: Inbox[RankMessage] = Inbox()
        self._front = front

    def run(self) -> int:
        """The exit code. Raises PdServeError where the worker cannot start."""
        sockets = tuple(FollowerSocket(socket.socket(fileno=fd), rank) for rank, fd in enumerate(self._spec.group_fds, start=1))
        rank = open_rank(self._spec, self._inbox.put)
        clock = MonotonicClock()
        followers = _wait_for(sockets, clock)
        welcome = self._welcome(rank.plan, rank.ready, followers)
        machine = self._machine(rank.plan, welcome)
        group = RankGroup(welcome.info.num_ranks, welcome.info.num_model_kv_heads)
        num_traces = self._config.observe.trace_requests
        push_nbytes = self._config.transport.push_bytes
        parts = RankParts(self._front, self._inbox, rank.engine, rank.transport, group, sockets, num_traces, push_nbytes)
        loop = ControlLoop(machine, parts, self._config.worker.report_interval_s, clock)
        self._front.send(RankReady(welcome))
        code = loop.run()
        rank.stop()
        return code

    def _welcome(self, plan: EnginePlan, ready: TransportReady, followers: tuple[FollowerReady, ...]) -> Welcome:
        model = self._config.model
        name = model.name or model.id.rstrip("/").rpartition("/")[2]
        return Welcome(
            info=PeerInfo(
                peer=self._spec.peer,
                role=self._spec.role,
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint=plan.info.fingerprint,
                layout=plan.layout,
                transport=self._config.transport.name,
                transport_metadata=(ready.metadata, *(follower.metadata for follower in followers)),
                total_kv_heads=plan.info.kv_shape.num_heads,
                model=identify(name, plan.path, plan.info),
            ),
            model_name=name,
            max_model_len=pool_limited_len(plan.layout, plan.max_len, plan.num_idle_blocks),
            vocab_size=plan.info.vocab_size,
            eos_token_ids=plan.info.eos_token_ids,
            pid=os.getppid(),
            rank_pids=(os.getpid(), *(follower.pid for follower in followers)),
        )

    def _machine(self, plan: EnginePlan, welcome: Welcome) -> WorkerMachine:
        config = self._config
        settings = MachineSettings(
            info=welcome.info,
            vocab_size=welcome.vocab_size,
            max_model_len=welcome.max_model_len,
            max_waiting=config.engine.max_waiting,
            headroom_tokens=config.kv.headroom_tokens,
            quarantine_retry_s=config.worker.quarantine_retry_s,
            quarantine_fence_share=config.kv.quarantine_fence_share,
            hard_fence_after_s=config.transport.hard_fence_after_s,
            rejoin_after_s=config.worker.heartbeat_s,
            load_interval_s=config.worker.load_interval_s,
            heartbeat_s=config.worker.report_interval_s,
            max_packing_nbytes=config.transport.staging_slot_bytes,
            num_idle_blocks=plan.num_idle_blocks,
            has_grammars=plan.has_grammars,
        )
        scheduler = SchedulerSettings(
            max_batch_tokens=config.engine.max_batch_tokens,
            max_running=config.engine.max_running,
            prefill_chunk=config.engine.prefill_chunk,
            eos_token_ids=frozenset(plan.info.eos_token_ids),
            max_model_len=welcome.max_model_len,
        )
        return WorkerMachine(settings, scheduler, new_epoch, config.kv.prefix_cache)


def _wait_for(sockets: tuple[FollowerSocket, ...], clock: MonotonicClock) -> tuple[FollowerReady, ...]:
    """What every other rank says when it is ready. Raises UnavailableError when one has ended, or is not in time."""
    ready: dict[int, FollowerReady] = {}
    deadline = clock.now() + FOLLOWERS_START_S
    with selectors.DefaultSelector() as selector:
        for connection in sockets:
            selector.register(connection, selectors.EVENT_READ, connection)
        while len(ready) < len(sockets):
            for key, _ in selector.select(max(0.0, deadline - clock.now())):
                connection = key.data
                for frame in connection.receive():
                    if isinstance(frame, FollowerReady):
                        ready[connection.rank] = frame
                        selector.unregister(connection)
                    elif not isinstance(frame, Alive):
                        raise UnavailableError(f"rank {connection.rank} did not start: {frame}")
                if connection.closed:
                    raise UnavailableError(f"rank {connection.rank} has ended")
            if clock.now() >= deadline:
                raise UnavailableError(f"not all ranks were ready within {FOLLOWERS_START_S:g} s")
    return tuple(ready[connection.rank] for connection in sockets)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: a thread that is stuck in a library must not keep a process alive that has said it ends.
    os._exit(code)
