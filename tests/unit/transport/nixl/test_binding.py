"""NIXL where it is not installed."""

from __future__ import annotations

import sys

import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.registry import transport_factory
from tests.transport_nodes import peer_id, settings_for


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl_cu12", "nixl_cu12._bindings", "nixl_cu13", "nixl_cu13._bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportUnavailableError, match=r"pip install 'pd-serve\[nixl\]'") as missing:
        transport_factory("nixl")(settings_for(peer_id("a"), "auto"), lambda event: None)
    assert "\n" not in missing.value.message
