from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from pd_serve.errors import ProtocolError
from pd_serve.ids import AttemptId, LinkId
from pd_serve.protocol.link import Cancel, Fatal, FromRouter, Stop, front_codec, rank_codec
from tests.patience import PATIENCE_S
from workers.front_socket import FrontSocket

FRAME = FromRouter(LinkId(1), Cancel(AttemptId(7)))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, FrontSocket]]:
    near, far = socket.socketpair()
    front = FrontSocket(far)
    yield near, front
    front.close()
    near.close()


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def test_frames_arrive_whole_however_they_are_cut(ends: tuple[socket.socket, FrontSocket]) -> None:
    near, front = ends
    data = framed(front_codec().encode(FRAME)) + framed(front_codec().encode(Stop()))
    received = []
    for byte in data:
        near.send(bytes([byte]))
        received += front.receive()
    assert received == [FRAME, Stop()]
    near.send(data * 50)
    assert front.receive() == [FRAME, Stop()] * 50


def test_nothing_to_read_is_no_frame(ends: tuple[socket.socket, FrontSocket]) -> None:
    assert ends[1].receive() == []
    assert not ends[1].closed


def test_end_of_the_front_is_seen_after_its_last_frame(ends: tuple[socket.socket, FrontSocket]) -> None:
    near, front = ends
    near.sendall(framed(front_codec().encode(FRAME)))
    near.shutdown(socket.SHUT_WR)
    assert front.receive() == [FRAME]
    front.receive()
    assert front.closed


@pytest.mark.parametrize("data", [framed(b"\xc1nonsense"), struct.pack("<I", 1 << 31)])
def test_bytes_that_are_no_frame_are_refused(ends: tuple[socket.socket, FrontSocket], data: bytes) -> None:
    ends[0].sendall(data)
    with pytest.raises(ProtocolError):
        ends[1].receive()


def test_slow_front_gets_everything_in_order(ends: tuple[socket.socket, FrontSocket]) -> None:
    near, front = ends
    frames = [Fatal(f"{index} " + "x" * 5000) for index in range(300)]
    for frame in frames:
        front.send(frame)
    front.flush()
    assert front.has_unsent
    data = b""
    near.settimeout(PATIENCE_S)
    expected = b"".join(framed(rank_codec().encode(frame)) for frame in frames)
    while len(data) < len(expected):
        data += near.recv(1 << 16)
        front.flush()
    assert data == expected
    assert not front.has_unsent


def test_dead_front_closes_the_socket_and_raises_nothing(ends: tuple[socket.socket, FrontSocket]) -> None:
    near, front = ends
    near.close()
    for _ in range(2):
        front.send(Fatal("x"))
        front.flush()
    front.flush_for(0.1)
    assert front.closed
