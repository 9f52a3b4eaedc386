"""The load book's kept sums are those one would make anew from every charge."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from router import load as module
from router.load import REPORT_LAG_S, LoadBook
from tests.fakes import block_counts, load, peer_id

BLOCK = 16


@dataclass
class _Known:
    num_tokens: int
    told_at: float | None = None
    is_covered: bool = False


class _Plain:
    """The same book, kept as a list of what happened: sums are made when asked for."""

    def __init__(self) -> None:
        self.prefill: dict[int, _Known] = {}
        self.decode: dict[int, _Known] = {}

    def reported(self, now: float) -> None:
        for known in self.decode.values():
            known.is_covered = known.is_covered or known.told_at is not None
        for known in self.prefill.values():
            known.is_covered = known.is_covered or (known.told_at is not None and now - known.told_at > REPORT_LAG_S)

    def figures(self) -> tuple[int, int, int, int]:
        """(backlog of prefill, tokens of decode, sequences, free tokens) with a report of nothing and 1,000 free blocks."""
        own = sum(known.num_tokens for known in self.prefill.values())
        uncovered = [known.num_tokens for known in self.prefill.values() if not known.is_covered]
        held = sum(known.num_tokens for known in self.decode.values())
        blocks = sum(-(-(known.num_tokens + 1) // BLOCK) for known in self.decode.values() if not known.is_covered)
        return min(own, sum(uncovered)), held, len(self.decode), (1000 - blocks) * BLOCK


def _differs(seed: int) -> str:
    """What the book says otherwise than the plain one over 300 random events; empty: nothing."""
    rng = random.Random(seed)
    book, plain, peer, report = LoadBook(), _Plain(), peer_id(), load(blocks=block_counts(1000))
    now = 0.0
    for key in range(300):
        now += rng.random() * 0.05
        known = rng.choice([*plain.decode, key])
        match rng.randrange(6):
            case 0 | 1:
                tokens = rng.randrange(1, 200)
                book.charge(key, None, peer, tokens)
                plain.prefill[key], plain.decode[key] = _Known(tokens), _Known(tokens)
            case 2:
                book.told(known, peer, now)
                for side in (plain.prefill, plain.decode):
                    if known in side:
                        side[known].told_at = now
            case 3:
                book.prefilled(known, peer)
                plain.prefill.pop(known, None)
            case 4:
                book.release(known, (peer,))
                plain.prefill.pop(known, None)
                plain.decode.pop(known, None)
            case 5:
                book.reported(peer, now)
                plain.reported(now)
        said = (
            book.prefill_backlog_tokens(peer, report),
            book.decode_tokens(peer, report),
            book.num_sequences(peer, report),
            book.free_tokens(peer, report, BLOCK),
        )
        if said != plain.figures():
            return f"seed {seed}, event {key}: {said} instead of {plain.figures()}"
    for key in list(plain.decode) + list(plain.prefill):
        book.release(key, (peer,))
    return "" if book.is_empty() and book.free_tokens(peer, report, BLOCK) == 1000 * BLOCK else f"seed {seed}: something is left"


@pytest.mark.parametrize("seed", range(20))
def test_kept_sums_are_those_made_anew(seed: int) -> None:
    assert _differs(seed) == ""


def test_a_sum_that_keeps_what_was_covered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(self: module._Charges, told_before: object) -> None:
        self._uncovered.clear()  # and forgets to count them off

    monkeypatch.setattr(module._Charges, "cover", keeps)
    assert any(_differs(seed) for seed in range(20))
