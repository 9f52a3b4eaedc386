"""Speed is tokens over the time in which there was something to compute, however long prompts waited for each other."""

from __future__ import annotations

import pytest

from router.throughput import HALF_LIFE_S, PRIOR_TOKENS_PER_S, Throughput
from tests.fakes import peer_id

P0, P1 = peer_id("p0"), peer_id("p1")


def work(speeds: Throughput, rate: float, at_once: int, rounds: int = 40, num_tokens: int = 500, pause_s: float = 0.0) -> None:
    """Prompts that come together and are computed one after the other at that rate, then nothing for a while."""
    now, key = 100.0, 0
    for _ in range(rounds):
        keys = range(key, key + at_once)
        key += at_once
        for sent in keys:
            speeds.began(P0, sent, now)
        for sent in keys:
            now += num_tokens / rate
            speeds.ended(P0, sent, num_tokens, now)
        now += pause_s


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("pause_s", [0.0, 5.0])
def test_neither_queues_nor_pauses_make_a_worker_look_slow(at_once: int, pause_s: float) -> None:
    speeds = Throughput()
    work(speeds, 4000.0, at_once, pause_s=pause_s)
    assert speeds.tokens_per_s(P0) == pytest.approx(4000.0, rel=0.05)
    assert speeds.is_idle()


def test_time_from_sending_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each prompt's own time in the queue taken for the time it was computed in."""
    began: dict[int, float] = {}

    class OfSending(Throughput):
        def began(self, peer: object, key: int, now: float) -> None:  # type: ignore[override]
            began[key] = now
            super().began(peer, key, now)  # type: ignore[arg-type]

        def ended(self, peer: object, key: int, num_computed_tokens: int, now: float) -> None:  # type: ignore[override]
            self._meters[peer].busy_since = began[key]  # type: ignore[index]
            super().ended(peer, key, num_computed_tokens, now)  # type: ignore[arg-type]

    speeds = OfSending()
    work(speeds, 4000.0, 8)
    assert speeds.tokens_per_s(P0) < 1500.0


def test_worker_that_slows_down_is_noticed() -> None:
    speeds = Throughput()
    work(speeds, 8000.0, 1, rounds=int(2 * HALF_LIFE_S * 8000 / 500))
    work(speeds, 1000.0, 1, rounds=int(3 * HALF_LIFE_S * 1000 / 500))
    assert speeds.tokens_per_s(P0) < 2000.0


def test_unmeasured_workers_are_like_the_measured() -> None:
    speeds = Throughput()
    assert speeds.tokens_per_s(P1) == PRIOR_TOKENS_PER_S
    work(speeds, 5000.0, 1)
    assert speeds.tokens_per_s(P1) == pytest.approx(5000.0, rel=0.1)
    speeds.forget(P0)
    assert speeds.tokens_per_s(P0) == speeds.tokens_per_s(P1)


def test_prompts_that_were_given_up_are_no_work_and_leave_nothing() -> None:
    speeds = Throughput()
    work(speeds, 4000.0, 1)
    before = speeds.tokens_per_s(P0)
    speeds.began(P0, 9001, 500.0)
    assert not speeds.is_idle()
    speeds.left(P0, 9001, 600.0)
    speeds.left(P0, 9001, 600.0)
    speeds.ended(P0, 9001, 10**6, 601.0)
    assert speeds.is_idle()
    assert speeds.tokens_per_s(P0) == before


def test_handover_follows_what_is_seen() -> None:
    speeds = Throughput()
    for _ in range(100):
        speeds.handed_over(0.036)
    assert speeds.handover_s == pytest.approx(0.036, rel=0.01)
