"""What a worker tells of its prefix cache, and that routers who take it in know just what can be found there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.ids import LinkId, RouterId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.cache_events import CacheEvents, CacheSnapshot
from pd_serve.protocol.link import Load
from router.prefixes import Prefixes
from tests.machine_fakes import DECODE, LINK, Worker, batch_of, frames, open_frame, prompt
from workers import cache_feed
from workers.cache_feed import CacheFeed
from workers.events import FrameReceived, LinkClosed, LinkOpened, RunBatch, Tick

SIZE = 4
OTHER = LinkId(2)


def keys(pool: BlockPool) -> set[int]:
    return {int.from_bytes(digest[:8], "little") for digest in pool.prefixes.digests()}


def run(worker: Worker, attempt: int, num_tokens: int) -> None:
    """A prompt of its own, computed here, and one token."""
    actions = worker.frame(open_frame(attempt, prompt(num_tokens, first=10 * attempt), writer=None, max_tokens=1))
    while any(isinstance(action, RunBatch) for action in actions):
        actions = worker.finish_step(batch_of(actions), 5)


def tick(worker: Worker, seconds: float = 1.0) -> list[CacheEvents]:
    worker.now += seconds
    return frames(CacheEvents, worker.do(Tick()))


def test_a_router_gets_a_snapshot_and_then_what_changes_with_the_rhythm_of_load() -> None:
    worker = Worker(DECODE)
    run(worker, 1, 9)
    first = worker.do(LinkOpened(OTHER, RouterId("other")))
    changes, part = frames(CacheEvents, first)
    assert not changes.is_snapshot, "of the first link, which has its own"
    assert (part.seq, len(part.stored), part.part, part.num_parts) == (1, 16, 0, 1)
    assert frames(Load, first), "load is not held up"
    run(worker, 2, 5)
    told = tick(worker)
    assert len(told) == 2, "the same to both links"
    assert told[0] == told[1]
    assert (told[0].seq, len(told[0].stored), told[0].removed) == (2, 8, b"")
    assert tick(worker) == [], "nothing new"
    worker.do(LinkClosed(LINK))
    run(worker, 3, 5)
    assert [len(events.stored) for events in tick(worker)] == []


def test_changes_wait_for_the_next_report_and_wake_the_worker_for_it() -> None:
    worker = Worker(DECODE)
    tick(worker)
    run(worker, 1, 9)
    deadline = worker.machine.next_deadline()
    assert deadline is not None
    assert deadline <= worker.now + 0.1
    assert len(tick(worker, 0.1)) == 1


def test_a_router_that_asks_gets_one_snapshot_however_often_it_asks() -> None:
    worker = Worker(DECODE)
    run(worker, 1, 9)
    tick(worker)
    for _ in range(50):
        worker.frame(CacheSnapshot())
    assert [(events.part, events.num_parts, len(events.stored)) for events in tick(worker)] == [(0, 1, 16)]
    assert tick(worker) == []
    worker.do(FrameReceived(OTHER, CacheSnapshot()))
    assert tick(worker) == [], "no link of that number is up"


def test_nothing_is_noted_while_no_router_is_linked() -> None:
    worker = Worker(DECODE)
    worker.do(LinkClosed(LINK))
    assert worker.machine.pool.prefixes._changes is None
    worker.do(LinkOpened(OTHER, RouterId("other")))
    assert worker.machine.pool.prefixes._changes is not None


class Routers:
    """A pool, its feed, and as many routers as links."""

    def __init__(self) -> None:
        self.pool = BlockPool(12, SIZE)
        self.feed = CacheFeed(self.pool.prefixes)
        self.routers: dict[LinkId, Prefixes] = {}
        self.num_asked = 0

    def open(self, link_id: LinkId) -> None:
        prefixes = self.routers[link_id] = Prefixes(lambda: 0.0)
        prefixes.linked(DECODE.peer, SIZE)
        self.feed.opened(link_id)

    def close(self, link_id: LinkId) -> None:
        self.feed.closed(link_id)
        del self.routers[link_id]

    def report(self, lost: float, rng: random.Random) -> None:
        for action in self.feed.frames():
            assert isinstance(action.frame, CacheEvents)
            if rng.random() < lost:
                continue
            if self.routers[action.link_id].apply(DECODE.peer, action.frame):
                self.num_asked += 1
                self.feed.asked(action.link_id)

    def known(self, link_id: LinkId) -> set[int]:
        return self.routers[link_id]._caches[DECODE.peer].known


def play(rng: random.Random, lost: float) -> int:
    """Returns how often a router had to ask."""
    made = Routers()
    pool, held = made.pool, []
    for _ in range(80):
        move = rng.random()
        if move < 0.1:
            link_id = LinkId(rng.randrange(3))
            (made.close if link_id in made.routers else made.open)(link_id)
        elif move < 0.35 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif move < 0.7:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            if pool.num_blocks_for(len(ids)) <= pool.num_allocatable:
                held.append(pool.allocate(pool.num_blocks_for(len(ids))))
                pool.publish(ids, held[-1], len(ids))
        else:
            made.report(lost, rng)
    for blocks in held:
        pool.release(blocks)
    for token_id in range(2, 8):  # what was lost last is noticed with the next change
        (block,) = pool.allocate(1)
        pool.publish([token_id] * SIZE, (block,), SIZE)
        pool.release((block,))
        made.report(0.0, rng)
    assert not made.feed.is_behind
    for link_id in made.routers:
        assert made.known(link_id) == keys(pool)
    return made.num_asked


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "MAX_DIGESTS", 3)


@settings(max_examples=40, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_every_router_knows_what_is_published(rng: random.Random) -> None:
    assert play(rng, lost=0.0) == 0


def test_what_is_lost_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prefixes.ASK_AGAIN_S", 0.0)
    assert sum(play(random.Random(seed), lost=0.2) for seed in range(20)) > 20
