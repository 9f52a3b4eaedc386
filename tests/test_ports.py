"""Ports for servers that tests start: each is given to one test process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ports import free_port, free_ports

ROOT = Path(__file__).resolve().parent.parent


def test_a_port_is_given_once() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) == 20
    assert not ports & set(free_ports(3))


def test_another_process_keeps_off_a_port_that_was_given() -> None:
    port = free_port()
    code = f"from tests.ports import _is_ours_alone; print(_is_ours_alone({port}))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
