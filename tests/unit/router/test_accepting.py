"""Clients that come together are accepted together, however long a turn of the loop takes."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from router.main import ACCEPTS_AT_ONCE, accepting_together


class _Counting(asyncio.Protocol):
    num_accepted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).num_accepted += 1
        transport.close()


async def _accepted_in(num_turns: int) -> int:
    class Counting(_Counting):
        pass

    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=ACCEPTS_AT_ONCE) as listener:
        servers = [await loop.create_server(Counting, sock=each) for each in accepting_together(listener)]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(ACCEPTS_AT_ONCE)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for closing in (*servers, *clients):
            closing.close()
    return Counting.num_accepted


def test_clients_that_come_together_are_accepted_within_a_few_turns() -> None:
    assert uvloop.run(_accepted_in(num_turns=ACCEPTS_AT_ONCE // 4)) == ACCEPTS_AT_ONCE
