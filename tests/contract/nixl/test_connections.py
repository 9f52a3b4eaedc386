"""Connections of NIXL below the transport: what is shared, what is noticed."""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import pytest

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.transport.nixl.agent import NixlEndpoint, NixlWorker, _open_doorbell
from pd_serve.transport.nixl.binding import NixlBinding, engine_options
from pd_serve.transport.ucx import seam
from pd_serve.transport.ucx.lanes import Lane, lane_options
from tests.patience import PATIENCE_S

PAYLOAD = ctypes.create_string_buffer(b"\x07" * 65_536, 65_536)


@pytest.fixture
def workers() -> Iterator[tuple[NixlWorker, NixlWorker]]:
    try:
        binding = NixlBinding("127.0.0.1")
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    contexts = [binding.open_context(lane_options(Lane.TCP, "127.0.0.1", "cpu"), one_sided=False) for _ in range(2)]
    first, second = (context.create_worker() for context in contexts)
    yield first, second
    for worker in (first, second):
        worker.close()
    for context in contexts:
        context.close()


def progress_until(condition: Callable[[], bool], workers: tuple[NixlWorker, ...], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        for worker in workers:
            worker.progress()
    return condition()


def heard_by(worker: NixlWorker) -> list[tuple[bytes, int]]:
    """Headers and payload lengths of what arrives from here on."""
    heard: list[tuple[bytes, int]] = []
    for channel in seam.Channel:
        worker.set_receiver(channel, lambda header, _address, nbytes: heard.append((header, nbytes)))
    return heard


def send_data(endpoint: NixlEndpoint) -> seam.Request:
    return endpoint.send(seam.Channel.DATA, b"header", ctypes.addressof(PAYLOAD), len(PAYLOAD))


def test_data_counts_as_sent_only_when_the_receiver_has_handled_it(workers: tuple[NixlWorker, NixlWorker]) -> None:
    first, second = workers
    heard = heard_by(second)
    endpoint = first.connect(second.address())
    second.connect(first.address())
    request = send_data(endpoint)
    progress_until(lambda: False, (first,), 0.1)
    assert request.poll() == seam.IN_PROGRESS
    assert progress_until(lambda: request.poll() == seam.OK, workers, PATIENCE_S)
    assert heard == [(b"header", len(PAYLOAD))]


def test_endpoints_to_one_agent_share_a_connection_that_outlives_them(workers: tuple[NixlWorker, NixlWorker]) -> None:
    first, second = workers
    endpoint = first.connect(second.address())
    remote = endpoint.remote
    endpoint.close()
    assert endpoint.failure == "closed"
    again = first.connect(second.address())
    assert again.remote is remote
    assert again.failure is None


def test_a_connection_that_loses_large_messages_is_noticed_and_a_new_one_works(workers: tuple[NixlWorker, NixlWorker]) -> None:
    """UCX pairs the second's connection with one that the first has given up: small messages arrive over it, large ones do not."""
    first, second = workers
    heard = heard_by(first)
    given_up = first.connect(second.address())
    given_up.send(seam.Channel.JOIN, b"hello")
    heard_by(second)
    progress_until(lambda: False, workers, 0.1)
    first._disconnect(given_up.remote)
    first.connect(second.address()).send(seam.Channel.JOIN, b"hello again")
    for _ in range(4):
        endpoint = second.connect(first.address())
        first.connect(second.address())
        request = send_data(endpoint)
        assert progress_until(lambda request=request: request.poll() != seam.IN_PROGRESS, workers, PATIENCE_S), (
            "it is neither taken nor failed"
        )
        if request.poll() == seam.OK:
            break
    assert request.poll() == seam.OK
    assert (b"header", len(PAYLOAD)) in heard


@pytest.mark.parametrize(
    "message", [b"", b"\x53", b"\x50" + bytes(20), b"\x4f" + bytes(12), b"\x53\xff\xff" + bytes(4), bytes(300), b"\xff" * 40]
)
def test_what_is_no_message_is_dropped(workers: tuple[NixlWorker, NixlWorker], message: bytes) -> None:
    first, second = workers
    heard = heard_by(second)
    endpoint = first.connect(second.address())
    first.send(endpoint.remote, message)
    endpoint.send(seam.Channel.JOIN, b"after")
    assert progress_until(lambda: (b"after", 0) in heard, workers, PATIENCE_S)
    assert [header for header, _ in heard] == [b"after"]


def test_what_is_no_address_is_an_error(workers: tuple[NixlWorker, NixlWorker]) -> None:
    for address in (b"", b"\xff" * 50, workers[1].address()[:-40]):
        with pytest.raises(TransportError):
            workers[0].connect(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1", "::"])
def test_a_doorbell_can_be_rung_at_the_address_that_is_told(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    doorbell, address = _open_doorbell(host)
    with doorbell, socket.socket(doorbell.family, socket.SOCK_DGRAM) as ringer:
        assert not ip_address(address[0]).is_unspecified
        ringer.sendto(b"", address)
        assert select.select([doorbell], [], [], PATIENCE_S)[0]


def test_an_address_of_another_machine_is_told_as_it_is() -> None:
    """Of a worker behind one that passes on what arrives there."""
    doorbell, address = _open_doorbell("192.0.2.7")
    with doorbell:
        assert address == ("192.0.2.7", doorbell.getsockname()[1])
    with pytest.raises(TransportError, match="no address"):
        _open_doorbell("no such name")


def test_options_of_a_lane_never_let_messages_into_shared_memory() -> None:
    shm = engine_options(lane_options(Lane.SHM, "127.0.0.1", "cpu"))
    assert (shm["POSIX_ERROR_HANDLING"], shm["SYSV_ERROR_HANDLING"], shm["NET_DEVICES"]) == ("n", "n", "lo")
    assert engine_options(lane_options(Lane.TCP, "127.0.0.1", "cpu"))["TLS"] == "tcp"
    with pytest.raises(TransportError, match="GPU"):
        engine_options(lane_options(Lane.TCP, "127.0.0.1", "cuda:0"))
    for options in (shm, engine_options(lane_options(Lane.TCP, "127.0.0.1", "cpu"))):
        assert not any("," in value for value in options.values())
