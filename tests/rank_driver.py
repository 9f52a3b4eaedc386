"""Speaks to a rank over its socket as a front with one router would. For tests; blocking, every wait has a deadline."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from pd_serve.ids import AttemptId, LinkId, PeerId, RouterId
from pd_serve.protocol.cache_events import CacheEvents
from pd_serve.protocol.link import (
    Failed,
    FromRouter,
    FrontFrame,
    LinkUp,
    Load,
    Open,
    PeerInfo,
    Peers,
    PeerStatus,
    Prefill,
    PrefillDone,
    RankFrame,
    RankReady,
    Refused,
    Report,
    Reserved,
    RouterFrame,
    Step,
    TokenOutput,
    ToRouter,
    Welcome,
    WorkerFrame,
    front_codec,
    rank_codec,
)
from pd_serve.protocol.sampling import SamplingParams
from tests.patience import PATIENCE_S

LINK = LinkId(1)
_LENGTH = struct.Struct("<I")
F = TypeVar("F")


class RankDriver:
    """One rank, one link. Steps are kept split, one output each; `reports` collects what is not for a router."""

    def __init__(self, connection: socket.socket, timeout_s: float = PATIENCE_S) -> None:
        self._socket = connection
        self.timeout_s = timeout_s
        self._decode = rank_codec().decode
        self._encode = front_codec().encode
        self.frames: list[WorkerFrame] = []
        self.reports: list[RankFrame] = []
        self.welcome: Welcome | None = None

    def send(self, frame: FrontFrame) -> None:
        payload = self._encode(frame)
        self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

    def tell(self, frame: RouterFrame) -> None:
        self.send(FromRouter(LINK, frame))

    def wait_ready(self) -> PeerInfo:
        """Take RankReady, bring the link up."""
        ready = self.wait_rank(RankReady)
        self.welcome = ready.welcome
        self.send(LinkUp(LINK, RouterId("test")))
        return ready.welcome.info

    def wait(self, kind: type[F], accept: Callable[[F], bool] = lambda _: True) -> F:
        """The first frame for the router of that kind, new or kept; it and nothing else is taken out."""
        return self._wait(self.frames, kind, accept)

    def wait_of(self, attempt_id: int, kind: type[F]) -> F:
        """The first such frame of the attempt. AssertionError at once, in the rank's words, where it refuses or fails it instead."""
        frame = self.wait(object, lambda frame: isinstance(frame, (kind, Refused, Failed)) and attempt_of(frame) == attempt_id)
        if not isinstance(frame, kind):
            raise AssertionError(f"no {kind.__name__}: {frame}")
        return frame

    def wait_rank(self, kind: type[F], accept: Callable[[F], bool] = lambda _: True) -> F:
        return self._wait(self.reports, kind, accept)

    def _wait(self, kept: list[WorkerFrame] | list[RankFrame], kind: type[F], accept: Callable[[F], bool]) -> F:
        deadline = time.monotonic() + self.timeout_s
        while True:
            for index, frame in enumerate(kept):
                if isinstance(frame, kind) and accept(frame):
                    del kept[index]
                    return frame
            if not self._receive(deadline - time.monotonic()):
                # What says why is not what comes at every interval.
                seen = [frame for frame in [*self.reports, *self.frames] if not isinstance(frame, Load | Report | CacheEvents)]
                raise TimeoutError(f"no {kind.__name__} within {self.timeout_s} s; seen: {seen[-5:]}")

    def _receive(self, timeout_s: float) -> bool:
        if timeout_s <= 0:
            return False
        self._socket.settimeout(timeout_s)
        try:
            (nbytes,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            frame = self._decode(self._exactly(nbytes))
        except TimeoutError:
            return False
        if isinstance(frame, ToRouter):
            inner = frame.frame
            self.frames += [Step((output,)) for output in inner.outputs] if isinstance(inner, Step) else [inner]
        else:
            self.reports.append(frame)
        return True

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self._socket.recv(nbytes - len(data))
            if not part:
                raise EOFError("the rank has closed its socket")
            data += part
        return data


def join(*drivers: RankDriver) -> None:
    """Introduce the ranks to each other and wait until all have joined all."""
    infos = tuple(driver.welcome.info for driver in drivers if driver.welcome is not None)
    for driver in drivers:
        driver.tell(Peers(infos))
    for driver in drivers:
        driver.wait(PeerStatus, lambda status: sum(state.joined for state in status.states) == len(drivers) - 1)


def attempt_of(frame: object) -> AttemptId | None:
    """The one that a frame is about; None: it is about none."""
    if isinstance(frame, Step):
        return frame.outputs[0].attempt_id
    return frame.attempt_id if isinstance(frame, Reserved | Refused | Failed | PrefillDone) else None


def tokens_of(driver: RankDriver, attempt_id: AttemptId) -> list[TokenOutput]:
    """Collect an attempt's tokens until its finish."""
    outputs: list[TokenOutput] = []
    while not outputs or outputs[-1].finish is None:
        outputs += driver.wait_of(attempt_id, Step).outputs
    return outputs


def open_local(decode: RankDriver, attempt_id: int, prompt: tuple[int, ...], sampling: SamplingParams) -> Reserved:
    decode.tell(Open(AttemptId(attempt_id), prompt, 0, sampling, None, 30.0))
    return decode.wait_of(attempt_id, Reserved)


def open_pair(prefill: RankDriver, decode: RankDriver, attempt_id: int, prompt: tuple[int, ...], sampling: SamplingParams) -> Reserved:
    """Open on decode with `prefill` as the writer, and start the prefill."""
    assert prefill.welcome is not None
    writer: PeerId = prefill.welcome.info.peer
    decode.tell(Open(AttemptId(attempt_id), prompt, 0, sampling, writer, 30.0))
    reserved = decode.wait_of(attempt_id, Reserved)
    assert reserved.target is not None
    prefill.tell(Prefill(AttemptId(attempt_id), prompt, 0, sampling, reserved.target))
    return reserved


def run_pair(
    prefill: RankDriver, decode: RankDriver, attempt_id: int, prompt: tuple[int, ...], sampling: SamplingParams
) -> list[TokenOutput]:
    open_pair(prefill, decode, attempt_id, prompt, sampling)
    prefill.wait_of(attempt_id, PrefillDone)
    return tokens_of(decode, AttemptId(attempt_id))
