"""Which process of pytest-xdist takes which file."""

from __future__ import annotations

from pathlib import Path

from tests.shares import OTHERS, SECONDS, seconds_of

TESTS = Path(__file__).parent


def test_every_file_that_is_listed_exists() -> None:
    assert [file for file in SECONDS if not (TESTS / file).is_file()] == []


def test_files_of_clusters_take_longer_than_others() -> None:
    assert seconds_of("tests/e2e/test_new.py") > seconds_of("tests/sim/test_new.py") > seconds_of("tests/unit/kv/test_new.py") == OTHERS
