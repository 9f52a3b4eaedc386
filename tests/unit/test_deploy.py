"""What operators are handed works as written: settings files load, compose files parse, every command line is one the CLI takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pd_serve.cli.app import app
from pd_serve.config_sources import RoleTable, Sources, load_config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILES = sorted((ROOT / "docker").glob("compose.*.yaml"))
SETTINGS_FILES = sorted((ROOT / "configs").rglob("*.toml"))
COMMANDS = ("up", "router", "prefill", "decode", "colocated", "status", "chat", "doctor")
_COMMAND = re.compile(rf"^[\s#$@>]*(?:[\w./()$]*/)?(?:docker run (?:\S+ )*?pd-serve:\w+|pd-serve) ((?:{'|'.join(COMMANDS)})\b.*)")
PAGES = [ROOT / "README.md", ROOT / "Makefile", ROOT / "pd_serve/cli/app.py", *sorted((ROOT / "docs").glob("*.md")), *SETTINGS_FILES]


def parse(arguments: list[str]) -> dict[str, Any]:
    """Through the CLI's own parser, without running anything; the options by name. Raises what the parser raises."""
    root: Any = typer.main.get_command(app)
    name, *rest = arguments
    context = root.commands[name].make_context(f"pd-serve {name}", rest)
    parameters: dict[str, Any] = context.params
    return parameters


def env_example() -> dict[str, str]:
    lines = (ROOT / "docker/.env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolated(value: object, env: dict[str, str]) -> object:
    """Compose's ${NAME:-default} and ${NAME:?message}."""
    if isinstance(value, dict):
        return {key: interpolated(inner, env) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolated(inner, env) for inner in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, operator, rest = match["name"], match["operator"], match["rest"]
        if env.get(name):
            return env[name]
        assert operator == ":-", f"{name} is not set: {rest}"
        return str(rest)

    return re.sub(r"\$\{(?P<name>\w+)(?P<operator>:[-?])?(?P<rest>[^}]*)\}", replace, value)


def services(path: Path, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    composed = interpolated(yaml.safe_load(path.read_text()), env)
    assert isinstance(composed, dict)
    return composed["services"]  # type: ignore[no-any-return]


# ---- settings files


@pytest.mark.parametrize("path", SETTINGS_FILES, ids=lambda path: path.stem)
def test_settings_file_loads_for_every_role(path: Path) -> None:
    configs = [load_config(Sources(file=path), role) for role in (None, *RoleTable)]
    assert configs[0].launch.decode + configs[0].launch.colocated > 0
    for config in configs:
        assert (config.model.id, config.transport.name) == (configs[0].model.id, configs[0].transport.name), "workers could not join"


def test_example_files_say_what_their_names_say() -> None:
    counts = {path.stem: load_config(Sources(file=path)).launch for path in SETTINGS_FILES}
    assert (counts["1p1d"].prefill, counts["1p1d"].decode, counts["1p1d"].colocated) == (1, 1, 0)
    assert (counts["2p2d"].prefill, counts["2p2d"].decode) == (2, 2)
    assert (counts["colocated"].prefill, counts["colocated"].decode, counts["colocated"].colocated) == (0, 0, 1)
    hetero = ROOT / "configs/hetero.toml"
    prefill, decode = (load_config(Sources(file=hetero), role) for role in (RoleTable.PREFILL, RoleTable.DECODE))
    assert prefill.engine != decode.engine
    assert prefill.kv.block_size != decode.kv.block_size


# ---- compose


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.stem)
def test_compose_commands_and_settings_are_taken(path: Path) -> None:
    for env in (env_example(), {"CLUSTER_SECRET": "x"}):
        found = services(path, env)
        assert {"router", "prefill", "decode"} <= found.keys()
        for name, service in found.items():
            if name == "room":
                continue
            options = parse([str(word) for word in service["command"]])
            assert options["host"] == "0.0.0.0"
            config = load_config(Sources(env=service["environment"]))
            assert config.security.cluster_secret
            assert str(options["port"]) in json.dumps(service["healthcheck"]["test"])
            if name != "router":
                assert list(options["router"]) == ["http://router:8000"]


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.stem)
def test_workers_share_memory_and_process_ids_through_a_room_of_their_own(path: Path) -> None:
    found = services(path, env_example())
    assert found["room"]["ipc"] == "shareable"
    for name in ("prefill", "decode"):
        assert found[name]["ipc"] == found[name]["pid"] == "service:room"
    size = found["room"]["shm_size"]
    workers = sum(int(found[name].get("deploy", {}).get("replicas", 1)) for name in ("prefill", "decode"))
    pools = workers * int(found["decode"]["environment"]["PD_SERVE_KV_MEMORY_BYTES"])
    assert int(size.removesuffix("gb")) * 2**30 >= pools


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.stem)
def test_start_order_is_free_and_stopping_leaves_time_to_drain(path: Path) -> None:
    for name, service in services(path, env_example()).items():
        assert "depends_on" not in service
        if name != "room":
            deadline = load_config(Sources(env=service["environment"])).worker.drain_deadline_s
            assert int(service["stop_grace_period"].removesuffix("s")) > deadline + 5
            assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.stem)
def test_health_checks_tell_a_sound_process_from_a_sick_one(path: Path) -> None:
    """The commands themselves, run against a stand-in on another port."""
    asked: list[str] = []
    statuses = iter([200, 503] * 3)

    class StandIn(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(next(statuses))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), StandIn) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, service in services(path, env_example()).items():
            if name == "room":
                continue
            kind, program, option, code = service["healthcheck"]["test"]
            assert (kind, program, option) == ("CMD", "python", "-c")
            code = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{server.server_port}", code)
            codes = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode for _ in range(2)]
            assert codes == [0, 1], name
            assert set(asked) == {"/ready" if name == "router" else "/health"}
            asked.clear()
        server.shutdown()


def test_counts_come_from_the_env_file() -> None:
    found = services(ROOT / "docker/compose.xpyd.yaml", env_example() | {"PREFILL": "3", "DECODE": "5"})
    assert (found["prefill"]["deploy"]["replicas"], found["decode"]["deploy"]["replicas"]) == ("3", "5")


def test_compose_without_a_secret_is_refused() -> None:
    with pytest.raises(AssertionError, match="CLUSTER_SECRET"):
        services(COMPOSE_FILES[0], {})


def test_every_variable_of_the_example_is_used_and_every_used_one_is_there() -> None:
    used = {name for path in COMPOSE_FILES for name in re.findall(r"\$\{(\w+)", path.read_text())}
    assert used == env_example().keys()


# ---- image


def test_image_has_both_targets_and_starts_with_a_command_the_cli_takes() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    assert re.findall(r"^FROM base AS (\w+)$", text, re.MULTILINE) == ["cuda", "cpu"]
    for entrypoint, command in zip(
        re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE), re.findall(r"^CMD (.*)$", text, re.MULTILINE), strict=True
    ):
        assert json.loads(entrypoint) == ["pd-serve"]
        assert parse(json.loads(command))["host"] == "0.0.0.0"
    for source in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


# ---- every command line in the documentation


def written_commands() -> Iterator[tuple[str, str]]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        if path.suffix == ".py":
            text = text.replace("\\n", "\n").replace('"', "\n")
        for line in text.splitlines():
            match = _COMMAND.match(line)
            if match:
                yield path.name, match[1]


def test_every_command_line_that_is_written_down_is_one_the_cli_takes() -> None:
    commands = list(written_commands())
    assert len(commands) > 15
    for page, command in commands:
        line = re.split(r"\s{3,}|\s*[|&#]\s| 2>", command.replace("$(ARGS)", ""))[0]
        try:
            parse(shlex.split(line))
        except Exception as error:
            raise AssertionError(f"{page}: pd-serve {line}: {error}") from error


def test_a_command_line_with_a_wrong_option_would_be_found() -> None:
    with pytest.raises(Exception, match="--prefils"):
        parse(shlex.split("up --prefils 2"))
