"""`cluster`: real processes on shared memory, and again on tcp."""

from __future__ import annotations

import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.ucx.bindings import open_binding
from tests.contract.ucx.fixtures import cluster, shm_cluster, tcp_cluster

__all__ = ["cluster", "shm_cluster", "tcp_cluster"]


@pytest.fixture
def agent() -> str:
    try:
        open_binding("auto")
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    return "agent"
