"""A worker with a live link, as the pool keeps it and everybody else reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_serve.ids import PeerId
from pd_serve.protocol.client import Link
from pd_serve.protocol.link import Load, PeerStatus, Role, Welcome


@dataclass(slots=True)
class LinkedWorker:
    """It has been welcomed, reported its load and was found compatible."""

    peer: PeerId
    address: str
    link: Link
    welcome: Welcome
    load: Load
    linked_at: float
    peer_status: PeerStatus = field(default_factory=lambda: PeerStatus(()))
    joined: frozenset[PeerId] = frozenset()
    is_leaving: bool = False
    """An operator removed it: what runs there ends, nothing new begins."""
    watchers: tuple[Callable[[PeerId], object], ...] = ()
    """Called whenever it may look otherwise to a policy: what is made of it may be kept until then."""
    _waiting: list[tuple[Callable[[], bool], asyncio.Future[bool]]] = field(default_factory=list)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in _LOOKS:
            for changed in getattr(self, "watchers", ()):
                changed(self.peer)

    @property
    def has_reported(self) -> bool:
        return self.load.blocks.total > 0

    @property
    def is_available(self) -> bool:
        """Takes new requests."""
        return self.has_reported and not self.load.draining and not self.is_leaving

    @property
    def can_decode(self) -> bool:
        return self.load.role is not Role.PREFILL

    @property
    def num_pool_tokens(self) -> int:
        return self.load.blocks.total * self.welcome.info.layout.block_size

    async def until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Looked at now and with each of its reports. False: the link ended, or the time is up."""
        if is_so():
            return True
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry = (is_so, told)
        self._waiting.append(entry)
        try:
            return await asyncio.wait_for(told, timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiting.remove(entry)

    def reported(self) -> None:
        """For the pool: its load has changed."""
        for is_so, told in self._waiting:
            if not told.done() and is_so():
                told.set_result(True)

    def lost(self) -> None:
        """For the pool: its link has ended."""
        for _, told in self._waiting:
            if not told.done():
                told.set_result(False)


_LOOKS = frozenset({"load", "peer_status", "joined", "is_leaving"})
"""What WorkerView and is_available are made of and that changes."""
