"""`cluster`: real processes that write by process_vm_writev, and again over tcp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.nixl.binding import NixlBinding
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
        NixlBinding("127.0.0.1")
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    cluster = Cluster(lanes, agent="nixl_agent")
    yield cluster
    cluster.end()
