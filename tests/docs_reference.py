"""The parts of docs/ that are written from the code: settings, metrics, options. `python -m tests.docs_reference` rewrites them.

Each lies between `<!-- from the code: NAME -->` and `<!-- end -->`. tests/test_docs.py fails when one differs from what the code says now.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from pathlib import Path

import typer
from pydantic_core import PydanticUndefined

from pd_serve.cli.app import app
from pd_serve.config import Config
from pd_serve.config_sources import env_name
from pd_serve.observe import METRICS, Side
from tests.docs_fields import fields_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MARK = re.compile(r"<!-- from the code: (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def settings_tables() -> str:
    lines: list[str] = []
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        lines += [f"### [{section}]", "", "| key | default | meaning | environment |", "|---|---|---|---|"]
        for key, field in model.model_fields.items():
            choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
            meaning = (field.description or "") + (f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else "")
            lines.append(f"| `{key}` | `{_shown(field.default)}` | {meaning} | `{env_name(f'{section}.{key}')}` |")
        lines.append("")
    return "\n".join(lines)


def metrics_table() -> str:
    lines: list[str] = []
    for side, title in ((Side.ROUTER, "Router"), (Side.WORKER, "Worker")):
        lines += [f"### {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for spec in METRICS:
            if side in spec.sides:
                labels = ", ".join(f"`{label}`" for label in spec.labels)
                lines.append(f"| `{spec.name}` | {spec.kind.value} | {labels} | {spec.doc} |")
        lines.append("")
    return "\n".join(lines)


def commands_reference() -> str:
    return "\n".join(_commands("pd-serve", getattr(typer.main.get_command(app), "commands")))  # noqa: B009 - Typer's own click types are private


def _commands(prefix: str, commands: dict[str, typing.Any]) -> list[str]:
    lines: list[str] = []
    for name, command in commands.items():
        if hasattr(command, "commands"):
            lines += [f"### {prefix} {name}", "", command.help.strip(), "", *_commands(f"{prefix} {name}", command.commands)]
            continue
        lines += [f"### {prefix} {name}", "", command.help.strip(), "", "| option | default | meaning |", "|---|---|---|"]
        for parameter in command.params:
            names = "/".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                names = f"`[{parameter.name.upper()}]`"
            default = "" if parameter.default in (None, "", False) else f"`{parameter.default}`"
            variable = f" (environment: `{parameter.envvar}`)" if parameter.envvar else ""
            lines.append(f"| {names} | {default} | {parameter.help}{variable} |")
        lines.append("")
    return lines


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("configuration.md", settings_tables),
    "metrics": ("metrics.md", metrics_table),
    "commands": ("cli.md", commands_reference),
    "fields": ("api.md", fields_table),
}


def rewritten(name: str) -> tuple[Path, str, str]:
    """The page, its text as it is, and its text with the table of that name as it should be."""
    page, table = TABLES[name]
    path = DOCS / page
    text = path.read_text(encoding="utf-8")

    def replace(match: re.Match[str]) -> str:
        return match[0] if match[1] != name else f"<!-- from the code: {name} -->\n\n{table()}\n<!-- end -->\n"

    return path, text, _MARK.sub(replace, text)


def _shown(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    for table_name in TABLES:
        page, _, new_text = rewritten(table_name)
        page.write_text(new_text, encoding="utf-8")
