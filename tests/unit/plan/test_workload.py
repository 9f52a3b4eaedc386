"""Streams: in order, the same for the same seed, as long and as fast as asked for, sharing what is to be shared."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from pd_serve.bench.trace import Scaling, TracePlans, read_trace
from pd_serve.plan.errors import PlanError
from pd_serve.plan.lengths import Fixed, LogNormal, Uniform, parse_lengths
from pd_serve.plan.workload import (
    PlannedRequest,
    Shape,
    Turns,
    burst,
    conversations,
    from_trace,
    overlaid,
    poisson,
    tagged,
)

SHAPE = Shape(LogNormal(512, 0.9, high=4096), Uniform(16, 256))
MOONCAKE = """\
{"timestamp": 1000, "input_length": 1400, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1600, "output_length": 900, "hash_ids": [0, 1, 3, 4]}
{"timestamp": 4000, "input_length": 500, "output_length": 3, "hash_ids": [7]}
"""
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"


def is_ordered(requests: list[PlannedRequest]) -> bool:
    return all(before.at_s <= after.at_s for before, after in pairwise(requests))


def test_poisson_has_its_rate_and_lengths() -> None:
    requests = list(poisson(8.0, SHAPE, 20_000, seed=1))
    assert len(requests) == 20_000
    assert requests[0].at_s == 0.0
    assert is_ordered(requests)
    gaps = np.diff([request.at_s for request in requests])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert np.median([request.num_prompt for request in requests]) == pytest.approx(512, rel=0.05)
    assert max(request.num_prompt for request in requests) == 4096
    outputs = [request.num_output for request in requests]
    assert (min(outputs), max(outputs)) == (16, 256)


def test_a_seed_is_a_stream() -> None:
    first, again, other = (list(poisson(1.0, SHAPE, 50, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_another_rate_leaves_lengths_as_they_are() -> None:
    slow, fast = (list(poisson(rate, SHAPE, 50)) for rate in (1.0, 4.0))
    assert [request[1:] for request in slow] == [request[1:] for request in fast]
    assert slow[-1].at_s == pytest.approx(4 * fast[-1].at_s)


def test_a_stream_without_a_limit_goes_on() -> None:
    assert len(list(islice(poisson(1.0, SHAPE), 9000))) == 9000


def test_bursts_come_at_their_times() -> None:
    requests = list(burst((2.0, 50.0), every_s=10.0, peak_s=1.0, shape=SHAPE, limit=5000))
    assert is_ordered(requests)
    in_peaks = sum(request.at_s % 10.0 < 1.0 for request in requests)
    assert in_peaks / 5000 == pytest.approx(50 / (50 + 18), rel=0.05)
    assert 5000 / requests[-1].at_s == pytest.approx(68 / 10, rel=0.05)


def test_turns_of_a_conversation_share_all_that_was_said() -> None:
    turns = Turns(num_turns=5, think_s=10.0, system_tokens=96, num_systems=2, max_prompt=4000)
    requests = list(conversations(0.5, Shape(Uniform(10, 60), Fixed(40)), turns, limit=400, block_tokens=32))
    assert len(requests) == 400
    assert is_ordered(requests)
    by_session: dict[str, list[PlannedRequest]] = {}
    for request in requests:
        assert len(request.block_keys) == -(-request.num_prompt // 32)
        assert request.num_prompt <= 4000
        by_session.setdefault(request.session, []).append(request)
    for asked in by_session.values():
        for before, after in pairwise(asked):
            assert after.num_prompt >= before.num_prompt + before.num_output + 10
            assert after.block_keys[: len(before.block_keys)] == before.block_keys
    firsts = [asked[0].block_keys for asked in by_session.values()]
    assert len({keys[:3] for keys in firsts}) == 2
    assert len({keys[3] for keys in firsts}) == len(firsts)
    assert sum(len(asked) > 1 for asked in by_session.values()) > len(by_session) / 3


def test_a_trace_shares_what_its_plans_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    scaling = Scaling(block_tokens=32, max_output=64)
    requests = list(from_trace(path, scaling, speed_up=2.0))
    plans = TracePlans(read_trace(path), scaling)
    assert [request.at_s for request in requests] == [0.0, 1.0, 1.5]
    for request, plan in zip(requests, plans, strict=True):
        assert (request.num_prompt, request.num_output) == (len(plan.prompt), plan.max_tokens)
        assert len(request.block_keys) == -(-request.num_prompt // 32)
    one, other, last = (request.block_keys for request in requests)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert not set(last) & set(one)


def test_equal_blocks_behind_different_heads_are_different(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [%d, 9]}\n'
    path.write_text(line % 1 + line % 2)
    first, second = from_trace(path)
    assert not set(first.block_keys) & set(second.block_keys)


def test_a_trace_begins_again_with_prompts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    requests = list(from_trace(path, limit=7))
    assert [request.at_s for request in requests] == [0.0, 2.0, 3.0, 4.5, 6.5, 7.5, 9.0]
    assert requests[0].num_prompt == requests[3].num_prompt
    assert not set(requests[0].block_keys) & set(requests[3].block_keys)
    assert requests[3].block_keys[:2] == requests[4].block_keys[:2]


def test_a_trace_without_hash_ids_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    requests = list(from_trace(path, speed_up=10.0))
    assert [(request.num_prompt, request.num_output, request.block_keys) for request in requests] == [(374, 44, ()), (396, 109, ())]
    assert requests[1].at_s == pytest.approx(0.4314579)


def test_streams_of_several_tenants_lie_over_each_other() -> None:
    streams = (tagged(poisson(1.0, SHAPE, 20, seed=1), "a"), tagged(poisson(2.0, SHAPE, 20, seed=2), "b", priority=1))
    requests = list(overlaid(*streams))
    assert is_ordered(requests)
    assert sorted((request.key, request.priority) for request in requests) == [("a", 0)] * 20 + [("b", 1)] * 20


def test_nonsense_is_told_before_the_first_request(tmp_path: Path) -> None:
    for wrong in (
        lambda: poisson(0.0, SHAPE),
        lambda: burst((1.0, 2.0), 1.0, 1.0, SHAPE),
        lambda: conversations(1.0, SHAPE, Turns(num_turns=0)),
        lambda: from_trace(tmp_path / "none"),
    ):
        with pytest.raises(PlanError):
            wrong()


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Fixed(512)),
        ("16-64", Uniform(16, 64)),
        ("lognormal:512:0.9", LogNormal(512, 0.9)),
        ("lognormal:8:1:99", LogNormal(8, 1, high=99)),
    ],
)
def test_lengths_as_text(text: str, lengths: object) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["0", "9-3", "x", "lognormal:0.5:1", "lognormal:5", ""])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="no length"):
        parse_lengths(text)


def test_the_mean_of_a_distribution_is_that_of_its_draws() -> None:
    generator = np.random.default_rng(5)
    for lengths in (Fixed(7), Uniform(3, 90), LogNormal(300, 0.7)):
        assert lengths.draw(generator, 40_000).mean() == pytest.approx(lengths.mean, rel=0.02)
