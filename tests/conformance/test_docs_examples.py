"""The examples of docs/api.md, as they stand there, against a router; and the fields that the page has to name."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from pd_serve.config import SecurityConfig
from tests.docs_fields import ENDPOINTS, state_of
from tests.unit.router.cluster import MODEL, Cluster
from tests.unit.router.elsewhere import serving_elsewhere

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
CLIENTS = {"langchain_openai": "langchain-openai", "litellm": "litellm"}
"""Heavy ones: their imports alone take seconds."""
SDK_FIELDS = {
    "chat": chat_create_params.CompletionCreateParamsBase.__annotations__,
    "completions": completion_create_params.CompletionCreateParamsBase.__annotations__,
    "responses": response_create_params.ResponseCreateParamsBase.__annotations__,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def client_of(block: str) -> str:
    return next((module for module in CLIENTS if module in block), "")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serving_elsewhere(tmp_path_factory.mktemp("examples"), security=SecurityConfig()) as made:
        yield made


def run_python(block: str, here: Cluster) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(_aimed(block, here), str(PAGE), "exec"), {"__name__": "example"})
    return out.getvalue()


@pytest.mark.parametrize("block", [block for block in blocks("python") if not client_of(block)])
def test_python_examples_of_the_sdk_run(here: Cluster, block: str) -> None:
    assert "hello world" in run_python(block, here)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", [block for block in blocks("python") if client_of(block)], ids=client_of)
def test_python_examples_of_other_clients_run(here: Cluster, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = client_of(block)
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{CLIENTS[module]} is not installed: pip install 'pd-serve[clients]'")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it would fetch a table of prices
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    assert "hello world" in run_python(block, here)


def test_curl_examples_run(here: Cluster) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    for block in blocks("bash"):
        for command in _aimed(block, here).replace("\\\n", " ").strip().splitlines():
            done = subprocess.run(["bash", "-c", command.replace("curl ", "curl --fail --noproxy '*' ")], capture_output=True, text=True)
            assert (done.returncode, done.stdout != "") == (0, True), (command, done.stderr)
            if "Timeline" in command:
                assert ": x-request-timeline {" in done.stdout


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_the_sdk_is_served_ignored_or_refused_by_name(endpoint: str) -> None:
    for name in SDK_FIELDS[endpoint]:
        assert state_of(ENDPOINTS[endpoint], name), f"{endpoint}: {name} would be refused as unknown, though OpenAI knows it"


def _aimed(block: str, here: Cluster) -> str:
    return block.replace("http://127.0.0.1:8000", here.url).replace("demo", MODEL)
