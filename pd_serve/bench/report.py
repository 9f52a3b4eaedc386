"""One self-contained HTML page of one or several results: every figure by arm, pictures, settings and load. The pictures also as PNG files
beside it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pd_serve.bench.errors import BenchError, missing_library
from pd_serve.bench.figures import shown
from pd_serve.bench.pictures import pictures
from pd_serve.bench.results import Result, read_result


@dataclass(frozen=True, slots=True)
class Section:
    """What the template shows of one result."""

    result: Result
    path: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """(figure, its value in each arm as text)."""
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """(key, its value in each process); keys that are alike everywhere have one value."""
    images: tuple[tuple[str, str], ...]
    """(name, data URI)."""


def write_report(paths: Sequence[Path], out: Path) -> list[Path]:
    """The page and its pictures; returns what was written, the page first. Raises BenchError."""
    written: list[Path] = []
    sections: list[Section] = []
    for path in paths:
        result = read_result(path)
        drawn = pictures(path, result)
        for name in result.pictures:
            drawn[Path(name).stem] = _read(path.parent / name)
        for name, data in drawn.items():
            target = out.with_name(f"{path.stem}.{name}.png") if name not in map(_stem, result.pictures) else None
            if target is not None:
                written.append(_write(target, data))
        images = tuple((name, f"data:image/png;base64,{base64.b64encode(data).decode()}") for name, data in drawn.items())
        sections.append(Section(result, path.name, _rows(result), _settings(result), images))
    return [_write(out, _render(sections).encode()), *written]


def write_picture(result_path: Path, name: str, data: bytes) -> str:
    """A command's own picture beside its result; returns the name to put into Result.pictures. Raises BenchError."""
    return _write(result_path.with_name(f"{result_path.stem}.{name}.png"), data).name


def _render(sections: Sequence[Section]) -> str:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise missing_library("jinja2", error) from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = files("pd_serve.bench").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(sections=sections)


def _rows(result: Result) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names = dict.fromkeys(name for arm in result.arms.values() for name in arm.figures)
    return tuple(
        (name, tuple(shown(name, arm.figures[name]) if name in arm.figures else "" for arm in result.arms.values())) for name in names
    )


def _settings(result: Result) -> tuple[tuple[str, tuple[str, ...]], ...]:
    keys = dict.fromkeys(key for settings in result.config.values() for key in settings)
    rows: list[tuple[str, tuple[str, ...]]] = []
    for key in keys:
        values = tuple(str(settings.get(key, "")) for settings in result.config.values())
        rows.append((key, values if len(set(values)) > 1 else values[:1]))
    return tuple(rows)


def _stem(name: str) -> str:
    return Path(name).stem


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
    return path
