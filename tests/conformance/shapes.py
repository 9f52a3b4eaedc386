"""Answers held against the openai SDK's own models, strictly, and their shapes as they were recorded.

The SDK itself takes nearly anything: unknown fields, wrong types and missing ones pass. Here nothing passes that its models do not state.
`python -m tests.conformance.record` writes the shapes anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import pydantic
from openai import BaseModel
from openai.types import Completion

RECORDED = Path(__file__).with_name("shapes.json")
EXTRAS = frozenset({"store", "max_model_len"})
"""Fields besides: the API reference has `store`, the SDK's model has not; `max_model_len` is vLLM's."""

M = TypeVar("M", bound=BaseModel)
Shape = dict[str, str]


def strictly(model: type[M], data: bytes | str) -> M:
    """`data` as the SDK's model, every field of the type it states and none that it does not. Raises AssertionError."""
    try:
        made = model.model_validate_json(data, strict=True)
    except pydantic.ValidationError as error:
        raise AssertionError(f"not a {model.__name__}: {error}\n{data!r}") from error
    unknown = _unknown(made, model.__name__) - EXTRAS
    assert not unknown, f"{sorted(unknown)}\n{data!r}"
    return made


def again_strictly(part: M) -> M:
    """A part of a stream, as the SDK has made it. Its one model of completions and their chunks knows no null."""
    data = part.to_json(indent=None)
    return strictly(type(part), data.replace('"finish_reason":null', '"finish_reason":"stop"') if isinstance(part, Completion) else data)


def shape_of(value: object, path: str = "$") -> Shape:
    """Path to type; all elements of an array are one path, several types of it are told together."""
    if isinstance(value, dict):
        shape: Shape = {} if value else {path: "object"}
        for name, part in value.items():
            shape |= shape_of(part, f"{path}.{name}")
        return shape
    if isinstance(value, list):
        shape = {} if value else {path: "array"}
        for part in value:
            for inner, kind in shape_of(part, f"{path}[]").items():
                shape[inner] = "|".join(sorted({*shape.get(inner, kind).split("|"), kind}))
        return shape
    return {path: _kind(value)}


def recorded() -> dict[str, Shape]:
    shapes: dict[str, Shape] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return shapes


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _unknown(value: object, path: str) -> set[str]:
    """Names of fields that the models of the SDK do not have, by their last part where it is one of EXTRAS."""
    if isinstance(value, BaseModel):
        unknown = {name if name in EXTRAS else f"{path}.{name}" for name in value.model_extra or {}}
        for name in type(value).model_fields:
            unknown |= _unknown(getattr(value, name, None), f"{path}.{name}")
        return unknown
    if isinstance(value, list):
        return {found for part in value for found in _unknown(part, f"{path}[]")}
    return set()
