"""Every one-line mistake is found by the test that is named for it."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, survives


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str) -> None:
    assert survives(MUTATIONS[name]) == ""
