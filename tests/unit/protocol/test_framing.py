"""Frames as links cut and wrap them are those of a general implementation."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, SERVER, Protocol, State

from pd_serve.protocol.framing import FrameCutter, FrameWrapper, wrap_bare

MAX_NBYTES = 200_000
SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, 100_000)


def messages() -> list[bytes]:
    rng = random.Random(5)
    return [rng.randbytes(size) for size in SIZES]


def in_pieces(data: bytes, longest: int) -> Iterator[bytes]:
    rng = random.Random(longest)
    begin = 0
    while begin < len(data):
        size = rng.randint(1, longest)
        yield data[begin : begin + size]
        begin += size


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_is_wrapped_arrives(is_ours: bool) -> None:
    wrap = FrameWrapper().wrap if is_ours else wrap_bare
    other = Protocol(SERVER if is_ours else CLIENT, state=State.OPEN, max_size=None)
    other.receive_data(b"".join(map(wrap, messages())))
    frames = [event for event in other.events_received() if isinstance(event, Frame)]
    assert [(frame.opcode, frame.fin) for frame in frames] == [(Opcode.BINARY, True)] * len(SIZES)
    assert [frame.data for frame in frames] == messages()


def test_masks_differ() -> None:
    wrapper = FrameWrapper()
    assert len({wrapper.wrap(b"the same") for _ in range(3000)}) > 2990


@pytest.mark.parametrize("longest", [1, 3, 1000, 1_000_000])
def test_messages_are_cut_out_wherever_reads_end_and_control_frames_come_as_they_are(longest: int) -> None:
    server = Protocol(SERVER, state=State.OPEN)
    for message in messages():
        server.send_binary(message)
        server.send_ping(b"hey")
    cutter = FrameCutter(MAX_NBYTES)
    data = b"".join(server.data_to_send())
    found = [cut for piece in in_pieces(data if longest > 3 else data[:3000], longest) for cut in cutter.cut(piece)]
    sent = [part for message in messages() for part in ((message, True), (b"\x89\x03hey", False))]
    assert found == sent[: len(found)]
    assert len(found) == (len(sent) if longest > 3 else 10)


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x81\x02hi",
        b"\x02\x02hi",
        b"\x82\x82maskhi",
        b"\xc2\x02hi",
        b"\x82\x7f" + (MAX_NBYTES + 1).to_bytes(8, "big"),
        b"\x89\x7e\x00\x80",
    ],
    ids=["text", "part", "masked", "reserved bit", "too large", "long ping"],
)
def test_from_the_first_frame_that_no_link_may_send_all_is_left_as_it_comes(wrong: bytes) -> None:
    cutter = FrameCutter(MAX_NBYTES)
    assert cutter.cut(b"\x82\x02ok" + wrong) == [(b"ok", True), (wrong, False)]
    assert cutter.cut(b"\x82\x02ok") == [(b"\x82\x02ok", False)]
