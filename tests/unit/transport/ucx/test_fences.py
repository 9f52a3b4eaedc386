"""Who can still write here, told by the ends of real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.transport.ucx.fences import Fences
from pd_serve.transport.ucx.process import ProcessIdentity, current_process, open_process, start_time_of

PEER = PeerId(WorkerId("peer"), Incarnation(1))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def fences() -> Iterator[Fences]:
    made = Fences()
    yield made
    made.close()


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    start_time = start_time_of(process.pid)
    assert start_time is not None
    return ProcessIdentity(process.pid, start_time)


def wait(fences: Fences, timeout_s: float = 60.0) -> bool:
    return bool(select.select([fences], [], [], timeout_s)[0])


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    mine = current_process()
    pidfd = open_process(mine)
    assert pidfd is not None
    os.close(pidfd)
    assert open_process(ProcessIdentity(mine.pid, mine.start_time + 1)) is None
    for pid in (0, -1, 1 << 40):
        assert open_process(ProcessIdentity(pid, 0)) is None


def test_the_end_of_a_process_is_told_once_and_fences_it(fences: Fences, child: subprocess.Popen[bytes]) -> None:
    assert fences.watch(PEER, identity(child))
    fences.expose(PEER)
    assert fences.take_ended() == []
    assert fences.is_alive(PEER)
    child.kill()
    assert wait(fences)
    assert not fences.is_alive(PEER)
    assert fences.take_ended() == [PEER]
    assert not fences.can_write(PEER)
    assert fences.take_ended() == []


def test_a_stopped_process_can_still_write_and_is_ended_by_force(fences: Fences, child: subprocess.Popen[bytes]) -> None:
    fences.watch(PEER, identity(child))
    fences.expose(PEER)
    child.send_signal(signal.SIGSTOP)
    assert not wait(fences, 0.1)
    assert fences.can_write(PEER)
    assert fences.kill(PEER)
    assert wait(fences)
    assert fences.take_ended() == [PEER]


def test_a_forgotten_peer_that_holds_a_key_is_watched_in_silence(fences: Fences, child: subprocess.Popen[bytes]) -> None:
    fences.watch(PEER, identity(child))
    fences.expose(PEER)
    fences.forget(PEER)
    assert fences.can_write(PEER)
    child.kill()
    assert wait(fences)
    assert fences.take_ended() == []
    assert not fences.can_write(PEER)


def test_letting_go_of_the_key_ends_the_watch_of_a_forgotten_peer(fences: Fences, child: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fences.watch(PEER, identity(child))
    fences.expose(PEER)
    fences.forget(PEER)
    fences.release(PEER)
    assert not fences.can_write(PEER)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_has_ended_before_is_not_watched(fences: Fences, child: subprocess.Popen[bytes]) -> None:
    gone = identity(child)
    child.kill()
    child.wait()
    assert not fences.watch(PEER, gone)
    assert not fences.kill(PEER)
