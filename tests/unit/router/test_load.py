"""The load book's kept sums are those one would make anew from every charge."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest

from pd_serve.protocol.link import PeerStatus
from router import load as module
from router.linked_worker import LinkedWorker
from router.load import REPORT_LAG_S, LoadBook
from router.roster import as_worst_known
from tests.fakes import block_counts, joined, load, peer_id, peer_info, welcome

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


def test_view_is_kept_until_something_changes() -> None:
    """Of 1,000 workers, a request changes two."""
    book, worker = LoadBook(), _linked()
    first = book.view(worker, False)
    assert book.view(worker, False) is first
    book.charge(1, None, worker.peer, 100)
    assert book.view(worker, False).decode_tokens == 100
    book.release(1, (worker.peer,))
    assert book.view(worker, False) == first
    worker.load = load(prefill_queue_tokens=70)
    assert book.view(worker, False).prefill_backlog_tokens == 70
    worker.peer_status = PeerStatus((joined(peer_id("p0")),))
    assert book.view(worker, False).bandwidths == {peer_id("p0"): 1e9}
    assert book.view(worker, True).is_joining
    assert book.view(worker, True, 5.0).prefill_tokens_per_s == 5.0


def test_report_of_an_empty_queue_ends_prompts_of_which_nobody_said_that_they_are_computed() -> None:
    """Such as those of a request that moved: its first token came long ago."""
    book, peer = LoadBook(short_tokens=100), peer_id()
    book.charge(1, None, peer, 50)
    book.told(1, peer, 1.0)
    book.reported(peer, 1.0 + REPORT_LAG_S / 2, is_queue_empty=True)
    assert book._worker(peer).prefill.num_short_tokens == 50, "too early to know of it"
    book.reported(peer, 1.0 + 2 * REPORT_LAG_S)
    assert book._worker(peer).prefill.num_short_tokens == 50, "something is still to be computed there"
    book.reported(peer, 1.1 + 2 * REPORT_LAG_S, is_queue_empty=True)
    assert book._worker(peer).prefill.num_short_tokens == 0
    assert book.num_sequences(peer, load()) == 1


def test_what_a_worker_has_cached_is_no_backlog() -> None:
    book, prefill, decode = LoadBook(), peer_id("p0"), peer_id("d0")
    book.charge(1, prefill, decode, 1000, num_to_compute=40)
    assert book.prefill_backlog_tokens(prefill, load()) == 40
    assert book.decode_tokens(decode, load()) == 1000


def test_what_has_ended_since_the_last_report_is_counted_off_it() -> None:
    """A worker that was full takes the next at once, and not when it reports again."""
    book, prefill, decode = LoadBook(), peer_id("p0"), peer_id("d0")
    for key in (1, 2):
        book.charge(key, prefill, decode, 1000)
        book.told(key, prefill, 0.0)
        book.told(key, decode, 0.0)
    book.reported(prefill, 1.0)
    book.reported(decode, 1.0)
    book.charge(3, prefill, decode, 70)
    of_prefill, of_decode = load(prefill_queue_tokens=2000), msgspec.structs.replace(load(), running=2, decode_context_tokens=2100)
    book.prefilled(1, prefill)
    assert book.prefill_backlog_tokens(prefill, of_prefill) == 1070
    book.release(1, (prefill, decode))
    assert book.num_sequences(decode, of_decode) == 2
    assert book.decode_tokens(decode, of_decode) == 1170
    book.release(3, (prefill, decode))
    assert book.prefill_backlog_tokens(prefill, of_prefill) == 1000, "no report knew of it"
    book.reported(prefill, 2.0)
    book.reported(decode, 2.0)
    assert book.prefill_backlog_tokens(prefill, of_prefill) == 2000, "others send there too"
    assert book.num_sequences(decode, of_decode) == 2


def test_what_a_report_may_know_of_is_counted_off_it_when_it_ends() -> None:
    """A worker reports as soon as a prompt comes, too soon to be sure of it; the prompt is computed before the next report."""
    book, prefill, decode = LoadBook(), peer_id("p0"), peer_id("d0")
    book.charge(1, prefill, decode, 1000)
    book.told(1, prefill, 1.0)
    book.reported(prefill, 1.0 + REPORT_LAG_S / 5)
    of_prefill = load(prefill_queue_tokens=1000)
    assert book.prefill_backlog_tokens(prefill, of_prefill) == 1000
    book.prefilled(1, prefill)
    assert book.prefill_backlog_tokens(prefill, of_prefill) == 0


def test_what_changes_nothing_tells_nobody() -> None:
    book, prefill, decode = LoadBook(), peer_id("p0"), peer_id("d0")
    book.charge(1, prefill, decode, 1000)
    book.prefilled(1, prefill)
    book.changed.clear()
    book.prefilled(1, prefill)
    book.prefilled(1, decode)
    assert not book.changed
    book.release(1, (prefill, decode))
    assert book.changed == {decode}


def test_a_prompt_that_was_half_computed_when_last_reported_takes_nothing_off_those_behind_it() -> None:
    """Of the first the report tells what was left; the second is where it was."""
    book, prefill, decode = LoadBook(), peer_id("p0"), peer_id("d0")
    for key, num_tokens in ((1, 8000), (2, 2000)):
        book.charge(key, prefill, decode, num_tokens)
        book.told(key, prefill, 0.0)
    book.reported(prefill, 1.0)
    told = load(prefill_queue_tokens=100 + 2000)
    book.prefilled(1, prefill)
    assert book.prefill_backlog_tokens(prefill, told) == 2000
    book.charge(3, prefill, decode, 70)
    assert book.prefill_backlog_tokens(prefill, told) == 2070
    book.prefilled(2, prefill)
    assert book.prefill_backlog_tokens(prefill, told) == 70


def test_old_report_is_no_report_of_an_idle_worker() -> None:
    """One has been silent for long: it counts as loaded as the most loaded of the others."""
    book = LoadBook()
    workers = [_linked(f"d{index}") for index in range(3)]
    for worker in workers:
        book.reported(worker.peer, 1.0)
    for worker in workers[1:]:
        book.reported(worker.peer, 9.0)
    workers[2].load = load(prefill_queue_tokens=300)
    views = as_worst_known([book.view(worker, False, stale_before=8.0) for worker in workers])
    assert [view.is_stale for view in views] == [True, False, False]
    assert [view.prefill_backlog_tokens for view in views] == [300, 0, 300]
    workers[0].load = load(prefill_queue_tokens=500)
    views = as_worst_known([book.view(worker, False, stale_before=8.0) for worker in workers])
    assert views[0].prefill_backlog_tokens == 500, "what is known to be worse stays"


def _linked(name: str = "decode-0") -> LinkedWorker:
    return LinkedWorker(peer_id(name), "http://x", None, welcome(peer_info(peer_id(name))), load(), 0.0)  # type: ignore[arg-type]
