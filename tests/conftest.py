"""What holds for every test: hypothesis draws the same examples in every run, and files are shared out so that clusters run alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.shares import new_scheduler

settings.register_profile("suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Of `--dist loadfile` alone."""
    return new_scheduler(config, log) if config.getvalue("dist") == "loadfile" else None
