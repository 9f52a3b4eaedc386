"""The simulated WebSocket between a router and a worker: ordered both ways; when it ends, each end finds out in its own time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_serve.ids import LinkId
from pd_serve.protocol.link import RouterFrame, WorkerFrame
from tests.sim.core import Channel
from workers.events import FrameReceived, LinkClosed, LinkOpened

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.router import SimRouter

LINK_DELAY_S = (0.0001, 0.001)


class Link:
    def __init__(self, router: SimRouter, node: Node, link_id: LinkId, spike: tuple[float, float]) -> None:
        self.router = router
        self.node = node
        self.link_id = link_id
        self.is_alive = True
        self.router_knows_end = False
        self.node_knows_end = False
        self._down = Channel(node, LINK_DELAY_S, spike)
        self._up = Channel(router, LINK_DELAY_S, spike)

    def open(self) -> None:
        """Both ends see the link from here on; frames arrive after."""
        self.node.links[self.link_id] = self
        self.node.handle(LinkOpened(self.link_id, self.router.router_id))

    def to_node(self, frame: RouterFrame) -> None:
        if self.is_alive:
            self._down.send(lambda: self._arrive_at_node(frame))

    def to_router(self, frame: WorkerFrame) -> None:
        if self.is_alive:
            self._up.send(lambda: self._arrive_at_router(frame))

    def cut(self) -> None:
        """What is on its way is lost, except what arrives before the end is noticed."""
        if not self.is_alive:
            return
        self.is_alive = False
        loop = self.router.loop
        loop.after(loop.rng.uniform(0.0, 0.3), lambda: self.node.call(self.end_at_node))
        loop.after(loop.rng.uniform(0.0, 0.3), lambda: self.router.call(self.end_at_router))

    def end_at_node(self) -> None:
        self.is_alive = False
        if not self.node_knows_end:
            self.node_knows_end = True
            self.node.links.pop(self.link_id, None)
            self.node.post(LinkClosed(self.link_id))

    def end_at_router(self) -> None:
        self.is_alive = False
        if not self.router_knows_end:
            self.router_knows_end = True
            self.router.on_link_lost(self)

    def _arrive_at_node(self, frame: RouterFrame) -> None:
        if not self.node_knows_end:
            self.node.post(FrameReceived(self.link_id, frame))

    def _arrive_at_router(self, frame: WorkerFrame) -> None:
        if not self.router_knows_end:
            self.router.on_frame(self, frame)
