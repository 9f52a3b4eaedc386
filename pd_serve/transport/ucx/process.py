"""Knowing that a process on this host is dead, for certain: a pidfd checked against the process's start time.

A pidfd becomes readable when its process has ended (all threads gone, its memory released) and never refers to a later process with the
same pid. It does not become readable for a stopped process, which may go on writing.
"""

from __future__ import annotations

import os
import select
import signal

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process of one host, unambiguous although pids are reused."""

    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat, clock ticks since boot."""


def start_time_of(pid: int) -> int | None:
    """None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def current_process() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(pid, start_time_of(pid) or 0)


def open_process(identity: ProcessIdentity) -> int | None:
    """A pidfd of exactly that process, owned by the caller; None when it is gone."""
    if identity.pid <= 0:
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except (OSError, OverflowError):
        return None
    if start_time_of(identity.pid) != identity.start_time:  # read after the open: a reused pid shows here
        os.close(pidfd)
        return None
    return pidfd


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill_process(pidfd: int) -> bool:
    """SIGKILL, which a stopped process does not escape. False when it was gone already."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class ProcessWatch:
    """A set of pidfds behind one descriptor that is readable as soon as one of the processes has ended. Owns the pidfds given to it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pidfds: set[int] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, pidfd: int) -> None:
        self._epoll.register(pidfd, select.EPOLLIN)
        self._pidfds.add(pidfd)

    def discard(self, pidfd: int) -> None:
        """Stop watching and close it. Idempotent."""
        if pidfd in self._pidfds:
            self._pidfds.remove(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)

    def ended(self) -> tuple[int, ...]:
        """The pidfds whose process has ended; they stay watched until discarded."""
        if not self._pidfds:
            return ()
        return tuple(pidfd for pidfd, _ in self._epoll.poll(0))

    def close(self) -> None:
        for pidfd in tuple(self._pidfds):
            self.discard(pidfd)
        self._epoll.close()
