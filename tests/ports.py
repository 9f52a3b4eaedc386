"""Ports for servers that tests start: nobody else gets one while the test process that asked for it lives."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

_LOWEST, _HIGHEST = 20_000, 32_000
"""Below those that the kernel gives to outgoing connections: what is free now is not taken before the server has it."""


def free_ports(count: int) -> range:
    """Consecutive ports of 127.0.0.1 that nobody has, each given once. Other test processes keep off them as long as this one lives."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        ports = range(first, first + count)
        if _are_free(ports) and all(map(_is_ours_alone, ports)):
            return ports
    raise AssertionError(f"no {count} free ports in a row between {_LOWEST} and {_HIGHEST}")


def free_port() -> int:
    return free_ports(1)[0]


def _are_free(ports: range) -> bool:
    with ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_ours_alone(port: int) -> bool:
    """Lock a file that stands for the port. Its descriptor is never closed: the lock is held until this process ends."""
    folder = Path(tempfile.gettempdir()) / f"pd-serve-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True
