"""What rank 0 and the other ranks of a worker tell each other, over socket pairs that their front made: commands down, outputs up.

Both ends are processes of one worker, so the frames are the frozen events and commands of the threads as they are: msgpack of
[name of the type, value]. Nothing of it leaves the worker.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np

from pd_serve.engine.batch import Batch
from pd_serve.errors import ProtocolError
from pd_serve.protocol.link import Fatal, Stop
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from workers.events import (
    AddPeer,
    CloseWindow,
    FlushDone,
    FlushThenNotify,
    HardFence,
    NoticeArrived,
    OpenWindow,
    PushNow,
    PushPlan,
    RemovePeer,
    SendNotice,
    StepDone,
    StepFailed,
    StopPush,
    WindowClosed,
    WindowOpened,
)
from workers.frame_socket import FrameSocket
from workers.transport_commands import PeerRemoved, SamplesObserved


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute the batch, as all ranks do; push what of it is this rank's."""

    batch: Batch
    pushes: tuple[PushPlan, ...]


@dataclass(frozen=True, slots=True)
class FollowerReady:
    """The rank's share of the model is loaded and its transport is up."""

    metadata: bytes
    pid: int


@dataclass(frozen=True, slots=True)
class Alive:
    """Sent at every report interval: a rank that is frozen says nothing."""


LeaderFrame = (
    RunStep | AddPeer | RemovePeer | OpenWindow | CloseWindow | PushNow | StopPush | FlushThenNotify | SendNotice | HardFence | Stop
)
FollowerFrame = (
    FollowerReady
    | Alive
    | PeerJoined
    | PeerRefused
    | PeerLost
    | PeerFenced
    | PeerRemoved
    | NoticeArrived
    | FlushDone
    | WindowOpened
    | WindowClosed
    | SamplesObserved
    | StepDone
    | StepFailed
    | Fatal
)
LEADER_TYPES: tuple[type, ...] = get_args(LeaderFrame)
FOLLOWER_TYPES: tuple[type, ...] = get_args(FollowerFrame)


class FrameCodec:
    """Of the frames of some types, told apart by name. Arrays are int64, of any shape."""

    def __init__(self, types: tuple[type, ...]) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_array_out)
        self._outer = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self._inner = {kind.__name__: msgspec.msgpack.Decoder[Any](kind, dec_hook=_array_in) for kind in types}

    def encode(self, frame: object) -> bytes:
        return self._encoder.encode((type(frame).__name__, frame))

    def decode(self, data: bytes) -> Any:
        """Raises ProtocolError."""
        try:
            name, value = self._outer.decode(data)
            return self._inner[name].decode(value)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise ProtocolError(f"malformed frame of a rank: {error}") from error


class FollowerSocket(FrameSocket[FollowerFrame, LeaderFrame]):
    """Rank 0's end of the socket to another rank."""

    def __init__(self, connected: socket.socket, rank: int) -> None:
        super().__init__(connected, FrameCodec(FOLLOWER_TYPES).decode, FrameCodec(LEADER_TYPES).encode, f"rank {rank}")
        self.rank = rank


class LeaderSocket(FrameSocket[LeaderFrame, FollowerFrame]):
    """Another rank's end of the socket to rank 0."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, FrameCodec(LEADER_TYPES).decode, FrameCodec(FOLLOWER_TYPES).encode, "rank 0")


def _array_out(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        return value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} is nothing that ranks tell each other")


def _array_in(kind: type, value: Any) -> Any:
    """int64 of the given shape, read-only. Raises ValueError where the bytes do not fit it."""
    shape, data = value
    return np.frombuffer(data, np.int64).reshape(shape)
