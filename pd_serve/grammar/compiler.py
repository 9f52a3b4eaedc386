"""Grammars to matchers: where llguidance is known, with gbnf.py. The router checks with it, engines ask it which tokens may follow.

The library compiles lazily (milliseconds, also for large schemas), bounds its own work per step by counting it, lets go of the interpreter
lock meanwhile, and never raises for what a client wrote: a matcher that fails says so, and from then on lets nothing follow but the end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from pd_serve.errors import ModelError
from pd_serve.grammar.base import WHITESPACE, Grammar, GrammarKind
from pd_serve.grammar.gbnf import as_lark

TOKENIZER_NAME = "tokenizer.json"
_WORD_NBYTES = 4
_LIMITS = LLParserLimits(verbose_errors=False)


def problem_of(grammar: Grammar) -> str:
    """Why no answer can be made by it, in the library's words; empty when one can. Takes milliseconds, mostly without the interpreter."""
    try:
        return str(LLMatcher.validate_grammar(_source(grammar), limits=_LIMITS)).strip()
    except ValueError as error:
        return str(error)


class Matcher:
    """Where one answer stands in its grammar. One thread at a time."""

    def __init__(self, matcher: LLMatcher, num_consumed: int = 0) -> None:
        self._matcher = matcher
        self.num_consumed = num_consumed

    @property
    def problem(self) -> str:
        """Why it cannot go on, if it cannot: the grammar is wrong or too much work, or a token was none of those that may follow."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def copy(self) -> Matcher:
        """For another answer that begins where this one is."""
        return Matcher(self._matcher.deep_copy(), self.num_consumed)

    def consume(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer; an end is consumed where the grammar may end."""
        self.num_consumed += len(token_ids)
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))

    def write_mask(self, out: NDArray[np.uint8]) -> None:
        """Which tokens may follow, a bit each, the lowest first: `out` [mask_nbytes(vocab_size)]. With a problem, only the end."""
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)


class MaskExecutor:
    """Matcher.write_mask of several, shared out over threads."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)

    def write_masks(self, matchers: Sequence[tuple[Matcher, int]], out: NDArray[np.uint8]) -> None:
        """Each to the row beside it: `out` [num_rows, mask_nbytes(vocab_size)], contiguous."""
        pairs = [(matcher._matcher, row) for matcher, row in matchers]
        self._executor.unsafe_compute_mask_ptr(pairs, out.ctypes.data, out.shape[1], out.shape[0])


def has_vocabulary(folder: Path) -> bool:
    return (folder / TOKENIZER_NAME).is_file()


def mask_nbytes(vocab_size: int) -> int:
    return -(-vocab_size // (8 * _WORD_NBYTES)) * _WORD_NBYTES


class Vocabulary:
    """What the tokens of a model stand for. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises ModelError."""
        if not eos_token_ids:
            raise ModelError("the model names no end-of-sequence token: no grammar could end")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"no grammar can be followed with this {TOKENIZER_NAME}: {error}") from error

    @classmethod
    def of_folder(cls, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Of a model folder: takes about a second for 100,000 tokens. Raises ModelError."""
        path = folder / TOKENIZER_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        return cls(text, vocab_size, eos_token_ids)

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer. Raises nothing: a grammar that cannot be followed is told by `problem`."""
        try:
            source = _source(grammar)
        except ValueError:
            source = ""
        return Matcher(LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS))


def _source(grammar: Grammar) -> str:
    """In the library's own language. Raises ValueError."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE, "lenient": False}))
        case GrammarKind.JSON_SCHEMA_LOOSE:
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE, "lenient": True}))
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
        case GrammarKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(as_lark(grammar.text)))
