"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below those that the kernel gives to outgoing connections: what is free now is not taken before the server has it."""


def free_ports(count: int) -> range:
    """Consecutive ports of 127.0.0.1 that nobody has."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return range(first, first + count)
    raise AssertionError(f"no {count} free ports in a row between {_LOWEST} and {_HIGHEST}")


def free_port() -> int:
    return free_ports(1)[0]
