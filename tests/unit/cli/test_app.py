"""The commands as a user types them: help that teaches, one line per error, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pd_serve import __version__
from pd_serve.cli.app import run

COMMANDS = ("up", "router", "prefill", "decode", "colocated", "status", "chat", "doctor")
UNUSED = "http://127.0.0.1:9"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("pd-serve: ")
    return code, lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert f"pd-serve {command}" in text


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", text)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("up", "--prefil", "2"), 2, ("--prefil", "pd-serve up --help")),
        (("up", "--prefill", "many"), 2, ("--prefill", "integer")),
        (("up", "--decode", "0"), 1, ("nothing would decode",)),
        (("up", "--dtype", "fp32"), 1, ("--dtype", "model.dtype", "float32")),
        (("up", "--model", "no/such/folder"), 1, ("no/such/folder",)),
        (("up", "--set", "kv.blocksize=3"), 1, ("did you mean kv.block_size?",)),
        (("up", "--config", "/no/such.toml"), 1, ("/no/such.toml",)),
        (("serve",), 2, ("serve",)),
        (("decode", "--host", "0.0.0.0"), 1, ("cluster_secret is needed",)),
        (("prefill", "--set", "engine.cpu_affinity=4096", "--port", "0"), 1, ("no core 4096",)),
        (("status", "--router", UNUSED), 1, (UNUSED, "pd-serve up")),
        (("status", "--router", "nonsense"), 1, ("nonsense",)),
        (("chat", "hello", "--url", UNUSED), 1, (UNUSED,)),
    ],
)
def test_an_error_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    got, line = error_of(capsys, *arguments)
    assert got == code
    for word in words:
        assert word in line


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--decode", "0", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_module_and_script_are_the_same_command() -> None:
    for command in ([sys.executable, "-m", "pd_serve.cli"], [str(Path(sys.executable).with_name("pd-serve"))]):
        assert subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout.strip() == __version__


def test_command_line_loads_nothing_heavy() -> None:
    """Help must be quick, and a launcher must not hold a model's libraries."""
    script = "import sys; from pd_serve.cli.app import run; run(['--help']); print(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    for heavy in ("torch", "transformers", "fastapi", "numpy", "httpx", "workers", "router"):
        assert heavy not in loaded
