"""Workers whose pools differ: what decode holds is what prefill computed, converted once; the tokens are those of one worker alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from pd_serve.errors import TransportUnavailableError
from tests.accuracy.converting import Kind, Pair, Prompt
from workers.events import PushPlan

LENGTHS = (1, 15, 16, 33, 250)
NUM_OUTPUTS = 8
SHARED = 139
"""Tokens that the last prompt shares with the longest: whole blocks of them are cached, as many as each block size makes."""
SIZES = (8, 16, 24, 64, 256)
ORDERS = ("token_major", "head_major")
STORED = (("float32", "auto"), ("bfloat16", "auto"), ("float16", "auto"), ("float32", "fp8_e4m3"), ("bfloat16", "fp8_e4m3"))
KINDS = [Kind(size, dtype, order, kv_dtype) for size, order, (dtype, kv_dtype) in product(SIZES, ORDERS, STORED)]

NAMED = [
    (Kind(16), Kind(64)),
    (Kind(64), Kind(16)),
    (Kind(256), Kind(8)),
    (Kind(16), Kind(16, order="head_major")),
    (Kind(24, order="head_major"), Kind(16)),
    (Kind(16, "float32"), Kind(16, "bfloat16")),
    (Kind(8, "bfloat16"), Kind(64, "float32", "head_major")),
    (Kind(16, "bfloat16"), Kind(16, "bfloat16", kv_dtype="fp8_e4m3")),
    (Kind(16, "float32", "head_major"), Kind(64, "bfloat16", "head_major", "fp8_e4m3")),
    (Kind(16, "bfloat16", kv_dtype="fp8_e4m3"), Kind(32, "bfloat16", kv_dtype="fp8_e4m3")),
    (Kind(16, "bfloat16", kv_dtype="fp8_e4m3"), Kind(16, "bfloat16")),
    (Kind(16), Kind(16)),
]


def drawn(seed: int, count: int) -> list[tuple[Kind, Kind]]:
    rng = random.Random(seed)
    return [(rng.choice(KINDS), rng.choice(KINDS)) for _ in range(count)]


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    kinds, lanes = request.param
    try:
        pair = Pair(tmp_path, *kinds, lanes)
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    yield pair
    pair.close()


def wrong_tokens(pair: Pair, prompts: list[Prompt]) -> list[tuple[int, int, int]]:
    """(prompt, layer, token) where decode's KV is not prefill's, stored as decode stores it: the first of each prompt and layer."""
    wrong = []
    for prompt in prompts:
        length = len(prompt.token_ids)
        for layer in range(pair.prefill.layout.num_layers):
            sent = pair.target.as_stored(pair.prefill.read(layer, prompt.source, 0, length))
            same = (pair.target.read(layer, prompt.target, 0, length) == sent).flatten(2).all(-1).all(0)
            if not bool(same.all()):
                wrong.append((prompt.number, layer, int((~same).nonzero()[0])))
    return wrong


def check(pair: Pair) -> None:
    *prompts, sharing = pair.prompts(LENGTHS, NUM_OUTPUTS, SHARED)
    firsts = pair.push(prompts, chunk=50) | pair.push([sharing], chunk=7)
    prompts = [*prompts, sharing]
    assert (wrong_tokens(pair, prompts), pair.damaged) == ([], [])
    nobodys = set(range(pair.target.layout.num_blocks)) - {block for prompt in prompts for block in prompt.target}
    assert _is_untouched(pair, sorted(nobodys))

    sent = pair.prefill.samples["pd_serve_kv_transfer_bytes_total"]
    assert sent == sum(len(prompt.token_ids) - prompt.num_cached for prompt in prompts) * pair.target.layout.bytes_per_token
    assert pair.prefill.samples.get("pd_serve_kv_packed_bytes_total", 0.0) == (sent if pair.is_converting else 0.0)

    for prompt in prompts:
        length, first = len(prompt.token_ids), firsts[prompt.number]
        for layer in range(pair.target.layout.num_layers):
            pair.target.write(layer, prompt.own, 0, pair.prefill.read(layer, prompt.source, 0, length))
        tokens = pair.target.decode(length, first, prompt.target, NUM_OUTPUTS)
        assert tokens == pair.target.decode(length, first, prompt.own, NUM_OUTPUTS), "as from KV converted once"
        if pair.is_exact:
            assert tokens == pair.prefill.decode(length, first, prompt.source, NUM_OUTPUTS), "as one worker alone"


def _is_untouched(pair: Pair, blocks: list[int]) -> bool:
    layout, region = pair.target.layout, pair.target.runner.cache.region
    slabs = region[: layout.pool_nbytes].view(layout.num_layers, layout.num_blocks, layout.block_nbytes)
    return bool((slabs[:, torch.tensor(blocks)] == 0xFF).all())


def _name(value: object) -> str:
    (src, dst), lanes = value  # type: ignore[misc]
    return f"{src}--{dst}--{lanes}"


@pytest.mark.parametrize("pair", [(kinds, "shm") for kinds in NAMED] + [(NAMED[0], "tcp"), (NAMED[8], "tcp")], indirect=True, ids=_name)
def test_what_arrives_is_what_was_computed_and_decodes_alike(pair: Pair) -> None:
    check(pair)


@pytest.mark.parametrize("pair", [(kinds, "shm") for kinds in drawn(1, 4)], indirect=True, ids=_name)
def test_any_two_layouts(pair: Pair) -> None:
    check(pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(kinds, "shm") for kinds in drawn(2, 100)], indirect=True, ids=_name)
def test_many_more_layouts(pair: Pair) -> None:
    check(pair)


@pytest.mark.parametrize("pair", [(NAMED[1], "shm"), (NAMED[11], "shm")], indirect=True, ids=_name)
def test_kv_that_is_not_where_it_belongs_has_not_the_digest_of_what_was_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right bytes, wrong blocks: of the prompt's own, so that no bounds check could tell."""
    *prompts, _ = pair.prompts(LENGTHS, NUM_OUTPUTS, SHARED)
    spoilt, plan = prompts[-1].number, pair.plan

    def misplaced(prompt: Prompt, start: int, end: int, chunk: int) -> PushPlan:
        target = (prompt.target[1], prompt.target[0], *prompt.target[2:]) if prompt.number == spoilt else prompt.target
        return plan(replace(prompt, target=target), start, end, chunk)

    monkeypatch.setattr(pair, "plan", misplaced)
    pair.push(prompts, chunk=50)
    assert pair.damaged == [spoilt]
    assert {number for number, _, _ in wrong_tokens(pair, prompts)} == {spoilt}


@pytest.mark.parametrize("pair", [(NAMED[4], "shm")], indirect=True, ids=_name)
def test_a_checker_that_has_never_failed_is_not_trusted(pair: Pair) -> None:
    *prompts, _ = pair.prompts(LENGTHS, NUM_OUTPUTS, SHARED)
    firsts = pair.push(prompts, chunk=64)
    last = prompts[-1]
    values = pair.target.read(1, last.target, 77, 78)
    pair.target.write(1, last.target, 77, -values)
    assert wrong_tokens(pair, prompts) == [(last.number, 1, 77)]
    length, first = len(last.token_ids), firsts[last.number]
    for at in range(length):
        pair.target.write(0, last.target, at, torch.zeros_like(values))
    assert pair.target.decode(length, first, last.target, NUM_OUTPUTS) != pair.prefill.decode(length, first, last.source, NUM_OUTPUTS)
