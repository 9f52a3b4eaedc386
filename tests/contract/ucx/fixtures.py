"""Clusters for tests: of the agent that a conftest names in its fixture `agent`, which skips where its library is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.ucx.processes import Cluster


@pytest.fixture(params=["shm", "tcp"])
def cluster(request: pytest.FixtureRequest, agent: str) -> Iterator[Cluster]:
    yield from _cluster(request.param, agent)


@pytest.fixture
def tcp_cluster(agent: str) -> Iterator[Cluster]:
    yield from _cluster("tcp", agent)


@pytest.fixture
def shm_cluster(agent: str) -> Iterator[Cluster]:
    yield from _cluster("shm", agent)


def _cluster(lanes: str, agent: str) -> Iterator[Cluster]:
    cluster = Cluster(lanes, agent=agent)
    yield cluster
    cluster.end()
