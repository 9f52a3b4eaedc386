"""Queues of frames towards routers: in order, bounded, and closed for a reason."""

from __future__ import annotations

import asyncio

from pd_serve.ids import LinkId, RouterId
from pd_serve.protocol.link import Pong, worker_codec
from workers.front_links import Links

FRAME_NBYTES = len(worker_codec().encode(Pong(1)))


async def test_frames_leave_in_order() -> None:
    links = Links()
    link = links.open(RouterId("r"))
    for number in range(5):
        links.deliver(link.link_id, Pong(number))
    decode = worker_codec().decode
    got = [await link.next_frame() for _ in range(5)]
    assert [decode(payload) for payload in got if payload] == [Pong(number) for number in range(5)]


async def test_limit_closes_the_slow_link_only_and_lets_its_queue_go() -> None:
    links = Links(limit_nbytes=10 * FRAME_NBYTES)
    slow, quick = links.open(RouterId("slow")), links.open(RouterId("quick"))
    for number in range(100):
        links.deliver(slow.link_id, Pong(1))
        links.deliver(quick.link_id, Pong(number % 2))
        assert await quick.next_frame()
    assert "too slowly" in (slow.closed or "")
    assert await slow.next_frame() is None
    assert quick.closed is None


async def test_sent_frames_do_not_count_against_the_limit() -> None:
    links = Links(limit_nbytes=2 * FRAME_NBYTES)
    link = links.open(RouterId("r"))
    for _ in range(1000):
        links.deliver(link.link_id, Pong(1))
        assert await link.next_frame()
    assert link.closed is None


async def test_same_router_replaces_its_link() -> None:
    links = Links()
    old = links.open(RouterId("r"))
    new = links.open(RouterId("r"))
    assert old.closed
    assert new.closed is None
    assert new.link_id != old.link_id


async def test_closing_wakes_whoever_waits_and_keeps_the_first_reason() -> None:
    links = Links()
    link = links.open(RouterId("r"))
    waiting = asyncio.create_task(link.next_frame())
    await asyncio.sleep(0)
    links.remove(link, "first")
    links.remove(link, "second")
    assert await waiting is None
    assert await link.until_closed() == "first"
    assert len(links) == 0
    links.deliver(link.link_id, Pong(1))
    links.deliver(LinkId(99), Pong(1))
