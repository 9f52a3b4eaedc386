"""What an answer has to look like, as text: made by the router of a request, obeyed by whichever worker samples. Crosses every process.

compiler.py makes matchers of it.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class GrammarKind(Enum):
    """What `Grammar.text` is."""

    JSON_SCHEMA = "json_schema"
    """A schema, every keyword of which is kept."""
    JSON_SCHEMA_LOOSE = "json_schema_loose"
    """A schema whose keywords that cannot be kept are left out."""
    REGEX = "regex"
    """Of the whole answer, in the syntax of Rust's `regex`, without look-around."""
    CHOICE = "choice"
    """A JSON list of the strings to choose from."""
    GRAMMAR = "grammar"
    """Context-free: Lark, or GBNF as llama.cpp has it."""


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kind: GrammarKind
    text: str
    """Checked by the router (compiler.problem_of) before any worker hears of it."""


WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of JSON: any, but a model that sees no other way on must not fill the answer with it."""
ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
