"""Memory that pieces are gathered in: another one for each message on its way, the same one again once it has gone."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pd_serve.ids import Epoch, LeaseId
from pd_serve.transport.ucx.checked import CheckedWriter, Source
from pd_serve.transport.ucx.messages import TOKEN_NBYTES
from pd_serve.transport.ucx.seam import OK, Channel
from pd_serve.transport.ucx.writer import Pieces
from tests.unit.transport.ucx.fake_endpoint import FakeEndpoint, FakeRequest


class Watching(FakeEndpoint):
    """Knows where each payload lay."""

    def __init__(self, sends_are_inline: bool) -> None:
        super().__init__(sends_are_inline=sends_are_inline)
        self.addresses: list[int] = []

    def send(self, channel: Channel, header: bytes, address: int = 0, nbytes: int = 0) -> FakeRequest:
        self.addresses.append(address)
        return super().send(channel, header, address, nbytes)


class Hasty(CheckedWriter):
    """PLANTED: takes memory for free as soon as the message was handed over."""

    def _send_some(self, pieces: Pieces) -> bool:
        sent = super()._send_some(pieces)
        self._spare += [kept for _, _, kept in self._inflight if isinstance(kept, ctypes.Array)]
        return sent


def writer_to(endpoint: FakeEndpoint, kind: type[CheckedWriter] = CheckedWriter) -> tuple[CheckedWriter, object]:
    pool = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(pool)
    return kind(endpoint, b"t" * TOKEN_NBYTES, 1, Source(address, address, True), lambda _: None), pool


def write(writer: CheckedWriter) -> None:
    writer.write(Pieces(LeaseId(1), Epoch(1), np.array([[0, 0, 8], [64, 128, 8]])))
    writer.pump()


def check_a_message_on_its_way_keeps_its_memory(kind: type[CheckedWriter]) -> None:
    endpoint = Watching(sends_are_inline=False)
    writer, _pool = writer_to(endpoint, kind)
    for _ in range(3):
        write(writer)
    assert len(set(endpoint.addresses)) == 3


def test_a_message_on_its_way_keeps_its_memory() -> None:
    check_a_message_on_its_way_keeps_its_memory(CheckedWriter)


def test_the_check_catches_a_writer_that_is_hasty() -> None:
    with pytest.raises(AssertionError):
        check_a_message_on_its_way_keeps_its_memory(Hasty)


@pytest.mark.parametrize("sends_are_inline", [True, False])
def test_the_memory_of_a_message_that_has_gone_is_used_again(sends_are_inline: bool) -> None:
    endpoint = Watching(sends_are_inline)
    writer, _pool = writer_to(endpoint)
    for _ in range(3):
        write(writer)
        endpoint.sends[-1].status = OK
    assert len(set(endpoint.addresses)) == 1
