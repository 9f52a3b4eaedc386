"""The documentation says what the code does: every setting, option, variable, metric and error code is there, and nothing that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_serve.config_sources import env_name, known_keys
from pd_serve.observe import METRICS
from pd_serve.wire import PROTOCOL_VERSION
from tests.docs_reference import DOCS, TABLES, rewritten

ROOT = DOCS.parent
SOURCES = sorted(path for package in ("pd_serve", "router", "workers") for path in (ROOT / package).rglob("*.py"))
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_what_the_code_says(name: str) -> None:
    path, text, expected = rewritten(name)
    assert text == expected, f"{path.name} is behind the code: run python -m tests.docs_reference"
    assert f"<!-- from the code: {name} -->" in text


def test_a_changed_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    page_name, _ = TABLES["metrics"]
    monkeypatch.setitem(TABLES, "metrics", (page_name, lambda: "| another |"))
    _, text, expected = rewritten("metrics")
    assert text != expected


def test_every_setting_and_its_variable_is_documented() -> None:
    text = page("configuration.md")
    for key in known_keys():
        assert f"`{env_name(key)}`" in text, key


def test_every_metric_is_documented_and_no_other() -> None:
    known = {spec.name for spec in METRICS}
    text = page("metrics.md")
    assert known <= set(re.findall(r"pd_serve_\w+", text))
    for path in PAGES:
        for name in set(
            re.findall(r"\bpd_serve_(?!cli\b|up\b)[a-z_]+_(?:total|seconds|ratio|bytes|sum|count)\b", path.read_text(encoding="utf-8"))
        ):
            assert name.removesuffix("_sum").removesuffix("_count") in known or name in known, f"{path.name}: {name}"


def error_classes() -> Iterator[tuple[str, int | None]]:
    """(code, status where the class sets one) of every error class, found in the syntax."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Error"):
                continue
            values = dict(_constants(node))
            if isinstance(values.get("code"), str):
                status = values.get("http_status")
                yield str(values["code"]), status if isinstance(status, int) else None


def _constants(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    for statement in node.body:
        target = (
            statement.targets[0]
            if isinstance(statement, ast.Assign)
            else statement.target
            if isinstance(statement, ast.AnnAssign)
            else None
        )
        value = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            yield target.id, value.value


def test_every_error_code_is_documented_with_its_status_and_no_other() -> None:
    documented = {code: int(status) for code, status in re.findall(r"^\| `(\w+)` \| (\d+) \|", page("errors.md"), re.MULTILINE)}
    classes = dict(error_classes())
    assert len(classes) > 20
    assert documented.keys() == classes.keys()
    for code, status in classes.items():
        assert status is None or documented[code] == status, code


def test_every_environment_variable_the_code_reads_is_documented() -> None:
    text = page("configuration.md")
    pattern = re.compile(r"""(?:environ(?:\.get|\.setdefault)?[\[(]|envvar=|VARIABLE = )\s*["'](\w+)["']""")
    found = {name for path in SOURCES for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert {"OPENAI_API_KEY", "CUDA_VISIBLE_DEVICES"} <= found
    for name in found:
        assert f"`{name}`" in text, name


def test_changelog_names_the_protocol_version() -> None:
    assert f"Protocol version: {PROTOCOL_VERSION} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_settings_named_in_the_text_exist(path: Path) -> None:
    sections = {key.partition(".")[0] for key in known_keys()}
    for name in re.findall(r"`((?:prefill|decode|colocated)?\.?[a-z]+\.[a-z_]+)`", path.read_text(encoding="utf-8")):
        key = re.sub(r"^(prefill|decode|colocated)\.(?=[a-z]+\.)", "", name)
        if key.partition(".")[0] in sections and not key.endswith((".py", ".toml", ".md", ".log")):
            assert key in known_keys(), f"{path.name}: {name}"
