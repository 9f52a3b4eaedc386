"""Typed access to the key-value part of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import gguf


class GGUFFields:
    """Every method raises KeyError for a missing key, ValueError for another type."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def has(self, key: str) -> bool:
        return key in self._fields

    def text(self, key: str) -> str:
        value = self._fields[key].contents()
        if not isinstance(value, str):
            raise ValueError(f"{key} is not a string")
        return value

    def integer(self, key: str) -> int:
        return int(self._fields[key].contents())

    def number(self, key: str) -> float:
        return float(self._fields[key].contents())

    def decimal(self, key: str) -> float:
        """The shortest decimal of a float32: 9.999999747e-06 is 1e-05."""
        return float(np.format_float_positional(np.float32(self.number(key)), trim="-"))

    def texts(self, key: str) -> list[str]:
        return [str(value) for value in self._fields[key].contents()]

    def integers(self, key: str) -> list[int]:
        return [int(value) for value in self._fields[key].contents()]
