"""A rank that says no is heard at once, in its own words: a driver that waits on for what will not come hides them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.rank_driver import join, open_local, run_pair, tokens_of
from tests.whole_rank import Rank, start_rank

PROMPT = tuple(range(1, 12))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    fabric = LoopbackFabric()
    prefill, decode = start_rank("p", fabric, "shm"), start_rank("d", fabric, "shm")
    join(prefill.driver, decode.driver)
    yield prefill, decode
    prefill.close()
    decode.close()


def test_what_a_rank_refuses_is_not_waited_for(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    refused = msgspec.structs.replace(GREEDY, max_tokens=0)
    with pytest.raises(AssertionError, match=r"no Reserved: Refused.*max_tokens"):
        open_local(decode.driver, 1, PROMPT, refused)
    with pytest.raises(AssertionError, match=r"no Reserved: Refused.*max_tokens"):
        run_pair(prefill.driver, decode.driver, 2, PROMPT, refused)


def test_nor_what_it_fails_be_it_of_either_leg(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.runner.fail_next = prefill.runner.fail_next = 1
    open_local(decode.driver, 1, PROMPT, GREEDY)
    with pytest.raises(AssertionError, match=r"no Step: Failed.*planted"):
        tokens_of(decode.driver, AttemptId(1))
    with pytest.raises(AssertionError, match=r"no PrefillDone: Failed.*planted"):
        run_pair(prefill.driver, decode.driver, 2, PROMPT, GREEDY)


def test_a_wait_that_is_over_tells_what_came_instead_but_what_always_comes(pair: tuple[Rank, Rank]) -> None:
    _, decode = pair
    decode.driver.timeout_s = 0.3
    with pytest.raises(TimeoutError, match=r"seen: \[.*PeerStatus.*\]$") as told:
        decode.driver.wait(type(None))
    assert "Report(" not in str(told.value)
