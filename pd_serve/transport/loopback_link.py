"""What one loopback transport knows of another, and the pure parts of their hello."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_serve.ids import PeerId
from pd_serve.transport.loopback_fabric import CheckedWrite, FlushAsked, Hello, NoticeSent, Port

PATHS = ("shm", "tcp")
"""Data paths, best first: one-sided, checked."""

_CREDITS = 16
"""CheckedWrites of one writer that may lie in a target's inbox; the rest wait at the writer."""


class LoopbackMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    port_id: int
    peer: PeerId
    pool_nbytes: int


@dataclass(slots=True)
class Link:
    """What this transport knows of one peer."""

    peer: PeerId
    port: Port
    pool_nbytes: int
    deadline: float
    hello_sent_at: float
    heard: Hello | None = None
    acknowledged: bool = False
    joined: bool = False
    one_sided: bool = False
    wrote_too_early: bool = False
    violations: int = 0
    """Of the peer's checked writes, since its last flush."""
    credits: int = _CREDITS
    outbox: deque[CheckedWrite | FlushAsked | NoticeSent] = field(default_factory=deque)
    flushes: dict[int, None] = field(default_factory=dict)
    """Tokens asked for and not answered, oldest first."""


def hello_digest(secret: bytes, hello: Hello, port_id: int) -> bytes:
    """Keyed digest of everything a hello says and of the port that says it."""
    text = repr((str(hello.sender), str(hello.receiver), hello.paths, hello.host_id, port_id))
    return hmac.new(secret, text.encode(), hashlib.sha256).digest()


def common_path(paths: tuple[str, ...], host_id: str, heard: Hello) -> str | None:
    """Best path that both sides offer; each side computes the same."""
    is_same_host = heard.host_id == host_id
    return next((path for path in PATHS if path in paths and path in heard.paths and (path != "shm" or is_same_host)), None)


def copy_bandwidth(nbytes: int) -> float:
    """Bytes per second of a copy of this size: what both paths are made of."""
    source: NDArray[np.uint8] = np.ones(nbytes, np.uint8)
    target = source.copy()  # Touched once: no page faults in the measurement.
    started = time.perf_counter()
    target[:] = source
    return nbytes / max(time.perf_counter() - started, 1e-9)
