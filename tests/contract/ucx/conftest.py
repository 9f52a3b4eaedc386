"""`cluster`: real processes on shared memory, and again on tcp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.ucx.bindings import open_binding
from tests.contract.ucx.processes import Cluster


@pytest.fixture(params=["shm", "tcp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from _cluster(request.param)


@pytest.fixture
def tcp_cluster() -> Iterator[Cluster]:
    yield from _cluster("tcp")


@pytest.fixture
def shm_cluster() -> Iterator[Cluster]:
    yield from _cluster("shm")


def _cluster(lanes: str) -> Iterator[Cluster]:
    try:
        open_binding("auto")
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    cluster = Cluster(lanes)
    yield cluster
    cluster.end()
