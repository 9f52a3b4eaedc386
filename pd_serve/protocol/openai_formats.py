"""The fields by which clients ask for an answer of a certain form, and the grammar that they come down to.

`response_format` is OpenAI's. The extensions are vLLM's, as most clients of open servers send them: `structured_outputs` with one of json,
regex, choice, grammar and json_object, and its older spelling, the fields guided_json, guided_regex, guided_choice and guided_grammar.
Source: https://platform.openai.com/docs/guides/structured-outputs
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from pd_serve.grammar.base import ANY_JSON_OBJECT, Grammar, GrammarKind

MAX_CHOICES = 4096
MAX_STRICT_PARTS = 65536
"""Of a strict schema, looked at on the event loop before its length is known; more are never within `structured.max_bytes` as it comes."""

Schema = dict[str, JsonValue]
Choices = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
GrammarText = Annotated[str, Field(min_length=1)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NamedSchema(_Form):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    of: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(_Form):
    type: Literal["text"]


class JsonObjectFormat(_Form):
    type: Literal["json_object"]


class JsonSchemaFormat(_Form):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="after")
    def _check_strict(self) -> JsonSchemaFormat:
        """OpenAI refuses a strict schema that leaves something open, so that clients find out here as they would there."""
        named = self.json_schema
        problem = strict_problem(named.of or {}) if named.strict else ""
        if problem:
            message = f"Invalid schema for response_format '{named.name}': {problem}"
            raise PydanticCustomError("refused", "{message}", {"param": "response_format", "message": message})
        return self


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(_Form):
    """One of them."""

    of_json: Schema | str | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if sum(value is not None and value is not False for _, value in self) != 1:
            message = "'structured_outputs' must hold exactly one of json, regex, choice, grammar and json_object"
            raise PydanticCustomError("refused", "{message}", {"param": "structured_outputs", "message": message})
        return self


class AskedForm(NamedTuple):
    """What the answer must match, and the field that says so."""

    grammar: Grammar
    param: str


class FormFields(_Form):
    """What a generation request has of them; at most one may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_decoding_backend: str | None = Field(None, description="Changes nothing")

    @model_validator(mode="after")
    def _check_form(self) -> FormFields:
        if self.model_fields_set.isdisjoint(_FORM_NAMES):
            return self
        asked = list(self._asked())
        if len(asked) > 1:
            message = f"'{asked[0].param}' and '{asked[1].param}' both say what the answer must look like; give one of them"
            raise PydanticCustomError("refused", "{message}", {"param": asked[1].param, "message": message})
        return self

    @cached_property
    def form(self) -> AskedForm | None:
        """None: the answer may be any text. Nothing of the grammar has been checked yet but its outside."""
        return None if self.model_fields_set.isdisjoint(_FORM_NAMES) else next(self._asked(), None)

    def _asked(self) -> Iterator[AskedForm]:
        match self.response_format:
            case JsonObjectFormat():
                yield AskedForm(ANY_JSON_OBJECT, "response_format")
            case JsonSchemaFormat(json_schema=named):
                yield AskedForm(_of_schema(named), "response_format")
        if self.structured_outputs is not None:
            given = self.structured_outputs
            yield from _extensions(given.of_json, given.regex, given.choice, given.grammar, "structured_outputs.")
            if given.json_object:
                yield AskedForm(ANY_JSON_OBJECT, "structured_outputs.json_object")
        yield from _extensions(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_")


_FORM_NAMES = frozenset(FormFields.model_fields)


def _extensions(
    schema: Schema | str | None, regex: str | None, choice: tuple[str, ...] | None, grammar: str | None, prefix: str
) -> Iterator[AskedForm]:
    if schema is not None:
        text = schema if isinstance(schema, str) else _dumped(schema)
        yield AskedForm(Grammar(GrammarKind.JSON_SCHEMA, text), f"{prefix}json")
    if regex is not None:
        yield AskedForm(Grammar(GrammarKind.REGEX, regex), f"{prefix}regex")
    if choice is not None:
        yield AskedForm(Grammar(GrammarKind.CHOICE, _dumped(list(choice))), f"{prefix}choice")
    if grammar is not None:
        yield AskedForm(Grammar(GrammarKind.GRAMMAR, grammar), f"{prefix}grammar")


def _of_schema(named: NamedSchema) -> Grammar:
    if named.of is None:
        return ANY_JSON_OBJECT
    return Grammar(GrammarKind.JSON_SCHEMA if named.strict else GrammarKind.JSON_SCHEMA_LOOSE, _dumped(named.of))


def _dumped(value: object) -> str:
    """In the order given: properties are generated in the schema's order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def strict_problem(schema: Schema) -> str:
    """What OpenAI would find wrong with a strict schema: every object must be closed and all its properties required."""
    if schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{schema.get('type', 'None')}\"'."
    return next(_open_objects(schema, (), iter(range(MAX_STRICT_PARTS))), "")


def _open_objects(schema: JsonValue, context: tuple[str, ...], room: Iterator[int]) -> Iterator[str]:
    """`room`: has an item for each part that may still be looked at."""
    if next(room, None) is None:
        yield f"schema must have at most {MAX_STRICT_PARTS} parts."
        return
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _open_objects(item, (*context, str(index)), room)
    if not isinstance(schema, dict):
        return
    properties = schema.get("properties")
    if schema.get("type") == "object" or isinstance(properties, dict):
        named = list(properties) if isinstance(properties, dict) else []
        required = schema.get("required")
        known = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        missing = [name for name in named if name not in known]
        if schema.get("additionalProperties") is not False:
            yield f"In context={context}, 'additionalProperties' is required to be supplied and to be false."
        if missing:
            yield (
                f"In context={context}, 'required' is required to be supplied and to be an array including every key in properties. "
                f"Missing '{missing[0]}'."
            )
    for keyword in ("properties", "$defs", "definitions"):
        inner = schema.get(keyword)
        for name, value in inner.items() if isinstance(inner, dict) else ():
            yield from _open_objects(value, (*context, keyword, name), room)
    for keyword in ("items", "prefixItems", "anyOf", "allOf", "oneOf"):
        if keyword in schema:
            yield from _open_objects(schema[keyword], (*context, keyword), room)
