"""Cores and threads."""

from __future__ import annotations

import os

import pytest

from pd_serve.cores import divide_cores, parse_cores, thread_env, usable_cores
from pd_serve.errors import ConfigError


def test_usable_cores_stay_within_the_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("num_cores", "num_workers", "expected"), [(8, 3, (3, 3, 2)), (2, 2, (1, 1)), (1, 4, (1, 1, 1, 1)), (6, 1, (6,))])
def test_cores_are_shared_out_and_nobody_gets_none(num_cores: int, num_workers: int, expected: tuple[int, ...]) -> None:
    assert divide_cores(num_cores, num_workers) == expected


def test_named_cores() -> None:
    assert parse_cores("") == frozenset()
    assert parse_cores("0") == {0}
    assert parse_cores(" 0 , 0-0") == {0}


@pytest.mark.parametrize("text", ["a", "1-", "-1", "0;1", "100000"])
def test_cores_that_are_none_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="cpu_affinity"):
        parse_cores(text)


def test_threads_wait_passively() -> None:
    assert thread_env(3) == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
