"""`nodes`: one parameter per implementation, closed after each test. `checked`: those whose target checks every write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pd_serve.errors import TransportUnavailableError
from tests.contract.implementations import IMPLEMENTATIONS, Implementation
from tests.transport_nodes import Nodes


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    yield from _made(request.param)


@pytest.fixture(
    params=[implementation for implementation in IMPLEMENTATIONS if not implementation.one_sided],
    ids=lambda implementation: implementation.name,
)
def checked(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """One-sided writes ask nobody, so there is no window that could refuse them."""
    yield from _made(request.param)


def _made(implementation: Implementation) -> Iterator[Nodes]:
    try:
        factory = implementation.factory()
    except (ImportError, TransportUnavailableError) as error:
        pytest.skip(f"{implementation.name}: {error}")
    nodes = Nodes(factory, implementation.lanes, implementation.one_sided)
    yield nodes
    nodes.close()
