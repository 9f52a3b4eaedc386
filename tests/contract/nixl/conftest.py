"""`cluster`: real processes that write by process_vm_writev, and again over tcp."""

from __future__ import annotations

import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.nixl.binding import NixlBinding
from tests.contract.ucx.fixtures import cluster, shm_cluster, tcp_cluster

__all__ = ["cluster", "shm_cluster", "tcp_cluster"]


@pytest.fixture
def agent() -> str:
    try:
        NixlBinding("127.0.0.1")
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    return "nixl_agent"
