"""A simulated worker process: executes what its real WorkerMachine decides, with a transport thread, an engine thread and a control thread.

Each thread is an ordered channel; between them events take time, and while the process is stopped nothing runs, but its memory can be
written by others. The engine writes and verifies real bytes (model.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pd_serve.engine.batch import BatchEntry, SampledToken, StepResult
from pd_serve.engine.scheduler import SchedulerSettings
from pd_serve.ids import AttemptId, Epoch, LeaseId, LinkId, PeerId
from pd_serve.protocol.link import WorkerFrame
from pd_serve.protocol.notify import Completed, NoticeUnion
from pd_serve.protocol.sampling import TokenLogprobs
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused, WriteWindow
from tests.sim.checks import LegChecker, check_machine, check_source_held, check_write
from tests.sim.core import Channel, Loop, Process, ViolationError
from tests.sim.fabric import Fabric, Write
from tests.sim.model import WORD_NBYTES, chosen_logprob, kv_words, next_token
from workers.events import (
    Action,
    AddPeer,
    CloseWindow,
    Event,
    FlushDone,
    FlushThenNotify,
    HardFence,
    NoticeArrived,
    Observe,
    OpenWindow,
    PushNow,
    PushPlan,
    RemovePeer,
    RunBatch,
    SendFrame,
    SendNotice,
    StepDone,
    StepFailed,
    StopPush,
    Tick,
    TransportReported,
    WindowClosed,
    WindowOpened,
)
from workers.machine import WorkerMachine
from workers.prefill.completions import StepCompletions
from workers.settings import MachineSettings

if TYPE_CHECKING:
    from tests.sim.links import Link


@dataclass(frozen=True, slots=True)
class NodeSettings:
    machine: MachineSettings
    scheduler: SchedulerSettings
    machine_class: type[WorkerMachine]
    layer_s: float
    """Seconds a layer of a step takes."""
    engine_faults: float
    """Probability that a step fails."""
    transport_stall: tuple[float, float]
    """(probability, longest in seconds) that the transport thread takes a command late, while it goes on letting writes in."""


class Node(Process):
    def __init__(self, loop: Loop, name: str, settings: NodeSettings, fabric: Fabric, tokens_of: Callable[[int], tuple[int, ...]]) -> None:
        super().__init__(loop, name)
        self.settings = settings
        self.info = settings.machine.info
        self.peer: PeerId = self.info.peer
        self.links: dict[LinkId, Link] = {}
        self.machine = settings.machine_class(settings.machine, settings.scheduler, lambda: Epoch(loop.rng.getrandbits(62)))
        layout = self.info.layout
        self.memory = np.zeros(layout.pool_nbytes // WORD_NBYTES, dtype=np.uint32)
        self.slabs = self.memory.reshape(layout.num_layers, layout.num_blocks, 2, layout.block_size)
        self.windows: dict[LeaseId, WriteWindow] = {}
        self.num_refused_writes = 0
        self.on_crash: Callable[[Node], None] = lambda node: None
        self._fabric = fabric
        self._tokens_of = tokens_of
        """The tokens an attempt will have in the end, by attempt id: what the engine checks everything against."""
        self._legs = LegChecker(name)
        self._control = Channel(self, (0.000005, 0.0001))
        self._transport = Channel(self, (0.000005, 0.0002), settings.transport_stall)
        self._stopped_pushes: set[tuple[PeerId, LeaseId]] = set()
        self._tick_at: float | None = None
        fabric.register(self)

    # ---- control thread

    def post(self, event: Event) -> None:
        """Hand an event to the control thread."""
        self._control.send(lambda: self.handle(event))

    def handle(self, event: Event) -> None:
        self.loop.log(self.name, event)
        self._legs.on_event(event)
        actions = self.machine.handle(event, self.clock)
        self._legs.on_actions(actions)
        check_machine(self.machine)
        for action in actions:
            self._execute(action)
        deadline = self.machine.next_deadline()
        if isinstance(event, Tick) and deadline is not None and deadline <= self.clock:
            raise ViolationError(f"{self.name}: a deadline that Tick does not clear: {deadline} at {self.clock}")
        self._set_tick(deadline)

    def _set_tick(self, deadline: float | None) -> None:
        if deadline is None or (self._tick_at is not None and self._tick_at <= deadline):
            return
        self._tick_at = deadline

        def tick() -> None:
            if self._tick_at == deadline:
                self._tick_at = None
                self.handle(Tick())

        self.loop.at(deadline - self.clock_offset + 1e-6, lambda: self.call(tick))

    def _execute(self, action: Action) -> None:
        if not isinstance(action, Observe):
            self.loop.log(self.name, "    ->", action)
        match action:
            case SendFrame(link_id, frame):
                self._send_frame(link_id, frame)
            case RunBatch():
                self._run_batch(action)
            case Observe():
                pass
            case _:
                self._transport.send(lambda: self._execute_on_transport(action))

    def _send_frame(self, link_id: LinkId, frame: WorkerFrame) -> None:
        link = self.links.get(link_id)
        if link is not None:
            link.to_router(frame)

    # ---- transport thread

    def report(self, event: PeerJoined | PeerRefused | PeerLost | PeerFenced) -> None:
        self.post(TransportReported(event))

    def notice_arrived(self, peer: PeerId, notice: NoticeUnion) -> None:
        self.post(NoticeArrived(peer, notice))

    def _execute_on_transport(self, action: Action) -> None:
        match action:
            case PushNow(plan):
                for layer in range(plan.num_layers):
                    self._push(plan, layer)
            case StopPush(lease):
                self._stopped_pushes.add((lease.holder, lease.lease_id))
            case FlushThenNotify(peer, token, Completed(lease_id)) if (peer, lease_id) in self._stopped_pushes:
                self.post(FlushDone(token, False, "the push was stopped"))
            case FlushThenNotify():
                self._fabric.flush(self, action.peer, lambda ok, detail: self._flushed(action, ok, detail))
            case SendNotice(peer, notice):
                self._fabric.notify(self, peer, notice)
            case AddPeer(peer, _):
                self._fabric.add_peer(self, peer)
            case RemovePeer(peer):
                self._fabric.remove_peer(self, peer)
            case OpenWindow(window):
                self.windows[window.lease_id] = window
                self.post(WindowOpened(window.lease_id))
            case CloseWindow(lease_id):
                window = self.windows.pop(lease_id)
                connection = self._fabric.connection(self.peer, window.writer)
                self.post(WindowClosed(lease_id, connection is not None and connection.lane.name == "CHECKED"))
            case HardFence(peer):
                self._fabric.hard_fence(self, peer)
            case _:
                raise AssertionError(action)

    def _flushed(self, action: FlushThenNotify, ok: bool, detail: str) -> None:
        if ok and action.notice is not None:
            self._fabric.notify(self, action.peer, action.notice)
        self.post(FlushDone(action.token, ok, detail))

    def _push(self, plan: PushPlan, layer: int) -> None:
        lease = plan.lease
        if (lease.holder, lease.lease_id) in self._stopped_pushes:
            return
        writes = []
        for local, remote, nbytes in plan.ranges.tolist():
            source = local + layer * plan.local_layer_stride
            target = remote + layer * plan.remote_layer_stride
            data = self.memory.view(np.uint8)[source : source + nbytes].tobytes()
            writes.append(Write(lease.lease_id, lease.epoch, source, target, nbytes, data))
        self._fabric.write(self, lease.holder, writes)

    def read_source(self, write: Write) -> bytes:
        """A one-sided write reads its source when it lands: the blocks must still be held."""
        check_source_held(self.name, self.machine, write)
        return self.memory.view(np.uint8)[write.source : write.source + write.nbytes].tobytes()

    def prompt_of(self, attempt_id: AttemptId) -> tuple[int, ...]:
        """Tokens an attempt waiting here was opened with; empty if none waits."""
        attempt = self.machine.decode._attempts.get(attempt_id)
        return tuple(attempt.sequence.token_ids) if attempt else ()

    # ---- memory written by others

    def memory_written(self, writer: PeerId, write: Write, data: bytes) -> None:
        memory = self.memory.view(np.uint8)[write.target : write.target + write.nbytes]
        check_write(self.name, self.machine, writer, write, data, memory.tobytes())
        memory[:] = np.frombuffer(data, dtype=np.uint8)

    def admit_checked(self, writer: PeerId, write: Write, data: bytes) -> None:
        window = self.windows.get(write.lease_id)
        if window is None or window.epoch != write.epoch or window.writer != writer:
            self.num_refused_writes += 1
            return
        index = int(np.searchsorted(window.starts, write.target, side="right")) - 1
        if index < 0 or write.target + write.nbytes > int(window.ends[index]):
            raise ViolationError(f"{self.name}: {writer} writes outside its window: {write}")
        self.memory_written(writer, write, data)

    # ---- engine thread

    def _run_batch(self, step: RunBatch) -> None:
        batch, started_at = step.batch, self.clock
        completions = StepCompletions()
        completions.begin(step.completions)
        rng = self.loop.rng
        failing_layer = rng.randrange(self.info.layout.num_layers) if rng.random() < self.settings.engine_faults else -1

        def run_layer(layer: int) -> None:
            if layer == self.info.layout.num_layers:
                sampled = tuple(self._sample(entry) for entry in batch.entries if entry.sample is not None)
                result = StepResult(batch.step_id, sampled, started_at, self.clock)
                for completion in completions.take(result):
                    self._transport.send(partial(self._execute_on_transport, completion))
                self.post(StepDone(result))
                return
            if layer == failing_layer:
                self.post(StepFailed(batch.step_id, "planted engine fault"))
                return
            for entry in batch.entries:
                self._compute(entry, layer)
            self._transport.send(lambda: self._layer_ready(step.pushes, layer))
            after = rng.uniform(0.5, 1.5) * self.settings.layer_s
            self.loop.after(after, lambda: self.call(lambda: run_layer(layer + 1)))

        self.loop.after(rng.uniform(0.00001, 0.0003), lambda: self.call(lambda: run_layer(0)))

    def _layer_ready(self, pushes: tuple[PushPlan, ...], layer: int) -> None:
        for plan in pushes:
            self._push(plan, layer)

    def _compute(self, entry: BatchEntry, layer: int) -> None:
        """Write the layer's KV of the entry's tokens, then read all of its prefix, as attention does."""
        end = entry.start + len(entry.token_ids)
        tokens = self._tokens_of(entry.attempt_id)
        if tokens[entry.start : end] != entry.token_ids:
            due = tokens[entry.start : end]
            raise ViolationError(f"{self.name}: attempt {entry.attempt_id} computes {entry.token_ids} at {entry.start}, not {due}")
        words = kv_words(tokens, self.info.layout.num_layers)[layer][:, :end]
        size = self.info.layout.block_size
        slab = self.slabs[layer]
        for position in range(entry.start, end):
            if not self.machine.pool.ref_count(entry.block_table[position // size]):
                raise ViolationError(f"{self.name}: a step computes into block {entry.block_table[position // size]}, which was given back")
            slab[entry.block_table[position // size], :, position % size] = words[:, position]
        table = np.asarray(entry.block_table[: -(-end // size)])
        seen = slab[table].transpose(1, 0, 2).reshape(2, -1)[:, :end]
        if not np.array_equal(seen, words):
            wrong = np.flatnonzero((seen != words).any(axis=0)).tolist()
            raise ViolationError(f"{self.name}: attempt {entry.attempt_id} reads foreign KV at {wrong}, layer {layer}, {entry.block_table}")

    def _sample(self, entry: BatchEntry) -> SampledToken:
        assert entry.sample is not None
        end = entry.start + len(entry.token_ids)
        tokens = self._tokens_of(entry.attempt_id)[:end]
        if entry.sample.position != end:
            raise ViolationError(f"{self.name}: attempt {entry.attempt_id} samples position {entry.sample.position} after {end} tokens")
        logprobs = TokenLogprobs(chosen_logprob(tokens)) if entry.sample.params.num_logprobs >= 0 else None
        return SampledToken(entry.attempt_id, next_token(tokens, entry.sample.eos_masked), logprobs)

    # ---- ends

    def crash(self) -> None:
        if self.is_dead:
            return
        self.die()
        self._fabric.on_death(self)
        self.on_crash(self)

    def check_drained(self) -> None:
        """Nothing is left of any request."""
        problems = []
        if not self.machine.is_idle:
            problems.append("not idle")
        if self.machine.pool.counts().held:
            problems.append(f"{self.machine.pool.counts().held} blocks held")
        if self.windows:
            problems.append(f"windows open: {sorted(self.windows)}")
        if problems:
            raise ViolationError(f"{self.name} is not clean: {', '.join(problems)}")
