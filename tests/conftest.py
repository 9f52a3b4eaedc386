"""What holds for every test: hypothesis draws the same examples in every run, files are shared out so that clusters run alone, and clients
that are made trust one authority.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from tests.one_authority import one_authority
from tests.shares import new_scheduler

settings.register_profile("suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    run = ExitStack()
    run.enter_context(one_authority())
    config.add_cleanup(run.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Of `--dist loadfile` alone."""
    return new_scheduler(config, log) if config.getvalue("dist") == "loadfile" else None
