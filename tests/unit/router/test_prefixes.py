"""What the router knows of prefix caches: by events alone, of no older incarnation, and after a gap nothing until the snapshot is there."""

from __future__ import annotations

import pytest

from pd_serve.kv.prefix_chain import SHORT_NBYTES, chain_digests
from pd_serve.protocol.cache_events import CacheEvents
from router import chains
from router import prefixes as module
from router.prefixes import ASK_AGAIN_S, EXPECTED_S, Prefixes
from tests.fakes import peer_id

A, B, C = peer_id("a"), peer_id("b"), peer_id("c")
PROMPT = tuple(range(100, 140))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


class Known:
    """Prefixes with two workers of 4 tokens a block and one of 6, and the time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.prefixes = Prefixes(lambda: self.clock.now)
        for peer, size in ((A, 4), (B, 4), (C, 6)):
            self.prefixes.linked(peer, size)

    def cached(self, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
        cached = self.prefixes.cached(prompt)
        return tuple(cached.get(peer, 0) for peer in (A, B, C))


def short(ids: tuple[int, ...], num_blocks: int, size: int = 4, first: int = 0) -> bytes:
    return b"".join(digest[:SHORT_NBYTES] for digest in list(chain_digests(ids, size, 0, num_blocks))[first:])


def snapshot(seq: int, stored: bytes = b"", part: int = 0, num_parts: int = 1) -> CacheEvents:
    return CacheEvents(seq, stored, part=part, num_parts=num_parts)


@pytest.fixture
def known() -> Known:
    return Known()


def test_of_nobody_nothing_is_known_and_nothing_is_hashed(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "chain_digests", lambda *args: (_ for _ in ()).throw(AssertionError("hashed")))
    assert known.cached() == (0, 0, 0)
    assert not known.prefixes.cached(PROMPT)
    assert known.prefixes.cached(PROMPT).get(peer_id("x"), 7) == 7


def test_each_worker_has_as_much_as_its_events_say(known: Known) -> None:
    known.prefixes.apply(A, snapshot(5, short(PROMPT, 3)))
    known.prefixes.apply(B, snapshot(0))
    known.prefixes.apply(B, CacheEvents(1, short(PROMPT, 7)))
    known.prefixes.apply(C, snapshot(0, short(PROMPT, 2, size=6)))
    assert known.cached() == (12, 28, 12)
    assert known.cached((*PROMPT[:20], 0, 0, 0, 0)) == (12, 20, 12)
    assert known.cached((0, *PROMPT)) == (0, 0, 0)
    assert known.prefixes.num_blocks == 12
    known.prefixes.apply(B, CacheEvents(2, b"", short(PROMPT, 7, first=4)))
    assert known.cached() == (12, 16, 12)


def test_one_token_at_least_is_left_to_compute(known: Known) -> None:
    known.prefixes.apply(A, snapshot(0, short(PROMPT, 10)))
    assert known.cached() == (36, 0, 0)
    assert known.cached((*PROMPT, 1)) == (40, 0, 0)
    assert known.cached(()) == (0, 0, 0)


def test_a_hole_ends_a_prefix(known: Known) -> None:
    known.prefixes.apply(A, snapshot(0, short(PROMPT, 2) + short(PROMPT, 8, first=3)))
    assert known.cached() == (8, 0, 0)


def test_a_prompt_is_hashed_once_and_one_block_beyond_what_is_known(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(*args: object) -> object:
        for digest in chain_digests(*args):  # type: ignore[arg-type]
            hashed.append(digest)
            yield digest

    monkeypatch.setattr(chains, "chain_digests", counting)
    known.prefixes.apply(A, snapshot(0, short(PROMPT, 3)))
    known.prefixes.apply(B, snapshot(0, short(PROMPT, 5)))
    cached = known.prefixes.cached(PROMPT)
    assert not hashed
    assert (cached[A], cached[B]) == (12, 20)
    assert len(hashed) == 6
    known.prefixes.apply(A, CacheEvents(1, short(PROMPT, 6, first=3)))
    assert (cached[A], cached[B]) == (24, 20)
    assert len(hashed) == 7, "what was hashed is kept"


def test_what_is_known_of_a_waiting_prompt_follows_the_events(known: Known) -> None:
    cached = known.prefixes.cached(PROMPT)
    assert dict(cached) == {}
    known.prefixes.apply(A, snapshot(0, short(PROMPT, 4)))
    assert dict(cached) == {A: 16}
    known.prefixes.forget(A)
    assert dict(cached) == {}
    assert known.prefixes.num_blocks == 0


def test_events_before_the_snapshot_and_of_other_incarnations_are_dropped(known: Known) -> None:
    assert not known.prefixes.apply(A, CacheEvents(7, short(PROMPT, 3)))
    assert not known.prefixes.apply(peer_id("a", 2), snapshot(0, short(PROMPT, 3)))
    assert known.cached() == (0, 0, 0)
    known.prefixes.apply(A, snapshot(9, short(PROMPT, 1)))
    assert known.cached() == (4, 0, 0)
    known.prefixes.forget(A)
    known.prefixes.linked(peer_id("a", 2), 4)
    assert not known.prefixes.apply(A, CacheEvents(10, short(PROMPT, 3)))
    assert known.prefixes.num_blocks == 0


@pytest.mark.parametrize(
    "missed",
    [CacheEvents(7, b""), CacheEvents(5, b""), CacheEvents(0, b""), snapshot(5, b"", 2, 3), snapshot(6, b"", 1, 3)],
    ids=["skipped", "twice", "began anew", "a part is missing", "changes are missing between parts"],
)
def test_after_a_gap_nothing_is_known_until_the_snapshot_is_there(known: Known, missed: CacheEvents) -> None:
    known.prefixes.apply(A, snapshot(5, short(PROMPT, 3), 0, 3))
    assert known.prefixes.apply(A, missed), "the router asks"
    assert known.cached() == (0, 0, 0)
    assert not known.prefixes.apply(A, CacheEvents(8, short(PROMPT, 3))), "asked already"
    assert known.cached() == (0, 0, 0)
    known.prefixes.apply(A, snapshot(8, short(PROMPT, 2)))
    assert known.cached() == (8, 0, 0)
    assert not known.prefixes.apply(A, CacheEvents(9, short(PROMPT, 3, first=2)))
    assert known.cached() == (12, 0, 0)


def test_a_snapshot_that_does_not_come_is_asked_for_again(known: Known) -> None:
    known.prefixes.apply(A, snapshot(0))
    assert known.prefixes.apply(A, CacheEvents(2, b""))
    known.clock.now += ASK_AGAIN_S - 0.1
    assert not known.prefixes.apply(A, CacheEvents(3, b""))
    known.clock.now += 0.1
    assert known.prefixes.apply(A, CacheEvents(4, b""))
    assert not known.prefixes.apply(A, CacheEvents(5, b""))


def test_changes_between_the_parts_of_a_snapshot_count(known: Known) -> None:
    known.prefixes.apply(A, snapshot(3, short(PROMPT, 2), 0, 2))
    assert not known.prefixes.apply(A, CacheEvents(4, short(PROMPT, 5, first=4), short(PROMPT, 2, first=1)))
    assert not known.prefixes.apply(A, snapshot(4, short(PROMPT, 4, first=2), 1, 2))
    assert known.cached() == (4, 0, 0)
    assert known.prefixes.num_blocks_of(A) == 4


def test_a_prompt_is_expected_where_it_was_sent_until_events_tell(known: Known) -> None:
    known.prefixes.apply(A, snapshot(0))
    known.prefixes.apply(C, snapshot(0))
    cached = known.prefixes.cached(PROMPT)
    assert A not in cached
    cached.expect_at((A, C))
    assert known.cached() == (36, 0, 36)
    known.prefixes.apply(A, CacheEvents(1, short(PROMPT, 10)))
    known.prefixes.apply(A, CacheEvents(2, b"", short(PROMPT, 10, first=2)))
    assert known.cached() == (8, 0, 36), "removed is removed, whatever was expected"
    known.clock.now += EXPECTED_S
    assert known.cached() == (8, 0, 0)


def test_nothing_is_expected_for_those_who_do_not_ask(known: Known) -> None:
    known.prefixes.cached(PROMPT).expect_at((A,))
    assert known.cached() == (0, 0, 0)


def test_what_is_expected_and_known_is_bounded(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXPECTED_PER_WORKER", 5)
    monkeypatch.setattr(module, "MAX_EXPECTED_BLOCKS", 3)  # beyond the one that was looked at
    monkeypatch.setattr(module, "MAX_BLOCKS_PER_WORKER", 6)
    for first in (0, 500, 1000):
        cached = known.prefixes.cached(tuple(range(first, first + 40)))
        assert A not in cached
        cached.expect_at((A,))
    assert [known.cached(tuple(range(first, first + 40)))[0] for first in (0, 500, 1000)] == [0, 0, 16]
    assert len(known.prefixes._caches[A].expected) == 5
    known.prefixes.apply(B, snapshot(0, short(PROMPT, 10)))
    assert known.prefixes.num_blocks == 6
    known.prefixes.apply(B, CacheEvents(1, short(PROMPT, 10, first=6), short(PROMPT, 1)))
    assert known.prefixes.num_blocks == 6


def test_expired_expectations_take_no_memory(known: Known) -> None:
    known.prefixes.apply(A, snapshot(0))
    cached = known.prefixes.cached(PROMPT)
    assert A not in cached
    cached.expect_at((A,))
    known.clock.now += EXPECTED_S
    known.prefixes.apply(A, CacheEvents(1, b""))
    assert not known.prefixes._caches[A].expected
