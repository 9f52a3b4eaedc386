"""Which data path and lane two transports take, in one process: registered pools, no shared memory to be had, a floor of bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
import pytest

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.ids import PeerId
from pd_serve.transport.base import Flushed, PeerJoined, PeerRefused, TransportEvent, TransportSettings, WriteBatch, WriteWindow
from pd_serve.transport.ucx.bindings import open_binding
from pd_serve.transport.ucx.inspect import inspect_ucx
from pd_serve.transport.ucx.libucp import LibucpBinding
from pd_serve.transport.ucx.seam import Binding, Context, Memory
from pd_serve.transport.ucx.transport import UcxTransport
from tests.patience import PATIENCE_S
from tests.transport_nodes import EPOCH, LEASE, ops, pattern, peer_id, settings_for

NBYTES = 1 << 20


class Here:
    """One transport of this process."""

    def __init__(self, name: str, lanes: str, is_registered: bool, binding: Binding | None = None, **changes: object) -> None:
        self.peer = peer_id(name)
        self.events: list[TransportEvent] = []
        settings: TransportSettings = msgspec.structs.replace(settings_for(self.peer, lanes), **changes)
        self.transport = UcxTransport(settings, self.events.append, binding)
        if is_registered:
            self.memory = np.zeros(NBYTES, np.uint8)
            self.transport.register_pool(self.memory.ctypes.data, NBYTES, "cpu")
        else:
            buffer = self.transport.allocate_pool(NBYTES).buffer
            assert buffer is not None
            self.memory = np.frombuffer(buffer, np.uint8)

    def first(self, kind: type) -> TransportEvent | None:
        return next((event for event in self.events if isinstance(event, kind)), None)


@pytest.fixture
def made() -> Iterator[list[Here]]:
    try:
        open_binding("auto")
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    nodes: list[Here] = []
    yield nodes
    for node in nodes:
        node.transport.close()


def pump(nodes: list[Here], until: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        for node in nodes:
            node.transport.progress()
        assert time.monotonic() < deadline, [node.events[-4:] for node in nodes]


def add(a: Here, b: Here) -> None:
    a.transport.add_peer(b.peer, b.transport.export_metadata())
    b.transport.add_peer(a.peer, a.transport.export_metadata())


def joined(a: Here, b: Here) -> tuple[PeerJoined, PeerJoined]:
    add(a, b)
    pump([a, b], lambda: a.first(PeerJoined) and b.first(PeerJoined))
    first, second = a.first(PeerJoined), b.first(PeerJoined)
    assert isinstance(first, PeerJoined)
    assert isinstance(second, PeerJoined)
    return first, second


def check_write(source: Here, target: Here) -> None:
    source.memory[:] = pattern(NBYTES)
    window = WriteWindow(LEASE, EPOCH, source.peer, np.array([0]), np.array([NBYTES]))
    target.transport.open_window(window)
    source.transport.write(WriteBatch(target.peer, LEASE, EPOCH, ops((0, NBYTES // 2, NBYTES // 2), (NBYTES // 2, 0, 1000))))
    source.events.clear()
    source.transport.flush(target.peer, 1)
    pump([source, target], lambda: source.first(Flushed))
    assert source.events == [Flushed(1, True, "")]
    assert np.array_equal(target.memory[NBYTES // 2 :], source.memory[: NBYTES // 2])
    assert np.array_equal(target.memory[:1000], source.memory[NBYTES // 2 :][:1000])


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
def test_registered_host_memory_is_written_by_checked_messages(made: list[Here], lanes: str) -> None:
    made += [Here("a", lanes, True), Here("b", lanes, True)]
    for event in joined(*made):
        assert not event.one_sided
        assert event.lane == {"shm": "posix", "tcp": "tcp"}[lanes]
        assert event.round_trip_s > 0
    check_write(*made)
    assert made[1].transport.close_window(LEASE)


def test_each_direction_takes_the_path_of_its_target(made: list[Here]) -> None:
    made += [Here("allocated", "shm", False), Here("registered", "shm", True)]
    allocated, registered = made
    assert all(event.one_sided for event in joined(allocated, registered))
    check_write(allocated, registered)
    assert registered.transport.close_window(LEASE), "nobody holds a key of a registered pool"
    check_write(registered, allocated)
    assert not allocated.transport.close_window(LEASE)


class NoSharedMemory:
    """A binding on a system whose /dev/shm is full."""

    def __init__(self) -> None:
        self._inner = LibucpBinding()
        self.name, self.version, self.location, self.messaging = "libucp", self._inner.version, "", "am"

    def open_context(self, options: Mapping[str, str], one_sided: bool) -> Context:
        context = self._inner.open_context(options, one_sided)

        def allocate(nbytes: int) -> Memory:
            raise TransportError(f"no room for {nbytes} bytes")

        context.allocate = allocate  # type: ignore[method-assign]
        return context


def test_without_room_in_shared_memory_local_peers_write_by_messages(made: list[Here]) -> None:
    made += [Here("a", "shm", False, NoSharedMemory()), Here("b", "shm", False, NoSharedMemory())]
    assert not any(event.one_sided for event in joined(*made))
    check_write(*made)


def test_auto_prefers_shared_memory_on_one_host_and_tcp_beyond(made: list[Here]) -> None:
    made += [Here("a", "auto", False), Here("b", "auto", False), Here("c", "auto", False, host_id="another")]
    a, b, c = made
    add(b, c)
    assert joined(a, b)[0].lane == "posix"
    pump(made, lambda: c.first(PeerJoined))
    event = c.first(PeerJoined)
    assert isinstance(event, PeerJoined)
    assert event.lane == "tcp"
    assert a.transport.lanes()[0] == "posix"


def test_no_common_lane_is_refused_and_says_what_there_is(made: list[Here]) -> None:
    made += [Here("a", "shm", False), Here("b", "tcp", False)]
    add(*made)
    pump(made, lambda: made[0].first(PeerRefused) and made[1].first(PeerRefused))
    refused = made[0].first(PeerRefused)
    assert isinstance(refused, PeerRefused)
    assert "tcp" in refused.detail
    assert "shm" in refused.detail


def test_a_lane_slower_than_the_floor_is_refused_and_the_other_side_told(made: list[Here]) -> None:
    made += [Here("a", "tcp", False, min_bandwidth=1e15), Here("b", "tcp", False)]
    a, b = made
    add(a, b)
    pump(made, lambda: a.first(PeerRefused))
    refused = a.first(PeerRefused)
    assert isinstance(refused, PeerRefused)
    assert "bytes/s" in refused.detail
    pump(made, lambda: any(type(event).__name__ in ("PeerLost", "PeerRefused") for event in b.events))


def test_a_version_or_binding_that_does_not_fit_is_refused_by_name(made: list[Here]) -> None:
    class Older(NoSharedMemory):
        def __init__(self) -> None:
            super().__init__()
            self.version = "1.18.1"

    made += [Here("a", "tcp", False), Here("b", "tcp", False, Older())]
    add(*made)
    pump(made, lambda: made[0].first(PeerRefused) and made[1].first(PeerRefused))
    refused = made[0].first(PeerRefused)
    assert isinstance(refused, PeerRefused)
    assert "1.18" in refused.detail


def test_inspection_names_binding_version_and_lanes() -> None:
    report = inspect_ucx(settings_for(PeerId("doctor", 1), "auto"))
    assert report.binding in ("libucp", "ucxpy")
    assert report.version.count(".") == 2
    assert report.lanes[-1] == "tcp"
    assert report.interface == "lo"


@pytest.mark.parametrize("name", ["ucxpy", "libucp"])
def test_a_named_binding_carries_a_transfer(made: list[Here], name: str) -> None:
    try:
        bindings = open_binding(name), open_binding(name)
    except TransportUnavailableError as error:
        pytest.skip(f"{name}: {error}")
    made += [Here("a", "tcp", False, bindings[0]), Here("b", "tcp", False, bindings[1])]
    joined(*made)
    check_write(*made)
