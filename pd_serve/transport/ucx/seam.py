"""The calls of UCX that this transport is written against. A binding implements them: libucp.py (ctypes) and ucxpy.py (ucx-py).

Everything here is used by the owner thread alone. No call blocks: what takes time returns a Request that is polled between calls of
`Worker.progress`. Receivers and failures are recorded inside `progress`; no other call of the library may be made from a receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

OK = 0
IN_PROGRESS = 1

MAX_HEADER_NBYTES = 6144
"""Longest header of a message. UCX 1.22 takes 8115 bytes on posix and 8140 on tcp (ucp_worker_query)."""


class Channel(IntEnum):
    """Kinds of message; the number is the active-message id (or tag) on the wire."""

    JOIN = 0x51
    SESSION = 0x52
    DATA = 0x53


Receiver = Callable[[bytes, int, int], None]
"""Called inside `progress` with (header, address of the payload, length of the payload); the payload is gone when it returns."""


class Request(Protocol):
    def poll(self) -> int:
        """OK, IN_PROGRESS, or a negative status. A finished request has released itself."""
        ...

    def release(self) -> None:
        """Stop caring: the operation goes on, nobody asks for its status again. Idempotent."""
        ...


class RemoteKey(Protocol):
    def address_here(self, address: int, nbytes: int) -> int | None:
        """Where this process sees the peer's memory of `nbytes` from `address`, if the library has mapped all of it; until `close`."""
        ...

    def close(self) -> None: ...


class Memory(Protocol):
    address: int
    nbytes: int

    def pack_key(self) -> bytes:
        """What a peer needs to write into this memory on this context's lane."""
        ...

    def close(self) -> None: ...


class Endpoint(Protocol):
    @property
    def failure(self) -> str | None:
        """Why this endpoint can deliver nothing any more; None while it is healthy."""
        ...

    def unpack_key(self, packed: bytes) -> RemoteKey:
        """Raises TransportError when the key is not one of this library and lane."""
        ...

    def put(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], key: RemoteKey, memory: Memory | None) -> int:
        """Write `sizes[i]` bytes from address `local[i]` to the peer's address `remote[i]`, for all i in one loop.

        Returns how many are still under way; a failing put marks the endpoint as failed. The source must not change until a flush.
        """
        ...

    def flush(self) -> Request:
        """Done once all puts before it are visible in the peer's memory (one-sided lanes only; says nothing of messages)."""
        ...

    def send(self, channel: Channel, header: bytes, address: int = 0, nbytes: int = 0) -> Request:
        """Send a message, in order. The payload must not change until the request is done; that says nothing of its arrival."""
        ...

    def close(self) -> None:
        """Let go at once; what is under way is dropped. Idempotent."""
        ...


class Worker(Protocol):
    efd: int
    """Descriptor that becomes readable when, after a successful `arm`, there is something to progress."""

    def address(self) -> bytes: ...

    def progress(self) -> bool:
        """True when something moved. Raises what a receiver raised."""
        ...

    def arm(self) -> bool:
        """False: there is something to progress (or a send that cannot be waited for), do not sleep."""
        ...

    def set_receiver(self, channel: Channel, receiver: Receiver) -> None: ...

    def connect(self, address: bytes) -> Endpoint:
        """Raises TransportError when no lane of this context leads to that address."""
        ...

    def close(self) -> None: ...


class Context(Protocol):
    def create_worker(self) -> Worker: ...

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed host memory of the kind this context's best lane can write into from another process."""
        ...

    def register(self, address: int, nbytes: int) -> Memory: ...

    def close(self) -> None: ...


class Binding(Protocol):
    name: str
    version: str
    """Of the UCX library, such as `1.22.0`."""
    location: str
    """Where the library was loaded from."""
    messaging: str
    """`am` or `tag`: how messages travel. Two processes must use the same."""

    def open_context(self, options: Mapping[str, str], one_sided: bool) -> Context:
        """`options` as in `UCX_<KEY>`; without `one_sided` the context has no RMA feature. Raises TransportError (no such device)."""
        ...
