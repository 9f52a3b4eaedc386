"""Which tokens may follow where an answer has a form to keep: worked out on a thread of its own while the model computes the step.

    begin(what will be sampled)  ->  the model's forward, meanwhile each matcher takes the tokens since its last mask and writes the next
    result()                     ->  TokenMasks, applied to the logits before anything is sampled

Nothing here has to be right about the past: a matcher is made anew from the attempt's output whenever there is none that fits, so a request
that comes from elsewhere (with its first token, or moved with many) goes on as if it had been here. Matchers begin as copies of one per
grammar. What of a grammar cannot be followed ends the answer (TokenMasks.broken), never the step: others are in it.

prepare() and begin() may be called on any thread; the matchers belong to the mask thread, compiling has another.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_serve.clock import Clock
from pd_serve.engine.batch import SampleSpec
from pd_serve.grammar.base import Grammar
from pd_serve.grammar.compiler import MaskExecutor, Matcher, Vocabulary, mask_nbytes
from pd_serve.ids import AttemptId

_log = logging.getLogger(__name__)

NUM_PROTOTYPES = 128
"""Grammars kept compiled."""
SPARE_MATCHERS = 64
"""Kept of attempts that a step does not sample: they may have skipped it."""
_BITS = 8


class Constrained(NamedTuple):
    """A row of logits whose next token has a grammar to keep."""

    row: int
    attempt_id: AttemptId
    grammar: Grammar
    spec: SampleSpec
    """With all output_ids."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    rows: tuple[int, ...]
    allowed: NDArray[np.uint8]
    """[len(rows), mask_nbytes(vocab_size)]: a bit per token, the lowest first"""
    broken: frozenset[int] = frozenset()
    """Of the rows: those that may only end, because the grammar can be followed no further."""

    def forbid(self, logits: Tensor) -> None:
        """Minus infinity for what may not follow, in place: `logits` [num_rows, vocab_size] float32. Every row by itself."""
        vocab_size = logits.shape[1]
        if logits.device.type != "cpu":
            self.forbid_there(logits)
            return
        forbidden = torch.from_numpy(np.unpackbits(~self.allowed, axis=1, count=vocab_size, bitorder="little").view(np.bool_))
        for row, tokens in zip(self.rows, forbidden, strict=True):
            logits[row].masked_fill_(tokens, -torch.inf)

    def forbid_there(self, logits: Tensor) -> None:
        """forbid() on any device: the bits travel, and are taken apart where the logits are."""
        bits = torch.from_numpy(self.allowed).to(logits.device, non_blocking=True)
        places = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
        is_allowed = ((bits[:, :, None] >> places) & 1).bool().flatten(1)[:, : logits.shape[1]]
        rows = torch.tensor(self.rows).to(logits.device, non_blocking=True)
        logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


class TokenSet(NamedTuple):
    """The model's tokens."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


class _State(NamedTuple):
    grammar: Grammar
    matcher: Matcher


class GrammarMasks:
    """Costs nothing, threads included, until a grammar is met; then the vocabulary is read once."""

    def __init__(self, open_vocabulary: Callable[[], Vocabulary], tokens: TokenSet, num_threads: int, clock: Clock) -> None:
        """`num_threads`: that share out the masks of one step."""
        self._open_vocabulary = open_vocabulary
        self._tokens = tokens
        self._num_threads = num_threads
        self._clock = clock
        self._compiling = ThreadPoolExecutor(1, "grammar-compile")
        self._masking = ThreadPoolExecutor(1, "grammar-mask")
        self._lock = Lock()
        self._vocabulary: Future[Vocabulary] | None = None
        self._prototypes: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()
        self._executor: MaskExecutor | None = None
        self._states: OrderedDict[AttemptId, _State] = OrderedDict()

    def prepare(self, grammar: Grammar) -> None:
        """An attempt with it is about to come: compile it meanwhile."""
        self._prototype(grammar)

    def begin(self, asked: Sequence[Constrained]) -> Future[TokenMasks]:
        return self._masking.submit(self._masks, tuple(asked))

    def close(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)

    # ---- compiling

    def _prototype(self, grammar: Grammar) -> Future[Matcher]:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._compiling.submit(self._read_vocabulary)
            found = self._prototypes.get(grammar)
            if found is None:
                found = self._prototypes[grammar] = self._compiling.submit(_compile, self._vocabulary, grammar)
                if len(self._prototypes) > NUM_PROTOTYPES:
                    self._prototypes.popitem(last=False)
            else:
                self._prototypes.move_to_end(grammar)
            return found

    def _read_vocabulary(self) -> Vocabulary:
        started_at = self._clock.now()
        vocabulary = self._open_vocabulary()
        _log.info("read the vocabulary for grammars in %.2f s", self._clock.now() - started_at)
        return vocabulary

    # ---- on the mask thread

    def _masks(self, asked: tuple[Constrained, ...]) -> TokenMasks:
        matchers = [self._matcher_for(item) for item in asked]
        allowed = np.zeros((len(asked), mask_nbytes(self._tokens.vocab_size)), np.uint8)
        self._write(matchers, allowed)
        broken: list[int] = []
        for mask, matcher, item in zip(allowed, matchers, asked, strict=True):
            if isinstance(matcher, Matcher) and not matcher.problem:
                self._hold_back_ends(mask, item.spec)
                continue
            _log.warning("attempt %d ends early: %s", item.attempt_id, matcher.problem if isinstance(matcher, Matcher) else matcher)
            mask[:] = 0
            _set_bits(mask, self._tokens.eos_token_ids)
            broken.append(item.row)
        while len(self._states) > len(asked) + SPARE_MATCHERS:
            self._states.popitem(last=False)
        return TokenMasks(tuple([item.row for item in asked]), allowed, frozenset(broken))

    def _matcher_for(self, item: Constrained) -> Matcher | BaseException:
        """That has consumed all of the output so far; or why there is none, whatever it is: the step goes on."""
        output_ids = item.spec.output_ids
        state = self._states.get(item.attempt_id)
        if state is None or state.grammar != item.grammar or state.matcher.num_consumed > len(output_ids):
            prototype = self._prototype(item.grammar)
            error = prototype.exception()
            if error is not None:
                return error
            state = self._states[item.attempt_id] = _State(item.grammar, prototype.result().copy())
        self._states.move_to_end(item.attempt_id)
        state.matcher.consume(output_ids[state.matcher.num_consumed :])
        return state.matcher

    def _write(self, matchers: Sequence[Matcher | BaseException], allowed: NDArray[np.uint8]) -> None:
        pairs = [(matcher, index) for index, matcher in enumerate(matchers) if isinstance(matcher, Matcher)]
        if len(pairs) == 1 or self._num_threads == 1:
            for matcher, index in pairs:
                matcher.write_mask(allowed[index])
        elif pairs:
            if self._executor is None:
                self._executor = MaskExecutor(self._num_threads)
            self._executor.write_masks(pairs, allowed)

    def _hold_back_ends(self, mask: NDArray[np.uint8], spec: SampleSpec) -> None:
        """Before min_tokens, and with ignore_eos, the answer goes on wherever its grammar lets it."""
        ends: Sequence[int] = ()
        if spec.eos_masked:
            ends = (*self._tokens.eos_token_ids, *spec.params.stop_token_ids)
        elif spec.params.ignore_eos:
            ends = self._tokens.eos_token_ids
        if ends:
            rest = mask.copy()
            _clear_bits(rest, ends)
            if rest.any():
                mask[:] = rest


def _compile(vocabulary: Future[Vocabulary], grammar: Grammar) -> Matcher:
    """On the thread that reads the vocabulary, and after it has."""
    return vocabulary.result().matcher(grammar)


def _set_bits(mask: NDArray[np.uint8], token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        mask[token_id // _BITS] |= 1 << token_id % _BITS


def _clear_bits(mask: NDArray[np.uint8], token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        mask[token_id // _BITS] &= ~(1 << token_id % _BITS) & 0xFF
