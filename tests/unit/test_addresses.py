"""Where processes listen, and what they tell others."""

from __future__ import annotations

import socket

import pytest

from pd_serve.addresses import advertised_host, bound_socket, http_address, is_loopback, require_secret_beyond_loopback
from pd_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    if loopback:
        require_secret_beyond_loopback(host, "")
    else:
        with pytest.raises(ConfigError, match="cluster_secret"):
            require_secret_beyond_loopback(host, "")
    require_secret_beyond_loopback(host, "secret")


def test_advertised_host_is_never_a_wildcard() -> None:
    assert advertised_host("10.0.0.5", "", ()) == "10.0.0.5"
    assert advertised_host("0.0.0.0", "me.example", ()) == "me.example"
    assert advertised_host("0.0.0.0", "", ("http://127.0.0.1:8000",)) == "127.0.0.1"
    assert advertised_host("0.0.0.0", "", ()) == socket.gethostname()


def test_ipv6_addresses_are_bracketed() -> None:
    assert http_address("::1", 80) == "http://[::1]:80"
    assert http_address("10.0.0.1", 80) == "http://10.0.0.1:80"


def test_bound_port_is_held_and_a_taken_one_is_one_line() -> None:
    with bound_socket("127.0.0.1", 0) as held:
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bound_socket("203.0.113.1", 0)
