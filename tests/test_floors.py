"""The house keeps its floors: imports go down only, siblings keep apart, heavy libraries stay in their rooms, files stay short.

`violations` walks the imports of a source tree by its syntax, so an import inside a function counts as well. Every rule is shown to catch
a planted mistake.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pd_serve", "router", "workers")
MAX_LINES = 399

# The first pattern that fits a module names its room; rooms of one floor never import each other.
ROOMS: tuple[tuple[str, str, int], ...] = (
    ("pd_serve.cli*", "cli", 6),
    ("pd_serve.plan*", "plan", 5),
    ("pd_serve.bench*", "bench", 4),
    ("router*", "router", 4),
    ("workers.decode*", "decode", 4),
    ("workers.prefill*", "prefill", 4),
    ("workers*", "workers", 4),
    ("pd_serve.engine*", "engine", 3),
    ("pd_serve.transport*", "transport", 3),
    ("pd_serve.protocol.client", "client", 3),
    ("pd_serve.protocol*", "protocol", 2),
    ("pd_serve.model_store*", "model_store", 2),
    ("pd_serve.kv*", "kv", 1),
    ("pd_serve.grammar*", "grammar", 1),
    ("pd_serve*", "ground", 0),
)
# Within a worker: the machine composes the roles, and the layout of KV is a word of the protocol.
ALLOWED_SIDEWAYS = frozenset({("workers", "prefill"), ("workers", "decode"), ("prefill", "workers"), ("decode", "workers")})

# Pure files of rooms that otherwise may: the simulator runs them without torch, and they decide without I/O.
PURE = (
    "pd_serve.engine.batch",
    "pd_serve.engine.sequence",
    "pd_serve.engine.scheduler",
    "workers.machine",
    "workers.events",
    "workers.peers",
    "workers.settings",
    "workers.prefill.machine",
    "workers.decode.machine",
    "router.lifecycle",
)
FRONT = "workers.front*"
# Library -> modules that may import it.
HOMES: dict[str, tuple[str, ...]] = {
    "torch": ("pd_serve.engine*", "workers*"),
    "transformers": ("router.tokenizer", "pd_serve.engine*", "pd_serve.model_store*"),
    "opentelemetry": ("router.otel",),
    "fastapi": ("router*", "workers.front*"),
    "starlette": ("router*", "workers.front*"),
    "uvicorn": ("router.main", "workers.front", "pd_serve.protocol.server"),
    "flashinfer": ("pd_serve.engine.attention.flashinfer_mla",),
    "ucp": ("pd_serve.transport.ucx.ucxpy",),
    "libucx": ("pd_serve.transport.ucx.libucp",),
    "nixl_cu12": ("pd_serve.transport.nixl.binding",),
    "gguf": ("pd_serve.model_store*",),
    "huggingface_hub": ("pd_serve.model_store*",),
    "typer": ("pd_serve.cli*",),
    "rich": ("pd_serve.cli*", "pd_serve.bench.progress"),
    "aiohttp": ("pd_serve.bench.client",),
    "matplotlib": ("pd_serve.bench.plots*", "pd_serve.plan.plots"),
    "llguidance": ("pd_serve.grammar.*",),
    "jinja2": ("pd_serve.bench.report", "router.chat_template"),
}
HEAVY_FOR_PURE = ("torch", "transformers", "asyncio", "threading", "socket", "time", "random")
NEVER = ("pickle", "marshal", "shelve")


@dataclass(frozen=True, order=True)
class Violation:
    path: str
    line: int
    message: str


def violations(root: Path) -> list[Violation]:
    """Of the tree under `root`, which holds the packages."""
    return sorted(violation for package in PACKAGES for path in (root / package).rglob("*.py") for violation in _of_file(root, path))


def _of_file(root: Path, path: Path) -> Iterator[Violation]:
    relative = path.relative_to(root)
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n") + 1
    if num_lines - 1 > MAX_LINES:
        yield Violation(str(relative), num_lines - 1, "400 lines or more: becomes two rooms")
    module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    for node in ast.walk(ast.parse(text)):
        for imported in _imports(node, module, path.name == "__init__.py"):
            for message in _judge(module, imported):
                yield Violation(str(relative), getattr(node, "lineno", 0), message)


def _imports(node: ast.AST, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
        return [base, *(f"{base}.{alias.name}" for alias in node.names)] if base.split(".")[0] in PACKAGES else [base]
    return []


def _judge(module: str, imported: str) -> Iterator[str]:
    library = imported.split(".")[0]
    if library in NEVER:
        yield f"{library} is never used here"
    if library in HOMES and not any(fnmatch.fnmatchcase(module, home) for home in HOMES[library]):
        yield f"{library} is at home in {', '.join(HOMES[library])} only"
    if library in ("torch", "transformers") and fnmatch.fnmatchcase(module, FRONT):
        yield f"the front loads no {library}"
    if module in PURE and library in HEAVY_FOR_PURE:
        yield f"a pure module imports {library}"
    if library not in PACKAGES:
        return
    (room, floor), (other_room, other_floor) = _room(module), _room(imported)
    if other_floor > floor:
        yield f"{room} (floor {floor}) imports upward: {imported} (floor {other_floor})"
    elif other_floor == floor and other_room != room and (room, other_room) not in ALLOWED_SIDEWAYS:
        yield f"{room} imports its sibling {imported}"


def _room(module: str) -> tuple[str, int]:
    return next((room, floor) for pattern, room, floor in ROOMS if fnmatch.fnmatchcase(module, pattern))


def test_the_house_keeps_its_floors() -> None:
    found = violations(ROOT)
    assert not found, "\n".join(f"{violation.path}:{violation.line}: {violation.message}" for violation in found)


def test_every_package_was_looked_at() -> None:
    for package in PACKAGES:
        assert len(list((ROOT / package).rglob("*.py"))) > 5


@pytest.mark.parametrize("module", ["router.main", "workers.front", "workers.machine", "pd_serve.cli.up", "pd_serve.model_store"])
def test_a_process_without_an_engine_loads_no_torch(module: str) -> None:
    """Not even by way of others, which the syntax does not show."""
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "torch" not in loaded


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("pd_serve/kv/x.py", "from pd_serve.protocol.link import Open\n", "kv (floor 1) imports upward"),
        ("pd_serve/kv/x.py", "from ..protocol import link\n", "imports upward"),
        ("pd_serve/kv/x.py", "def f():\n    import pd_serve.engine.runner\n", "imports upward"),
        ("pd_serve/ids.py", "from pd_serve import kv\n", "ground (floor 0) imports upward"),
        ("pd_serve/engine/x.py", "from pd_serve.transport.base import Transport\n", "engine imports its sibling"),
        ("pd_serve/bench/x.py", "from pd_serve.plan.outcome import Outcome\n", "bench (floor 4) imports upward"),
        ("pd_serve/plan/x.py", "from pd_serve.cli.app import run\n", "plan (floor 5) imports upward"),
        ("pd_serve/transport/x.py", "from pd_serve.engine import batch\n", "transport imports its sibling"),
        ("pd_serve/protocol/x.py", "from pd_serve.protocol.client import Link\n", "imports upward"),
        ("router/x.py", "from workers.machine import WorkerMachine\n", "router imports its sibling"),
        ("workers/x.py", "import router.main\n", "workers imports its sibling"),
        ("workers/prefill/x.py", "from workers.decode.machine import DecodeMachine\n", "prefill imports its sibling"),
        ("workers/front.py", "from pd_serve.cli.app import run\n", "imports upward"),
        ("pd_serve/plan/x.py", "from pd_serve.cli.options import sources\n", "plan (floor 5) imports upward"),
        ("pd_serve/bench/x.py", "from pd_serve.plan.ratio import need\n", "bench (floor 4) imports upward"),
        ("pd_serve/plan/x.py", "import rich\n", "rich is at home"),
        ("router/x.py", "import torch\n", "torch is at home"),
        ("router/x.py", "from torch.nn import functional\n", "torch is at home"),
        ("pd_serve/cli/x.py", "import torch\n", "torch is at home"),
        ("workers/front_app.py", "def f():\n    import torch\n", "the front loads no torch"),
        ("pd_serve/engine/scheduler.py", "import torch\n", "a pure module imports torch"),
        ("workers/decode/machine.py", "import time\n", "a pure module imports time"),
        ("router/lifecycle.py", "import asyncio\n", "a pure module imports asyncio"),
        ("router/api/x.py", "import transformers\n", "transformers is at home"),
        ("workers/rank.py", "from fastapi import FastAPI\n", "fastapi is at home"),
        ("pd_serve/protocol/x.py", "import starlette.responses\n", "starlette is at home"),
        ("pd_serve/transport/ucx/x.py", "import ucp._libs.ucx_api\n", "ucp is at home"),
        ("workers/x.py", "import libucx\n", "libucx is at home"),
        ("pd_serve/wire.py", "import pickle\n", "pickle is never used"),
        ("pd_serve/kv/x.py", "x = 1\n" * 400, "400 lines or more"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, path: str, text: str, words: str) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    found = violations(tmp_path)
    assert any(words in violation.message for violation in found), found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("pd_serve/kv/x.py", "import numpy\nfrom pd_serve.ids import BlockId\nfrom .layout import KVLayout\n"),
        ("workers/prefill/pusher.py", "import torch\nfrom pd_serve.engine import runner\nfrom pd_serve.transport import base\n"),
        ("workers/machine.py", "from workers.decode.machine import DecodeMachine\nfrom workers.prefill.machine import PrefillMachine\n"),
        ("pd_serve/plan/x.py", "from pd_serve.bench import trace\nfrom router.policy import chooser\n"),
        ("router/tokenizer.py", "from transformers import AutoTokenizer\n"),
        ("pd_serve/kv/x.py", "x = 1\n" * 399),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, text: str) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert violations(tmp_path) == []
