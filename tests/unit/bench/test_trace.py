"""Replayed traces: equal hash ids are equal tokens, times and lengths are the trace's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.trace import Scaling, SpedUp, TracePlans, read_trace

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 1500, "input_length": 1100, "output_length": 400, "hash_ids": [7, 8, 10]}
{"timestamp": 61500, "input_length": 600, "output_length": 1, "hash_ids": [11, 8]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,396,109
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_equal_hash_ids_are_equal_blocks(mooncake: Path) -> None:
    first, second, third = TracePlans(read_trace(mooncake), Scaling())
    assert [len(plan.prompt) for plan in (first, second, third)] == [1300, 1100, 600]
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1100] != second.prompt[1024:]
    assert third.prompt[512:] == first.prompt[512:600]
    assert third.prompt[:512] != first.prompt[:512]


def test_smaller_blocks_shrink_prompts_and_keep_what_is_shared(mooncake: Path) -> None:
    first, second, _ = TracePlans(read_trace(mooncake), Scaling(block_tokens=32, max_input=70, max_output=8))
    assert (len(first.prompt), len(second.prompt)) == (70, 68)
    assert first.prompt[:64] == second.prompt[:64]
    assert first.prompt[64:68] != second.prompt[64:]
    assert (first.max_tokens, second.max_tokens) == (5, 8)


def test_times_begin_at_zero_and_can_be_cut_and_sped_up(mooncake: Path) -> None:
    assert [request.at_s for request in read_trace(mooncake)] == [0.0, 0.5, 60.5]
    assert len(read_trace(mooncake, minutes=1)) == 2
    assert len(read_trace(mooncake, limit=1)) == 1
    fast = SpedUp(TracePlans(read_trace(mooncake), Scaling()), 10)
    assert [plan.at_s for plan in fast] == [0.0, 0.05, 6.05]
    assert fast[1].prompt == TracePlans(read_trace(mooncake), Scaling())[1].prompt
    assert [plan.index for plan in fast[1:]] == [1, 2]


def test_the_ideal_hit_rate_counts_whole_blocks_from_the_head(mooncake: Path) -> None:
    assert TracePlans(read_trace(mooncake), Scaling()).ideal_hit_rate() == pytest.approx(1024 / 3000)


def test_azure_rows_become_prompts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second = TracePlans(read_trace(path), Scaling(max_input=380, block_tokens=16))
    assert (len(first.prompt), first.max_tokens, first.at_s) == (374, 44, 0.0)
    assert (len(second.prompt), second.max_tokens, second.at_s) == (380, 109, 1.5)
    assert first.prompt[:8] != second.prompt[:8]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', AZURE + "yesterday,1,2\n"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BenchError, match="trace"):
        read_trace(path)
