"""The soak at two lengths; `make soak` and `python -m tests.faults.soak --minutes N` run it for as long as one likes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.faults.soak import soak


@pytest.mark.parametrize("seconds", [30, pytest.param(180, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_under_load_cancels_kills_and_freezes_every_answer_is_right(tmp_path: Path, record_property: Any, seconds: int) -> None:
    report = soak(tmp_path, seed=seconds, seconds=seconds)
    record_property("figures", json.dumps(asdict(report)))
    assert sum(report.faults.values()) >= seconds // 20
    assert report.answers > 0
    assert report.asked_again > 0
    assert report.router_fds[1] <= report.router_fds[0] + 8
