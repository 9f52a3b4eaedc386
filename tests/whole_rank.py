"""A whole rank but its process: real threads, a real socket and the loopback transport around a fake runner; the test plays the front."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pd_serve.clock import MonotonicClock
from pd_serve.engine.scheduler import SchedulerSettings
from pd_serve.ids import Incarnation, PeerId, WorkerId, new_epoch
from pd_serve.kv.layout import KVLayout
from pd_serve.protocol.link import PeerInfo, RankReady, Report, Role, Welcome
from pd_serve.transport.base import TransportSettings
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from pd_serve.transport.registry import TransportFactory
from tests.fake_engine import VOCAB_SIZE, FakeRunner, small_layout
from tests.patience import PATIENCE_S
from tests.rank_driver import RankDriver
from tests.rank_threads import STOP_S
from workers.control_loop import ControlLoop, RankParts
from workers.engine_thread import EngineThread, LayerHook
from workers.front_socket import FrontSocket
from workers.inbox import Inbox
from workers.machine import WorkerMachine
from workers.rank_group import RankGroup
from workers.rank_start import RankMessage
from workers.settings import MachineSettings
from workers.transport_commands import AllocatePool
from workers.transport_thread import TransportThread


@dataclass
class Rank:
    """A whole rank but its process, on its own threads."""

    driver: RankDriver
    runner: FakeRunner
    parts: RankParts
    thread: threading.Thread
    exit_codes: list[int]
    near: socket.socket

    def join(self) -> int:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.exit_codes[0]

    def close(self) -> None:
        self.near.close()
        self.join()
        assert self.parts.engine.stop(PATIENCE_S)
        assert self.parts.transport.stop(STOP_S)
        self.parts.front.close()
        self.parts.inbox.close()


def start_rank(
    name: str,
    fabric: LoopbackFabric,
    lanes: str,
    gate: threading.Event | None = None,
    make: Callable[[TransportFactory], TransportFactory] = lambda inner: inner,
    max_running: int = 16,
    push_nbytes: int = 0,
) -> Rank:
    """`make` wraps the loopback transport's factory; `push_nbytes`: as transport.push_bytes."""
    layout, clock = small_layout(), MonotonicClock()
    peer = PeerId(WorkerId(name), Incarnation(secrets.randbits(32)))
    near, far = socket.socketpair()
    inbox: Inbox[RankMessage] = Inbox()
    engine = EngineThread(inbox.put, clock)
    settings = TransportSettings(self_id=peer, secret=b"s", host="127.0.0.1", host_id="here", lanes=lanes, probe_nbytes=4096)
    transport = TransportThread(make(lambda s, sink: LoopbackTransport(s, sink, fabric)), settings, inbox.put)
    ready = transport.start(AllocatePool(layout.pool_nbytes), PATIENCE_S)
    assert ready.region.buffer is not None
    runner = FakeRunner(layout, ready.region.buffer, gate)
    engine.start()
    engine.serve(runner, LayerHook(transport.submit))
    info = PeerInfo(peer, Role.BOTH, 1, "fake", layout, "loopback", (ready.metadata,))
    parts = RankParts(FrontSocket(far), inbox, engine, transport, RankGroup(1, layout.num_kv_heads), push_nbytes=push_nbytes)
    loop = ControlLoop(make_machine(info, layout, max_running), parts, 0.05, clock)
    parts.front.send(RankReady(Welcome(info, "fake", 128, VOCAB_SIZE, (), 0, ())))
    exit_codes: list[int] = []
    thread = threading.Thread(target=lambda: exit_codes.append(loop.run()), name=f"control-{name}")
    thread.start()
    rank = Rank(RankDriver(near), runner, parts, thread, exit_codes, near)
    rank.driver.wait_ready()
    return rank


def make_machine(info: PeerInfo, layout: KVLayout, max_running: int) -> WorkerMachine:
    settings = MachineSettings(
        info=info,
        vocab_size=VOCAB_SIZE,
        max_model_len=128,
        max_waiting=16,
        headroom_tokens=8,
        quarantine_retry_s=0.1,
        quarantine_fence_share=1.0,
        hard_fence_after_s=5.0,
        rejoin_after_s=0.2,
        load_interval_s=0.02,
        heartbeat_s=0.2,
    )
    scheduler = SchedulerSettings(
        max_batch_tokens=8, max_running=max_running, prefill_chunk=0, eos_token_ids=frozenset(), max_model_len=128
    )
    return WorkerMachine(settings, scheduler, new_epoch)


def wait_idle(rank: Rank) -> Report:
    rank.driver.reports.clear()
    return rank.driver.wait_rank(Report, lambda report: report.idle)
