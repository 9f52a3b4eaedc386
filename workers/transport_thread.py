"""The thread that owns the Transport: carries out commands, reports what happens, sleeps when there is nothing to do.

Called by the control thread (machine actions, steps) and the engine thread (LayerReady, StepSampled) through submit(); reports through one
sink, on this thread. Nothing else may touch the transport.

    submit -> deque + eventfd -+
                               +-> run commands -> progress -> report events -> (nothing to do) arm -> sleep on descriptors
    transport's descriptors ---+

While something is outstanding the thread progresses without sleeping, but only for as long as that helps: after _SPIN_S without an event it
sleeps for at most _NAP_S at a time, so that a peer that has stopped costs this process no core.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np

from pd_serve.clock import Clock, MonotonicClock
from pd_serve.errors import ConfigError, ProtocolError, TransportError
from pd_serve.ids import PeerId
from pd_serve.kv.layout import KVLayout
from pd_serve.protocol.link import Sample
from pd_serve.protocol.notify import Completed, NoticeUnion, notice_codec
from pd_serve.protocol.traces import Trace
from pd_serve.transport.base import Flushed, NoticeReceived, PeerJoined, PeerLost, Transport, TransportEvent, TransportSettings
from pd_serve.transport.registry import TransportFactory
from workers.decode.arrivals import Arrivals
from workers.events import (
    AddPeer,
    CloseWindow,
    FlushDone,
    FlushThenNotify,
    HardFence,
    NoticeArrived,
    OpenWindow,
    PushNow,
    RemovePeer,
    SendNotice,
    StopPush,
    TransportReported,
    WindowClosed,
    WindowOpened,
)
from workers.prefill.completions import StepCompletions
from workers.prefill.pusher import Pusher
from workers.transport_commands import (
    AllocatePool,
    BeginStep,
    LayerReady,
    PeerRemoved,
    RegisterPool,
    SamplesObserved,
    StepEnded,
    StepSampled,
    TransportCommand,
    TransportFailed,
    TransportOutput,
    TransportReady,
    UsePacker,
)

_log = logging.getLogger(__name__)

_COMMANDS_PER_TURN = 64
_SPIN_S = 0.0002
_NAP_S = 0.001


class TransportThread:
    """start() -> submit()* -> stop(). `post` is called on the transport thread and must not block."""

    def __init__(
        self,
        factory: TransportFactory,
        settings: TransportSettings,
        post: Callable[[TransportOutput], None],
        *,
        clock: Clock | None = None,
        num_traces: int = 16,
        verify: KVLayout | None = None,
    ) -> None:
        """`verify`: the pool's layout, where what is pushed carries a digest and what arrives must have that of its record
        (kv/digest.py); host memory only."""
        self._factory = factory
        self._settings = settings
        self._post = post
        self._clock = clock if clock is not None else MonotonicClock()
        self._num_traces = num_traces
        self._verify = verify
        self._commands: deque[TransportCommand] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop_by: float | None = None
        self._traces: tuple[Trace, ...] = ()
        self._thread: threading.Thread | None = None
        self._wake_lock = threading.Lock()

    def start(self, pool: AllocatePool | RegisterPool, timeout_s: float) -> TransportReady:
        """Create the transport on its thread and give it its pool. Raises TransportError (also when it takes longer than `timeout_s`)."""
        ready: Future[TransportReady] = Future()
        self._thread = threading.Thread(target=self._run, args=(pool, ready), name="transport", daemon=True)
        self._thread.start()
        try:
            return ready.result(timeout_s)
        except TimeoutError as error:
            self._stop_by = self._clock.now()
            raise TransportError(f"the transport was not up within {timeout_s} s") from error

    def submit(self, command: TransportCommand, *, is_urgent: bool = True) -> None:
        """Any thread. Commands are carried out in the order of submission; after stop() they are dropped. One that is not urgent does not
        wake the thread: the next that is takes it along, or wake()."""
        self._commands.append(command)
        if is_urgent:
            self.wake()

    def recent_traces(self, limit: int) -> tuple[Trace, ...]:
        """The latest completed transfers, oldest first. Any thread."""
        return self._traces[-limit:] if limit > 0 else ()

    def stop(self, timeout_s: float) -> bool:
        """Carry out what was submitted, finish what is outstanding for half of `timeout_s` at most, close. False if it still runs then."""
        self._stop_by = self._clock.now() + timeout_s / 2
        self.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        with self._wake_lock:
            descriptor, self._wake_fd = self._wake_fd, -1
        if descriptor >= 0:
            os.close(descriptor)
        return True

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self, pool: AllocatePool | RegisterPool, ready: Future[TransportReady]) -> None:
        loop: _Loop | None = None
        try:
            loop = _Loop(self._factory, self._settings, self._post, self._clock, self._keep_trace)
            ready.set_result(loop.open_pool(pool, self._verify))
            loop.run(self._commands, self._wake_fd, lambda: self._stop_by)
        except Exception as error:  # noqa: BLE001 - thread root: reported, then the worker ends
            if ready.done():
                _log.exception("transport thread failed")
                self._post(TransportFailed(f"{type(error).__name__}: {error}"))
            else:
                ready.set_exception(error)
        finally:
            if loop is not None:
                loop.close()

    def _keep_trace(self, trace: Trace) -> None:
        # A new tuple each time: readers on other threads see the old one or the new one, never a half-changed one.
        if self._num_traces > 0:
            self._traces = (*self._traces[-self._num_traces + 1 :], trace) if self._num_traces > 1 else (trace,)


class _Loop:
    """Everything that lives on the thread."""

    def __init__(
        self,
        factory: TransportFactory,
        settings: TransportSettings,
        post: Callable[[TransportOutput], None],
        clock: Clock,
        keep_trace: Callable[[Trace], None],
    ) -> None:
        self._post = post
        self._clock = clock
        self._keep_trace = keep_trace
        self._events: deque[TransportEvent] = deque()
        # Events are collected and handled after progress() has returned: a transport need not bear being called from its own sink.
        self._transport: Transport = factory(settings, self._events.append)
        tokens = itertools.count(1)
        self._next_token = tokens.__next__
        self._pusher = Pusher(self._transport, self._next_token, clock.now)
        self._codec = notice_codec()
        self._arrivals: Arrivals | None = None
        """Where transfers are verified."""
        self._completions = StepCompletions()
        self._flushes: dict[int, FlushThenNotify] = {}
        self._lanes: dict[PeerId, str] = {}
        self._refused_seen = 0
        self._poll = select.poll()
        self._polled: tuple[int, ...] = ()

    def open_pool(self, pool: AllocatePool | RegisterPool, verify: KVLayout | None) -> TransportReady:
        """Raises ConfigError where transfers are to be verified in memory that this process cannot read."""
        if isinstance(pool, AllocatePool):
            region = self._transport.allocate_pool(pool.nbytes)
        else:
            region = self._transport.register_pool(pool.address, pool.nbytes, pool.device)
        if verify is not None:
            if region.buffer is None:
                raise ConfigError("transport.verify reads KV in host memory; turn it off where the pool is on a GPU")
            memory = np.frombuffer(region.buffer, np.uint8)
            self._arrivals = Arrivals(memory, verify)
            self._pusher.digest_writes(memory, verify)
        return TransportReady(region, self._transport.export_metadata(), self._transport.lanes())

    def close(self) -> None:
        self._transport.close()

    # ---- the loop

    def run(self, commands: deque[TransportCommand], wake_fd: int, stop_by: Callable[[], float | None]) -> None:
        last_event_at = self._clock.now()
        while True:
            happened = self._run_commands(commands)
            happened |= self._transport.progress()
            happened |= self._report_events()
            happened |= self._pusher.advance()
            now = self._clock.now()
            if happened:
                last_event_at = now
            deadline = stop_by()
            if deadline is not None and (now >= deadline or not (happened or commands or self._is_outstanding())):
                return
            is_busy = self._transport.busy()
            if happened or commands or (is_busy and now - last_event_at < _SPIN_S):
                continue
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(wake_fd)
            # Looked at after the descriptor was cleared: what comes later makes it readable again.
            if not commands and stop_by() == deadline:
                self._sleep(wake_fd, now + _NAP_S if is_busy else None, deadline)

    def _is_outstanding(self) -> bool:
        return bool(self._flushes) or self._pusher.num_in_flight > 0 or self._transport.busy()

    def _sleep(self, wake_fd: int, *wake_at: float | None) -> None:
        if not self._transport.arm() or self._events:
            return
        self._watch((wake_fd, *self._transport.wait_fds()))
        deadlines = [moment for moment in (self._transport.next_deadline(), *wake_at) if moment is not None]
        # poll() rounds up to whole milliseconds.
        self._poll.poll(max(0.0, min(deadlines) - self._clock.now()) * 1000 if deadlines else None)

    def _watch(self, descriptors: tuple[int, ...]) -> None:
        if descriptors == self._polled:
            return
        self._poll = select.poll()
        for descriptor in descriptors:
            self._poll.register(descriptor, select.POLLIN)
        self._polled = descriptors

    # ---- commands

    def _run_commands(self, commands: deque[TransportCommand]) -> bool:
        num_commands = min(len(commands), _COMMANDS_PER_TURN)
        for _ in range(num_commands):
            self._run_command(commands.popleft())
        return num_commands > 0

    def _run_command(self, command: TransportCommand) -> None:
        match command:
            case LayerReady():
                if command.ready is not None:
                    command.ready()
                self._pusher.layer_ready(command.step_id, command.layer, command.written_at, command.held)
            case BeginStep():
                self._pusher.begin_step(command.step_id, command.plans)
                self._completions.begin(command.completions)
            case StepSampled(result):
                for completion in self._completions.take(result):
                    self._run_command(completion)
            case StepEnded():
                self._pusher.end_step(command.step_id)
            case PushNow():
                self._pusher.push_now(command.plan)
            case StopPush():
                self._pusher.stop(command.lease)
            case FlushThenNotify():
                self._pusher.when_issued(command.peer, partial(self._flush, command))
            case SendNotice():
                self._send(command.peer, command.notice)
            case OpenWindow():
                self._transport.open_window(command.window)
                if self._arrivals is not None and command.span is not None:
                    self._arrivals.expect(command.window, command.span)
                self._post(WindowOpened(command.window.lease_id))
            case CloseWindow():
                if self._arrivals is not None:
                    self._arrivals.forget(command.lease_id)
                self._post(WindowClosed(command.lease_id, self._transport.close_window(command.lease_id)))
            case UsePacker():
                self._pusher.use_packer(command.packer, command.ring())
            case AddPeer():
                self._transport.add_peer(command.peer, command.metadata[0])
            case RemovePeer():
                self._remove_peer(command.peer)
                self._post(PeerRemoved(command.peer))
            case HardFence():
                if not self._transport.hard_fence(command.peer):
                    _log.warning("cannot fence %s by force", command.peer)

    def _flush(self, command: FlushThenNotify) -> None:
        token = self._next_token()
        self._flushes[token] = command
        self._transport.flush(command.peer, token)

    def _remove_peer(self, peer: PeerId) -> None:
        self._transport.remove_peer(peer)
        self._pusher.drop_peer(peer)
        self._lanes.pop(peer, None)
        kept = [event for event in self._events if isinstance(event, Flushed) or event.peer != peer]
        self._events.clear()
        self._events.extend(kept)
        for token in [token for token, flush in self._flushes.items() if flush.peer == peer]:
            self._end_flush(token, ok=False, detail=f"{peer} was removed")

    def _send(self, peer: PeerId, notice: NoticeUnion) -> str:
        """What was wrong, or empty."""
        try:
            self._transport.notify(peer, self._codec.encode(notice))
        except TransportError as error:
            _log.error("notice to %s not sent: %s", peer, error)
            return str(error)
        return ""

    # ---- events

    def _report_events(self) -> bool:
        happened = bool(self._events)
        while self._events:
            self._report(self._events.popleft())
        refused = self._transport.counters().refused_writes
        if refused != self._refused_seen:
            self._post(SamplesObserved((Sample("pd_serve_refused_writes_total", float(refused - self._refused_seen)),)))
            self._refused_seen = refused
        return happened

    def _report(self, event: TransportEvent) -> None:
        match event:
            case Flushed():
                if event.token in self._flushes:
                    self._end_flush(event.token, event.ok, event.detail)
                else:
                    self._pusher.on_flushed(event.token, event.ok, event.detail)
            case NoticeReceived():
                self._on_notice(event)
            case _:
                if isinstance(event, PeerJoined):
                    self._lanes[event.peer] = event.lane
                elif isinstance(event, PeerLost):
                    self._pusher.drop_peer(event.peer)
                self._post(TransportReported(event))

    def _on_notice(self, event: NoticeReceived) -> None:
        try:
            notice = self._codec.decode(event.payload)
        except ProtocolError as error:
            _log.warning("dropped a notice of %s: %s", event.peer, error)
            self._post(SamplesObserved((Sample("pd_serve_malformed_notices_total", 1.0),)))
            return
        damage = ""
        if self._arrivals is not None and isinstance(notice, Completed):
            damage = self._arrivals.damage(event.peer, notice)
        self._post(NoticeArrived(event.peer, notice, damage))

    def _end_flush(self, token: int, ok: bool, detail: str) -> None:
        flush = self._flushes.pop(token)
        notice = flush.notice
        problem = "" if ok else (detail or "flush failed")
        if isinstance(notice, Completed):
            problem = problem or self._pusher.problem_of(flush.peer, notice)
            if problem:
                self._pusher.abort(flush.peer, notice)
            else:
                problem = self._complete(flush, notice)
        elif notice is not None and not problem:
            problem = self._send(flush.peer, notice)
        self._post(FlushDone(flush.token, not problem, problem))

    def _complete(self, flush: FlushThenNotify, notice: Completed) -> str:
        now = self._clock.now()
        ended_at = now if flush.compute_ended_at is None else flush.compute_ended_at
        digest = self._pusher.digest_of(flush.peer, notice)
        problem = self._send(flush.peer, msgspec.structs.replace(notice, compute_to_notice_s=max(0.0, now - ended_at), digest=digest))
        finished = self._pusher.finish(flush.peer, notice, ended_at, self._lanes.get(flush.peer, ""))
        if finished is not None and not problem:
            self._keep_trace(finished.trace)
            self._post(SamplesObserved(finished.samples))
        return problem
