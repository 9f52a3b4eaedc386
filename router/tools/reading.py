"""Reading a text character by character as it comes: generators that are sent one character after the other, and "" when the text is over.

What they do depends on the characters alone, never on how they came in pieces. Used by the formats of calls (hermes.py and its siblings).
JSON is read strictly, but for control characters within strings, which models write as they stand and which are escaped here.
Source: RFC 8259.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping

END = ""
SPACE = frozenset(" \t\r\n")
MAX_DEPTH = 200
"""Of brackets within brackets; readers of the result have limits of their own."""

Write = Callable[[str], None]
Reading = Generator[None, str, None]
ReadingOn = Generator[None, str, str]
"""Ends with a character that it has read beyond what it was for."""

_CLOSER: Mapping[str, str] = {"{": "}", "[": "]"}
_LITERALS: Mapping[str, str] = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_KINDS: Mapping[str, str] = {**dict.fromkeys("123456789", "1"), **{ch: ch for ch in "0-+."}, "e": "e", "E": "e"}
"""Of the characters of numbers."""
_NUMBER: Mapping[str, Mapping[str, str]] = {
    "start": {"-": "minus", "0": "zero", "1": "int"},
    "minus": {"0": "zero", "1": "int"},
    "zero": {".": "dot", "e": "e"},
    "int": {"0": "int", "1": "int", ".": "dot", "e": "e"},
    "dot": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "e"},
    "e": {"+": "sign", "-": "sign", "0": "exponent", "1": "exponent"},
    "sign": {"0": "exponent", "1": "exponent"},
    "exponent": {"0": "exponent", "1": "exponent"},
}
"""What may follow within a number, by kind of character."""
_WHOLE_NUMBERS = ("zero", "int", "fraction", "exponent")


class NotACallError(Exception):
    """The character just sent does not belong there: what was taken for a call is none. Never leaves router/tools."""


def nothing(text: str) -> None:
    """A Write for what is only passed over."""


def visible(write: Write = nothing) -> ReadingOn:
    """The next character that is not white space."""
    ch = yield
    while ch in SPACE:
        write(ch)
        ch = yield
    return ch


def expect(text: str, ch: str) -> Reading:
    """Exactly this text, of which `ch` has come."""
    for position, wanted in enumerate(text):
        if position:
            ch = yield
        if ch != wanted:
            raise NotACallError


def read_string(write: Write) -> Reading:
    """A JSON string, after its opening quote, to its closing one; both are written."""
    write('"')
    while True:
        ch = yield
        if ch == END:
            raise NotACallError
        if ch == '"':
            write(ch)
            return
        if ch == "\\":
            write(ch)
            ch = yield
            if ch == "u":
                write(ch)
                for _ in range(4):
                    ch = yield
                    if ch not in _HEX:
                        raise NotACallError
                    write(ch)
                continue
            if ch not in _ESCAPES:
                raise NotACallError
            write(ch)
        else:
            write(ch if ch >= " " else json.dumps(ch)[1:-1])


def read_container(opening: str, write: Write) -> Reading:
    """A JSON object or array, after its opening bracket, to its closing one; both are written."""
    write(opening)
    open_ones = [opening]
    is_new = True
    ch = yield from visible(write)
    while True:
        if not (is_new and ch == _CLOSER[open_ones[-1]]):
            if open_ones[-1] == "{":
                if ch != '"':
                    raise NotACallError
                yield from read_string(write)
                yield from expect(":", (yield from visible(write)))
                write(":")
                ch = yield from visible(write)
            if ch in _CLOSER and len(open_ones) < MAX_DEPTH:
                write(ch)
                open_ones.append(ch)
                is_new = True
                ch = yield from visible(write)
                continue
            ch = yield from read_scalar(ch, write)
        while ch == _CLOSER[open_ones[-1]]:
            write(ch)
            open_ones.pop()
            if not open_ones:
                return
            ch = yield from visible(write)
        if ch != ",":
            raise NotACallError
        write(ch)
        is_new = False
        ch = yield from visible(write)


def read_scalar(ch: str, write: Write) -> ReadingOn:
    """A string, number or literal that begins with `ch`, and the space after it; ends with the character that follows."""
    if ch == '"':
        yield from read_string(write)
        ch = yield
    elif ch in _LITERALS:
        yield from read_literal(ch, write)
        ch = yield
    else:
        ch = yield from _read_number(ch, write)
    if ch in SPACE:
        write(ch)
        ch = yield from visible(write)
    return ch


def read_literal(ch: str, write: Write) -> Reading:
    """true, false or null, of which `ch` has come."""
    write(ch)
    for wanted in _LITERALS[ch][1:]:
        ch = yield
        if ch != wanted:
            raise NotACallError
        write(ch)


def _read_number(ch: str, write: Write) -> ReadingOn:
    state = "start"
    while (following := _NUMBER[state].get(_KINDS.get(ch, ""))) is not None:
        write(ch)
        state = following
        ch = yield
    if state not in _WHOLE_NUMBERS:
        raise NotACallError
    return ch
