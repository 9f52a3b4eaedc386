"""Who is let in: restarts on the same address, stale metadata, strangers, wrong secrets, sides that are not in step."""

from __future__ import annotations

import base64
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from pd_serve.ids import Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.transport.ucx import libucp_abi as abi
from pd_serve.transport.ucx.bindings import open_binding
from pd_serve.transport.ucx.lanes import Lane, lane_options
from pd_serve.transport.ucx.libucp import LibucpBinding, LibucpEndpoint, LibucpWorker
from pd_serve.transport.ucx.messages import NONCE_NBYTES, TOKEN_NBYTES, WIRE_VERSION, Hello, JoinCodec, encode_data_header
from pd_serve.transport.ucx.metadata import LaneAddress, MetadataCodec, UcxMetadata
from pd_serve.transport.ucx.process import current_process
from pd_serve.transport.ucx.seam import OK, Channel, Endpoint, Worker
from tests.cluster import wait_until
from tests.contract.ucx.processes import POOL_NBYTES, SECRET, Cluster, Process
from tests.patience import PATIENCE_S
from tests.ports import free_port

ROW = [(0, 0, 65536)]
NUM_TRIES = 20


def metadata_of(process: Process) -> UcxMetadata:
    return MetadataCodec(SECRET.encode()).decode(base64.b64decode(process.metadata))


def outward_address() -> str | None:
    """An address of this machine that is not loopback; None when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_stale_metadata_of_a_restarted_target_writes_nothing_and_is_told(tcp_cluster: Cluster) -> None:
    """F41: the successor listens on the very same port; the writer is on another host as far as it knows, so no pid helps it."""
    port = free_port()
    env = {"UCX_TCP_PORT_RANGE": f"{port}-{port}"}
    old = tcp_cluster.start("target", 1, env)
    stale = Process()
    tcp_cluster.processes.append(stale)
    stale.open("writer", 1, "tcp", host="127.0.0.1/elsewhere")
    old.kill()
    old.end()
    new = tcp_cluster.start("target", 2, env)
    stale.add(old)
    new.send("run", seconds=1.0)
    refused = stale.wait("PeerRefused")
    assert "target@0000000000000002" in refused["detail"]
    new.receive()
    stale.write(old, ROW)
    assert not stale.flush(old)["ok"]
    assert new.call("count", value=0) == POOL_NBYTES
    assert new.call("resources")["refused_hellos"] >= 1
    stale.call("pattern", seed=2)
    tcp_cluster.join(stale, new)
    new.allow(stale)
    stale.write(new, ROW)
    assert stale.flush(new)["ok"]


def test_metadata_of_a_dead_local_process_is_refused_at_once(cluster: Cluster) -> None:
    writer, target = cluster.start("writer"), cluster.start("target")
    target.kill()
    target.end()
    writer.add(target)
    assert "ended" in writer.wait("PeerRefused")["detail"], "not that nobody has answered in time"


def test_an_address_where_nobody_answers_is_refused_in_time_and_named(tcp_cluster: Cluster) -> None:
    """F25. The address is swapped for one that no route leads to; nothing blocks meanwhile."""
    host = outward_address()
    if host is None:
        pytest.skip("this machine has no address but loopback, and UCX packs none for that")
    writer = tcp_cluster.start("writer", host=f"{host}/here", join_timeout_s=1.0)
    target = tcp_cluster.start("target", host=f"{host}/there")
    metadata = metadata_of(target)
    here, nowhere = socket.inet_aton(host), socket.inet_aton("10.255.255.1")
    (lane,) = metadata.lanes
    assert here in lane.worker_address
    lane = LaneAddress(lane.lane, lane.worker_address.replace(here, nowhere))
    metadata = msgspec.structs.replace(metadata, lanes=(lane,), host="10.255.255.1")
    encoded = base64.b64encode(MetadataCodec(SECRET.encode()).encode(metadata)).decode()
    writer.call("add", peer=target.peer, metadata=encoded, timeout_s=5.0)
    refused = writer.wait("PeerRefused", 5.0)
    assert "10.255.255.1" in refused["detail"]


def test_an_address_that_was_tampered_with_never_reaches_the_library(cluster: Cluster) -> None:
    """UCX ends the process that unpacks an address it does not understand."""
    writer, target = cluster.start("writer"), cluster.start("target")
    raw = bytearray(base64.b64decode(target.metadata))
    raw[-1] ^= 0x5A
    writer.call("add", peer=target.peer, metadata=base64.b64encode(raw).decode())
    assert "digest" in writer.wait("PeerRefused")["detail"]
    assert writer.call("resources")["refused_hellos"] == 1


@pytest.mark.parametrize("num_rounds", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_a_peer_restarted_on_the_same_host_is_joined_anew(cluster: Cluster, num_rounds: int) -> None:
    """F16. Target and writer in turn; what the survivor holds stays flat.

    UCX's port is another each time: UCX binds without SO_REUSEADDR, so one that was in use is free only after a minute.
    """
    stays = cluster.start("stays")
    stays.call("pattern", seed=3)
    held: list[dict[str, int]] = []
    for incarnation in range(1, num_rounds + 1):
        restarted = cluster.start("restarted", incarnation)
        cluster.join(stays, restarted)
        writer, target = (stays, restarted) if incarnation % 2 else (restarted, stays)
        target.allow(writer, lease=incarnation)
        writer.call("pattern", seed=incarnation)
        writer.write(target, ROW, lease=incarnation)
        assert writer.flush(target, token=incarnation)["ok"]
        assert target.call("digest", start=0, end=65536) == writer.call("digest", start=0, end=65536)
        restarted.kill()
        lost = stays.wait("PeerLost")
        assert lost["peer"] == restarted.peer
        assert lost["fenced"]
        if target is stays:
            assert stays.call("close_window", lease=incarnation)
        stays.call("remove", peer=restarted.peer)
        restarted.end()
        stays.call("run", seconds=0.1)
        held.append(stays.call("resources"))
    for kind in ("fds", "endpoints", "keys", "memories", "maps"):
        assert held[-1][kind] <= held[0][kind], (kind, held)


def test_either_side_may_be_early_and_a_refused_join_succeeds_when_added_again(cluster: Cluster) -> None:
    """As their owners do, each is added again until they have joined: a machine may stand still longer than a short join lasts."""
    early = cluster.start("early", join_timeout_s=1.0)
    late = cluster.start("late")
    early.add(late)
    refused = early.wait("PeerRefused")
    assert "127.0.0.1" in refused["detail"]
    early.add(late)
    early.call("run", seconds=0.3)
    for _ in range(NUM_TRIES):
        late.add(early)
        joined = early.call("wait", timeout_s=PATIENCE_S, kind="PeerJoined", timeout=1.5)
        if joined is not None:
            break
        early.add(late)
    assert joined is not None, early.call("events")
    assert joined["peer"] == late.peer
    assert late.wait("PeerJoined")["peer"] == early.peer


def test_a_wrong_secret_ends_in_a_refusal_on_both_sides(cluster: Cluster) -> None:
    first = cluster.start("first", join_timeout_s=0.6)
    second = cluster.start("second", secret="another", join_timeout_s=0.6)
    first.add(second)
    second.add(first)
    for process in (first, second):
        assert "secret" in process.wait("PeerRefused")["detail"]
        assert process.call("resources")["refused_hellos"] >= 1


# ---- strangers: they have the metadata, a UCX library and no secret


@contextmanager
def stranger(target: Process, lane: Lane, one_sided: bool) -> Iterator[tuple[Worker, Endpoint]]:
    binding = open_binding("auto")
    context = binding.open_context(lane_options(lane, "127.0.0.1", "cpu"), one_sided)
    worker = context.create_worker()
    endpoint = worker.connect(metadata_of(target).address_on(lane))
    yield worker, endpoint
    endpoint.close()
    worker.close()
    context.close()


def pump(worker: Worker, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        worker.progress()


def forged_messages(target: PeerId, writer: PeerId, address: bytes) -> list[tuple[Channel, bytes, bytes]]:
    hello = Hello(writer, target, os.urandom(NONCE_NBYTES), WIRE_VERSION, "1.22.0", 1 << 20, "tcp", current_process(), address)
    wrong = JoinCodec(b"a guess").encode(hello)
    payload = b"\x07" * 65536
    messages = [(Channel.JOIN, wrong, b""), (Channel.JOIN, b"", b""), (Channel.JOIN, os.urandom(200), b"")]
    messages += [(Channel.SESSION, os.urandom(TOKEN_NBYTES) + b"\x81", b""), (Channel.SESSION, b"x", payload)]
    for lease in (1, -1):
        header = encode_data_header(os.urandom(TOKEN_NBYTES), LeaseId(lease), Epoch(1), 1, [0, len(payload)])
        messages.append((Channel.DATA, header, payload))
    messages += [(Channel.DATA, os.urandom(length), payload) for length in (0, 10, 36, 52, 100, 1000)]
    return messages


def test_a_stranger_writes_nothing_joins_nothing_and_crashes_nothing(cluster: Cluster) -> None:
    """F43."""
    lane = Lane.SHM if cluster.one_sided else Lane.TCP
    writer, target = cluster.start("writer"), cluster.start("target")
    target.allow(writer)
    writer_id = PeerId(WorkerId("writer"), Incarnation(1))
    target_id = PeerId(WorkerId("target"), Incarnation(1))
    target.add(writer)  # a join is pending in the name that the stranger takes
    target.send("run", seconds=1.5)
    with stranger(target, lane, one_sided=False) as (worker, endpoint):
        requests = []
        for channel, header, payload in forged_messages(target_id, writer_id, worker.address()) * 5:
            buffer = ctypes.create_string_buffer(payload, max(1, len(payload)))
            requests.append((endpoint.send(channel, header, ctypes.addressof(buffer), len(payload)), buffer))
        pump(worker, 1.0)
    target.receive()
    assert [kind for kind, _ in target.call("events")] == []
    assert target.call("count", value=0) == POOL_NBYTES
    for refused in ("refused_hellos", "refused_writes"):
        wait_until(lambda refused=refused: target.call("resources")[refused] >= 5, PATIENCE_S, f"{refused} are counted")
    writer.call("pattern", seed=4)
    writer.add(target)
    assert target.wait("PeerJoined")["peer"] == writer.peer


class CarelessEndpoint(LibucpEndpoint):
    """An endpoint that does not ask for error reports: UCX then uses lanes of its tcp transport that it keeps from others."""

    def __init__(self, worker: LibucpWorker, address: bytes) -> None:
        super().__init__(worker, address)
        super().close()
        self._failure = None
        params = abi.EndpointParams(field_mask=1, address=ctypes.addressof(self._address))
        self._binding.check(
            self._binding.ucp.ucp_ep_create(worker.handle, ctypes.byref(params), ctypes.byref(self._handle)), "ucp_ep_create"
        )

    def close(self) -> None:
        """Left to the end of the worker: closing by force is for endpoints with error handling."""


def put_as_a_stranger(
    address: bytes, kind: type[LibucpEndpoint], target_address: int, progress: Callable[[], object], within_s: float
) -> bool:
    """Put 64 KiB of sevens to another's address with a key of one's own memory (on tcp keys hold no secret). True when flushed."""
    binding = LibucpBinding()
    context = binding.open_context({"TLS": "tcp", "NET_DEVICES": "lo"}, one_sided=True)
    source = ctypes.create_string_buffer(b"\x07" * 65536, 65536)
    memory = context.register(ctypes.addressof(source), 65536)
    worker = context.create_worker()
    endpoint = kind(worker, address)
    key = endpoint.unpack_key(memory.pack_key())
    endpoint.put([ctypes.addressof(source)], [target_address], [65536], key, None)
    flush = endpoint.flush()
    until = time.monotonic() + within_s
    while time.monotonic() < until and flush.poll() != OK:
        worker.progress()
        progress()
    was_flushed = flush.poll() == OK and endpoint.failure is None
    flush.release()
    key.close()
    endpoint.close()
    worker.close()
    memory.close()
    context.close()
    return was_flushed


@pytest.mark.parametrize("kind", [LibucpEndpoint, CarelessEndpoint])
def test_a_stranger_with_a_valid_key_cannot_put_over_tcp(tcp_cluster: Cluster, kind: type[LibucpEndpoint]) -> None:
    """F43: the target's context has no RMA, and its address offers no puts."""
    target = tcp_cluster.start("target")
    target.send("run", seconds=1.2)
    assert not put_as_a_stranger(metadata_of(target).address_on(Lane.TCP), kind, target.address, lambda: None, 0.7)
    target.receive()
    assert target.call("count", value=0) == POOL_NBYTES
    other = tcp_cluster.start("other")
    tcp_cluster.join(target, other)


def test_the_check_catches_a_context_whose_address_offers_puts() -> None:
    """PLANTED: without RMA, but with the puts of UCX's tcp transport: they land."""
    options = {key: value for key, value in lane_options(Lane.TCP, "127.0.0.1", "cpu").items() if key != "TCP_PUT_ENABLE"}
    context = LibucpBinding().open_context(options, one_sided=False)
    worker = context.create_worker()
    memory = ctypes.create_string_buffer(65536)
    assert put_as_a_stranger(worker.address(), CarelessEndpoint, ctypes.addressof(memory), worker.progress, PATIENCE_S)
    assert memory.raw == b"\x07" * 65536
    worker.close()
    context.close()


def test_metadata_holds_neither_secret_nor_key(cluster: Cluster) -> None:
    target = cluster.start("target")
    assert SECRET.encode() not in base64.b64decode(target.metadata)
    assert {field.name for field in msgspec.structs.fields(UcxMetadata)} == {
        "peer",
        "wire_version",
        "ucx_version",
        "messaging",
        "host",
        "host_id",
        "process",
        "lanes",
        "shm_voice",
    }


@pytest.mark.parametrize("broken", ["not msgpack", ""])
def test_broken_metadata_is_refused(cluster: Cluster, broken: str) -> None:
    process = cluster.start("one")
    process.call("add", peer=["other", 1], metadata=base64.b64encode(broken.encode()).decode())
    assert "metadata" in process.wait("PeerRefused")["detail"]


def test_a_peer_dropped_while_it_stood_still_joins_again_and_stays(cluster: Cluster) -> None:
    """F20: as a router does with a worker that is frozen, twice. What is left of the old connection must not end the new one."""
    steady, frozen = cluster.start("steady"), cluster.start("frozen")
    cluster.join(steady, frozen)
    frozen.signal(signal.SIGSTOP)
    for seconds in (2.0, 1.6):
        steady.call("remove", peer=frozen.peer)
        time.sleep(0.05)
        steady.add(frozen)
        time.sleep(seconds)
    frozen.signal(signal.SIGCONT)
    frozen.wait("PeerLost")
    time.sleep(0.5)
    frozen.call("remove", peer=steady.peer)
    frozen.add(steady)
    for process in (frozen, steady):
        process.wait("PeerJoined")
    time.sleep(1.5)
    for process in (frozen, steady):
        assert not [event for event in process.call("events") if event[0] == "PeerLost"]
