"""The links of a worker: one per router, each with its own bounded queue of frames on their way out.

Lives in the front's event loop. A router that reads too slowly loses its link (and with it its attempts here) rather than the worker its
memory; the other routers notice nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from pd_serve.ids import LinkId, RouterId
from pd_serve.protocol.link import WorkerFrame, worker_codec

MAX_BACKLOG_NBYTES = 16 * 1024 * 1024
"""Bytes that may wait for one router."""


class Link:
    """Frames on their way to one router. `closed` holds the reason once nobody may send any more."""

    def __init__(self, link_id: LinkId, router_id: RouterId) -> None:
        self.link_id = link_id
        self.router_id = router_id
        self.closed: str | None = None
        self._frames: deque[bytes] = deque()
        self._nbytes = 0
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    def push(self, payload: bytes, limit_nbytes: int) -> None:
        """Queue one encoded frame; past the limit the link closes instead and lets its queue go."""
        if self.closed is not None:
            return
        self._nbytes += len(payload)
        if self._nbytes > limit_nbytes:
            self.close(f"router {self.router_id} reads too slowly: {self._nbytes} bytes were waiting")
            return
        self._frames.append(payload)
        self._wake.set()

    def close(self, reason: str) -> None:
        """The first reason stays."""
        if self.closed is None:
            self.closed = reason
            self._frames.clear()
            self._wake.set()
            self._ended.set()

    async def until_closed(self) -> str:
        """The reason, once there is one: also when the task that sends is stuck behind a router that does not read."""
        await self._ended.wait()
        return self.closed or ""

    async def next_frame(self) -> bytes | None:
        """The oldest frame, once there is one; None when the link is closed."""
        while not self._frames:
            if self.closed is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        payload = self._frames.popleft()
        self._nbytes -= len(payload)
        return payload


class Links:
    """All live links by number. A router that comes again replaces its former link: that one is dead, whether noticed or not."""

    def __init__(self, limit_nbytes: int = MAX_BACKLOG_NBYTES) -> None:
        self._limit_nbytes = limit_nbytes
        self._links: dict[LinkId, Link] = {}
        self._next_id = 1
        self._encode: Callable[[WorkerFrame], bytes] = worker_codec().encode

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        return iter(tuple(self._links.values()))

    def has_router(self, router_id: RouterId) -> bool:
        """A live link of this router is here."""
        return any(link.router_id == router_id and link.closed is None for link in self._links.values())

    def open(self, router_id: RouterId) -> Link:
        for link in self:
            if link.router_id == router_id:
                link.close(f"router {router_id} opened another link")
        link = Link(LinkId(self._next_id), router_id)
        self._next_id += 1
        self._links[link.link_id] = link
        return link

    def remove(self, link: Link, reason: str) -> None:
        """Idempotent."""
        link.close(reason)
        self._links.pop(link.link_id, None)

    def deliver(self, link_id: LinkId, frame: WorkerFrame) -> None:
        """To a link that is gone: dropped, its attempts are cancelled anyway."""
        link = self._links.get(link_id)
        if link is not None:
            link.push(self._encode(frame), self._limit_nbytes)

    def close_all(self, reason: str) -> None:
        for link in self:
            link.close(reason)
