"""The reference implementation of a transport: several of them in one process, meeting on a LoopbackFabric.

For tests, the simulator and single-process demos; also the plainest statement of what base.py asks for. Both data paths are real: `shm`
copies into the peer's pool inside write(), unasked; `tcp` hands messages to the peer, which checks them against its windows in its own
progress(). Settings.lanes picks (`auto`: shm where host ids are equal). One owner thread per transport; several may live in one process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hmac
from collections import deque

import msgspec
import numpy as np

from pd_serve.clock import Clock, MonotonicClock
from pd_serve.errors import OutOfBoundsError, TransportError
from pd_serve.ids import LeaseId, PeerId
from pd_serve.protocol.notify import MAX_NOTICE_NBYTES
from pd_serve.transport.base import (
    EventSink,
    Flushed,
    NoticeReceived,
    PeerJoined,
    PeerLost,
    PeerRefused,
    Region,
    TransportCounters,
    TransportSettings,
    WriteBatch,
    WriteWindow,
)
from pd_serve.transport.loopback_fabric import (
    Bye,
    CheckedWrite,
    Credit,
    FlushAnswered,
    FlushAsked,
    Hello,
    HelloAck,
    HelloRefused,
    LoopbackFabric,
    Message,
    NoticeSent,
    Port,
    copy_ranges,
    named_fabric,
)
from pd_serve.transport.loopback_link import PATHS, Link, LoopbackMetadata, common_path, copy_bandwidth, hello_digest
from pd_serve.transport.windows import Verdict, WindowTable, check_bounds

_OPS_PER_MESSAGE = 64
_MESSAGES_PER_PROGRESS = 64
_MAX_EARLY_HELLOS = 256
_UNKNOWN_NBYTES = 1 << 62


class LoopbackTransport:
    """See base.Transport for every method's contract.

    `fabric` is where the peers are found; created by name (registry), all transports of a process share one. Raises TransportError for
    settings.lanes other than auto, shm and tcp.
    """

    name = "loopback"

    def __init__(
        self, settings: TransportSettings, sink: EventSink, fabric: LoopbackFabric | None = None, clock: Clock | None = None
    ) -> None:
        if settings.lanes not in ("auto", *PATHS):
            raise TransportError(f"loopback has no {settings.lanes} lane")
        self._settings = settings
        self._sink = sink
        self._fabric = fabric if fabric is not None else named_fabric("default")
        self._clock = clock if clock is not None else MonotonicClock()
        self._paths = PATHS if settings.lanes == "auto" else (settings.lanes,)
        self._port = Port(settings.self_id)
        self._fabric.attach(self._port)
        self._region: Region | None = None
        self._links: dict[PeerId, Link] = {}
        self._links_by_port: dict[int, Link] = {}
        self._early_hellos: dict[int, Hello] = {}
        self._windows = WindowTable()
        self._ready: deque[Flushed | PeerRefused] = deque()
        """Events found outside progress()."""
        self._counters = TransportCounters()
        self._closed = False

    # ---- pool

    def allocate_pool(self, nbytes: int) -> Region:
        self._port.pool = np.zeros(nbytes, np.uint8)
        return self._set_region(Region(0, self._port.pool.ctypes.data, nbytes, self._port.pool.data))

    def register_pool(self, address: int, nbytes: int, device: str) -> Region:
        if device != "cpu":
            raise TransportError(f"loopback cannot register memory of {device}")
        self._port.pool = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)
        return self._set_region(Region(0, address, nbytes, None))

    def _set_region(self, region: Region) -> Region:
        if self._region is not None:
            raise TransportError("the pool is already set")
        self._region = region
        return region

    def export_metadata(self) -> bytes:
        if self._region is None:
            raise TransportError("no pool: allocate or register it before exporting metadata")
        return msgspec.msgpack.encode(LoopbackMetadata(self._port.port_id, self._settings.self_id, self._region.nbytes))

    # ---- peers

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        if self._closed or peer in self._links:
            return
        try:
            known = msgspec.msgpack.decode(metadata, type=LoopbackMetadata)
        except msgspec.MsgspecError as error:
            self._ready.append(PeerRefused(peer, f"malformed metadata: {error}"))
            return
        port = self._fabric.find(known.port_id)
        if known.peer != peer or port is None or not port.watch(self._port):
            why = f"its metadata is of {known.peer}" if known.peer != peer else "nobody answers at its address"
            self._ready.append(PeerRefused(peer, f"{peer}: {why}"))
            return
        now = self._clock.now()
        link = Link(peer, port, known.pool_nbytes, now + self._settings.join_timeout_s, now)
        self._links[peer] = link
        self._links_by_port[port.port_id] = link
        hello = Hello(self._settings.self_id, peer, self._paths, self._settings.host_id, b"")
        port.post(self._port, dataclasses.replace(hello, digest=hello_digest(self._settings.secret, hello, self._port.port_id)))
        early = self._early_hellos.pop(port.port_id, None)
        if early is not None and early.sender == peer:
            self._accept_hello(link, early)

    def remove_peer(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        self._forget(link)
        link.port.post(self._port, Bye("removed by the peer"))
        self._ready = deque(event for event in self._ready if not (isinstance(event, PeerRefused) and event.peer == peer))
        self._fail_flushes(link, "peer removed")

    def hard_fence(self, peer: PeerId) -> bool:
        link = self._links.get(peer)
        if link is None:
            return False
        link.port.close("ended by force")
        return True

    # ---- writing

    def write(self, batch: WriteBatch) -> None:
        link = self._links.get(batch.peer)
        remote_nbytes = _UNKNOWN_NBYTES if link is None else link.pool_nbytes
        nbytes = check_bounds(batch.ops, len(self._port.pool), remote_nbytes)
        if link is None:
            return
        if not link.joined:
            link.wrote_too_early = True
            return
        self._counters.writes += len(batch.ops)
        self._counters.bytes_written += nbytes
        if link.one_sided:
            self._port.copy_out(link.port, batch.ops)
            return
        for first in range(0, len(batch.ops), _OPS_PER_MESSAGE):
            ops = batch.ops[first : first + _OPS_PER_MESSAGE]
            link.outbox.append(CheckedWrite(batch.lease_id, batch.epoch, ops, self._port.pool))
        self._pump(link)

    def flush(self, peer: PeerId, token: int) -> None:
        link = self._links.get(peer)
        if link is None or not link.joined:
            self._ready.append(Flushed(token, False, f"{peer} is not joined"))
        elif link.wrote_too_early:
            link.wrote_too_early = False
            self._ready.append(Flushed(token, False, f"written to {peer} before it had joined"))
        elif link.one_sided:
            # The copies were made inside write(), so this is known now; a peer that closed in between has failed.
            is_alive = link.port.is_open and self._port.is_open
            self._ready.append(Flushed(token, is_alive, "" if is_alive else f"{peer} is gone"))
        else:
            link.flushes[token] = None
            link.outbox.append(FlushAsked(token))
            self._pump(link)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        if len(payload) > MAX_NOTICE_NBYTES:
            raise TransportError(f"notice of {len(payload)} bytes, at most {MAX_NOTICE_NBYTES}")
        link = self._links.get(peer)
        if link is not None and link.joined:
            link.outbox.append(NoticeSent(payload))
            self._pump(link)

    # ---- windows

    def open_window(self, window: WriteWindow) -> None:
        if len(window.starts) and (int(window.starts[0]) < 0 or int(window.ends[-1]) > len(self._port.pool)):
            raise OutOfBoundsError(f"window [{window.starts[0]}, {window.ends[-1]}) of a pool of {len(self._port.pool)} bytes")
        self._windows.open(window)

    def close_window(self, lease_id: LeaseId) -> bool:
        window = self._windows.close(lease_id)
        if window is None:
            return False
        links = [self._links.get(writer) for writer in window.writers]
        return all(link is not None and link.joined and not link.one_sided for link in links)

    # ---- progress

    def progress(self) -> bool:
        if self._closed:
            return False
        happened = bool(self._ready)
        while self._ready and not self._closed:
            self._sink(self._ready.popleft())
        if not self._port.is_open:
            for link in tuple(self._links.values()):
                self._lose(link, "this transport was ended by force")
        for _ in range(_MESSAGES_PER_PROGRESS):
            mail = None if self._closed else self._port.take()
            if mail is None:
                break
            happened = True
            self._receive(*mail)
        now = self._clock.now()
        for link in [link for link in self._links.values() if not link.joined and now >= link.deadline]:
            happened = True
            self._refuse(link, f"{link.peer} did not answer the hello within {self._settings.join_timeout_s} s")
        return happened

    def busy(self) -> bool:
        return bool(self._ready) or self._port.has_mail

    def arm(self) -> bool:
        self._port.clear_wake()
        return not self.busy()

    def wait_fds(self) -> tuple[int, ...]:
        return () if self._closed else (self._port.fd,)

    def next_deadline(self) -> float | None:
        return min((link.deadline for link in self._links.values() if not link.joined), default=None)

    def lanes(self) -> tuple[str, ...]:
        return tuple(f"loopback-{path}" for path in self._paths)

    def counters(self) -> TransportCounters:
        return self._counters

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in tuple(self._links.values()):
            self._forget(link)
        self._ready.clear()
        self._port.close("closed")
        self._port.release_fd()

    # ---- receiving

    def _receive(self, sender: Port, message: Message) -> None:
        link = self._links_by_port.get(sender.port_id)
        match message:
            case Hello():
                self._on_hello(sender, message, link)
            case CheckedWrite():
                self._on_checked_write(message, link)
                sender.post(self._port, Credit())
            case FlushAsked():
                violations = 1 if link is None else link.violations
                if link is not None:
                    link.violations = 0
                sender.post(self._port, FlushAnswered(message.token, violations))
            case _ if link is not None:
                self._on_message(link, message)
            case _:
                pass  # Of a peer that is not, or no longer, known.

    def _on_message(self, link: Link, message: Message) -> None:
        match message:
            case HelloAck():
                link.acknowledged = True
                self._join_if_complete(link)
            case HelloRefused() if not link.joined:
                self._refuse(link, message.detail)
            case Credit():
                link.credits += 1
                self._pump(link)
            case FlushAnswered() if message.token in link.flushes:
                del link.flushes[message.token]
                detail = "" if message.violations == 0 else f"{link.peer} refused {message.violations} writes of a live lease"
                self._sink(Flushed(message.token, message.violations == 0, detail))
            case NoticeSent() if link.joined:
                self._sink(NoticeReceived(link.peer, message.payload))
            case Bye():
                self._lose(link, message.detail)
            case _:
                pass

    def _on_hello(self, sender: Port, hello: Hello, link: Link | None) -> None:
        problem = ""
        if hello.receiver != self._settings.self_id:
            problem = f"hello meant for {hello.receiver}, this is {self._settings.self_id}"
        elif not hmac.compare_digest(hello.digest, hello_digest(self._settings.secret, hello, sender.port_id)):
            problem = "hello with a wrong digest: the cluster secrets differ"
        elif link is not None and hello.sender != link.peer:
            problem = f"hello of {hello.sender} from the address of {link.peer}"
        if problem:
            self._counters.refused_hellos += 1
            sender.post(self._port, HelloRefused(problem))
            if link is not None and not link.joined:
                self._refuse(link, problem)
        elif link is not None:
            self._accept_hello(link, hello)
        else:
            if len(self._early_hellos) >= _MAX_EARLY_HELLOS:
                del self._early_hellos[next(iter(self._early_hellos))]
            self._early_hellos[sender.port_id] = hello

    def _on_checked_write(self, message: CheckedWrite, link: Link | None) -> None:
        if link is None or not link.joined or link.one_sided:
            self._counters.refused_writes += 1
            return
        verdict = self._windows.check(link.peer, message.lease_id, message.epoch, message.ops[:, 1], message.ops[:, 2])
        if verdict is Verdict.ALLOWED:
            copy_ranges(self._port.pool, message.source, message.ops)
            return
        self._counters.refused_writes += 1
        if verdict is Verdict.VIOLATION:
            link.violations += 1

    # ---- joining

    def _accept_hello(self, link: Link, hello: Hello) -> None:
        link.heard = hello
        link.port.post(self._port, HelloAck())
        self._join_if_complete(link)

    def _join_if_complete(self, link: Link) -> None:
        if link.joined or link.heard is None or not link.acknowledged:
            return
        path = common_path(self._paths, self._settings.host_id, link.heard)
        if path is None:
            self._refuse(link, f"no lane in common with {link.peer}: {self._paths} here, {link.heard.paths} there (shm needs one host)")
            return
        bandwidth = copy_bandwidth(self._settings.probe_nbytes)
        if bandwidth < self._settings.min_bandwidth:
            self._refuse(link, f"{link.peer} at {bandwidth:.3g} B/s is below the least of {self._settings.min_bandwidth:.3g} B/s")
            return
        link.joined = True
        link.one_sided = path == "shm"
        round_trip_s = self._clock.now() - link.hello_sent_at
        self._sink(PeerJoined(link.peer, f"loopback-{path}", link.one_sided, bandwidth, round_trip_s))

    def _refuse(self, link: Link, detail: str) -> None:
        self._forget(link)
        self._sink(PeerRefused(link.peer, detail))

    # ---- leaving

    def _lose(self, link: Link, detail: str) -> None:
        """Fenced, on either path: a port that closed or said Bye writes no more."""
        if not link.joined:
            self._refuse(link, detail)
            return
        self._forget(link)
        self._fail_flushes(link, f"{link.peer} is gone: {detail}")
        while self._ready and not self._closed:
            self._sink(self._ready.popleft())
        self._sink(PeerLost(link.peer, detail, fenced=True))

    def _forget(self, link: Link) -> None:
        self._links.pop(link.peer, None)
        self._links_by_port.pop(link.port.port_id, None)
        link.port.unwatch(self._port)

    def _fail_flushes(self, link: Link, detail: str) -> None:
        self._ready.extend(Flushed(token, False, detail) for token in link.flushes)
        link.flushes.clear()

    def _pump(self, link: Link) -> None:
        """Hand over what the peer has room for, in order."""
        while link.outbox:
            item = link.outbox[0]
            if isinstance(item, CheckedWrite):
                if link.credits == 0:
                    return
                link.credits -= 1
            link.outbox.popleft()
            link.port.post(self._port, item)
