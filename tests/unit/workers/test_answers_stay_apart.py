"""Many attempts over one pair of ranks: whose record, whose KV, whose token. Real threads around a fake runner."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from pd_serve.ids import AttemptId
from pd_serve.protocol.link import Cancel, Closed, Failed, FailureReason, FinishReason, Open, Prefill, Reserved, Step, TokenOutput
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.transport.fault_plan import FaultPlan
from pd_serve.transport.faulty import FaultyTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.fake_engine import VOCAB_SIZE, expected_logprobs, expected_tokens
from tests.rank_driver import join, open_local, open_pair, run_pair, tokens_of
from tests.whole_rank import Rank, start_rank, wait_idle

BLOCK = 4


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank]]:
    """Two sequences at most run on each; the parameter is the share of records that prefill's transport loses."""
    fabric, plan = LoopbackFabric(), FaultPlan(notice_loss=getattr(request, "param", 0.0), seed=3)
    prefill = start_rank("p", fabric, "shm", make=lambda inner: partial(FaultyTransport, plan=plan, inner=inner), max_running=2)
    decode = start_rank("d", fabric, "shm", max_running=2)
    join(prefill.driver, decode.driver)
    yield prefill, decode
    prefill.close()
    decode.close()


def prompt_of(attempt: int) -> tuple[int, ...]:
    """No two alike within the first two tokens: nothing is shared."""
    return tuple((attempt * 7 + attempt // VOCAB_SIZE * 3 + offset * (attempt % 5 + 1)) % VOCAB_SIZE for offset in range(2 + attempt % 9))


def is_clean(rank: Rank) -> bool:
    load = wait_idle(rank).load
    return load.leases == 0 and load.blocks.total == load.blocks.free + load.blocks.cached


def test_the_record_beside_the_kv_is_the_attempts_own(pair: tuple[Rank, Rank]) -> None:
    """500 requests, two at a time in flight: first token and its log-probability belong to the prompt they were asked for."""
    prefill, decode = pair
    sampling = SamplingParams(max_tokens=2, temperature=0.0, num_logprobs=0)
    for attempt in range(1, 501, 2):
        two = (attempt, attempt + 1)
        for one in two:
            open_pair(prefill.driver, decode.driver, one, prompt_of(one), sampling)
        for one in two:
            tokens = tokens_of(decode.driver, AttemptId(one))
            ids = expected_tokens(prompt_of(one), 2)
            assert [token.token_id for token in tokens] == ids, one
            assert [token.logprobs for token in tokens] == [expected_logprobs(prompt_of(one)[-1], ids[0]), expected_logprobs(*ids)], one
    assert is_clean(prefill)
    assert is_clean(decode)


@pytest.mark.parametrize("pair", [0.05], indirect=True)
def test_a_lost_record_costs_its_own_attempt_only(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    num_failed = 0
    for attempt in range(1, 101):
        prompt = prompt_of(attempt)
        decode.driver.tell(Open(AttemptId(attempt), prompt, 0, sampling, prefill.driver.welcome.info.peer, 0.3))  # type: ignore[union-attr]
        reserved = decode.driver.wait(Reserved, partial(lambda attempt, frame: frame.attempt_id == attempt, attempt))
        assert reserved.target is not None
        prefill.driver.tell(Prefill(AttemptId(attempt), prompt, 0, sampling, reserved.target))
        ended = decode.driver.wait(object, partial(lambda attempt, frame: is_end_of(attempt, frame), attempt))
        if isinstance(ended, Failed):
            assert ended.reason is FailureReason.TIMEOUT
            num_failed += 1
    assert 1 <= num_failed <= 15
    assert is_clean(prefill)
    assert is_clean(decode)


def is_end_of(attempt: int, frame: object) -> bool:
    if isinstance(frame, Step):
        return any(output.attempt_id == attempt and output.finish is not None for output in frame.outputs)
    return isinstance(frame, Failed) and frame.attempt_id == attempt


def test_prompts_in_one_batch_are_not_mixed_up_while_others_are_cancelled(pair: tuple[Rank, Rank]) -> None:
    """258 prompts, six at a time on ranks that run two, 15 % of them cancelled."""
    prefill, decode = pair
    rng = random.Random(15)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    for first in range(1, 259, 6):
        group = range(first, first + 6)
        cancelled = {attempt for attempt in group if rng.random() < 0.15}
        for attempt in group:
            open_pair(prefill.driver, decode.driver, attempt, prompt_of(attempt), sampling)
            if attempt in cancelled:
                for rank in pair:
                    rank.driver.tell(Cancel(AttemptId(attempt)))
        for attempt in group:
            if attempt in cancelled:
                decode.driver.wait(Closed, partial(lambda attempt, frame: frame.attempt_id == attempt, attempt))
            else:
                assert ids(tokens_of(decode.driver, AttemptId(attempt))) == expected_tokens(prompt_of(attempt), 4), attempt
    assert is_clean(prefill)
    assert is_clean(decode)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_first_tokens_end_as_they_do_where_they_are_computed(pair: tuple[Rank, Rank], length: int) -> None:
    """max_tokens 1 and 2; the first or second token a stop token; log-probabilities. One token too many would hold up the next."""
    prefill, decode = pair
    prompt = tuple(range(20, 20 + length))
    first, second, third = expected_tokens(prompt, 3)
    cases = {
        SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=0): ([first], FinishReason.LENGTH),
        SamplingParams(max_tokens=2, temperature=0.0): ([first, second], FinishReason.LENGTH),
        SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(first,), num_logprobs=0): ([first], FinishReason.STOP),
        SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(second,)): ([first, second], FinishReason.STOP),
        SamplingParams(max_tokens=1, temperature=0.0, stop_token_ids=(first,)): ([first], FinishReason.STOP),
        SamplingParams(max_tokens=3, temperature=0.0): ([first, second, third], FinishReason.LENGTH),
    }
    for number, (sampling, (expected, finish)) in enumerate(cases.items()):
        if len(set(expected)) < len(expected) or (third in sampling.stop_token_ids):
            continue
        pushed = run_pair(prefill.driver, decode.driver, 10 * number + 1, prompt, sampling)
        open_local(decode.driver, 10 * number + 2, prompt, sampling)
        local = tokens_of(decode.driver, AttemptId(10 * number + 2))
        for tokens in (pushed, local):
            assert ids(tokens) == expected
            assert [token.finish for token in tokens] == [None] * (len(expected) - 1) + [finish]
        assert [token.logprobs for token in pushed] == [token.logprobs for token in local]
    assert is_clean(prefill)
    assert is_clean(decode)
    assert not [frame for frame in decode.driver.frames if isinstance(frame, Step)], "a token after the last"


def ids(tokens: list[TokenOutput]) -> list[int]:
    return [token.token_id for token in tokens]
