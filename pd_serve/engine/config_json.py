"""Typed reading of a model's JSON files: a wrong type is a ModelError that names the file and the key. null counts as absent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pd_serve.errors import ModelError


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """One JSON object. Getters without a default raise ModelError for a missing key."""

    path: Path
    values: dict[str, object]

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.path}: {key} is {value!r}, not an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {key} is {value!r}, not a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {key} is {value!r}, not a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Empty where absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.path}: {key} is not a list of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, or one integer as a list of one. Empty where absent."""
        value = self._get(key, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise ModelError(f"{self.path}: {key} is not an integer or a list of them")
        return tuple(items)

    def section(self, key: str) -> ConfigJson:
        """The object under `key`; empty where absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {key} is not an object")
        return ConfigJson(self.path, value)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.path}: {key} is missing")
        return default


def read_json(path: Path) -> ConfigJson:
    """Raises ModelError where the file is missing, unreadable or no JSON object."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object")
    return ConfigJson(path, values)
