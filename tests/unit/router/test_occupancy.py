"""The limits of several processes: exact for all together, and a process that ended holds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from router.occupancy import OwnOccupancy, SharedOccupancy, shared_block

NUM_PROCESSES = 3


@pytest.fixture
def block() -> Iterator[int]:
    descriptor = shared_block(NUM_PROCESSES)
    yield descriptor
    os.close(descriptor)


def test_the_limit_is_of_all_processes_together(block: int) -> None:
    first, second = SharedOccupancy(block, 0, NUM_PROCESSES), SharedOccupancy(block, 1, NUM_PROCESSES)
    assert [place.enter(3) for place in (first, second, second, first)] == [True, True, True, False]
    second.leave()
    assert first.enter(3)
    assert not second.enter(3)
    first.set_queued(5)
    second.set_queued(2)
    assert (first.num_open, second.num_open, second.num_queued) == (3, 3, 7)


def test_a_process_that_ended_holds_nothing(block: int) -> None:
    first, second = SharedOccupancy(block, 0, NUM_PROCESSES), SharedOccupancy(block, 1, NUM_PROCESSES)
    assert first.enter(2)
    assert second.enter(2)
    second.set_queued(4)
    first.clear(1)
    assert (first.num_open, first.num_queued) == (1, 0)


_ENTERS = """
import sys
from router.occupancy import SharedOccupancy
place = SharedOccupancy(int(sys.argv[1]), int(sys.argv[2]), 3)
print(sum(place.enter(500) for _ in range(2000)))
"""


def test_processes_that_enter_at_once_never_exceed_the_limit(block: int) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _ENTERS, str(block), str(index)], pass_fds=(block,), stdout=subprocess.PIPE, text=True)
        for index in range(NUM_PROCESSES)
    ]
    assert sum(int(process.communicate()[0]) for process in processes) == 500
    assert SharedOccupancy(block, 0, NUM_PROCESSES).num_open == 500


def test_one_process_counts_for_itself() -> None:
    own = OwnOccupancy()
    assert [own.enter(1), own.enter(1)] == [True, False]
    own.leave()
    assert own.enter(1)
