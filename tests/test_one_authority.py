from __future__ import annotations

import os
import ssl

import httpx

from tests.one_authority import VARIABLE, one_authority


def test_clients_made_in_tests_trust_one_authority() -> None:
    assert len(ssl.create_default_context().get_ca_certs()) == 1
    assert len(httpx.create_ssl_context().get_ca_certs()) == 1


def test_what_was_set_before_is_set_again() -> None:
    before = os.environ[VARIABLE]
    with one_authority():
        assert os.environ[VARIABLE] != before
    assert os.environ[VARIABLE] == before
