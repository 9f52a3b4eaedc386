from __future__ import annotations

import pytest
import torch

from pd_serve.engine.batch import BatchEntry, Phase, SampleSpec
from pd_serve.engine.step_inputs import build_step_inputs
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams

CPU = torch.device("cpu")
SPEC = SampleSpec(SamplingParams(max_tokens=1), 0, 0)


def _entry(phase: Phase, token_ids: tuple[int, ...], start: int, table: tuple[int, ...], *, sampled: bool = True) -> BatchEntry:
    return BatchEntry(AttemptId(start), phase, token_ids, start, table, SPEC if sampled else None)


def test_rows_are_decode_by_growing_context_then_prefill_as_given() -> None:
    entries = [
        _entry(Phase.DECODE, (10,), 9, (0, 1, 2)),
        _entry(Phase.DECODE, (11,), 4, (5, 6)),
        _entry(Phase.PREFILL, (12, 13, 14), 3, (7, 8), sampled=False),
        _entry(Phase.PREFILL, (15, 16), 0, (9,)),
    ]
    inputs = build_step_inputs(entries, 4, CPU)
    assert inputs.token_ids.tolist() == [11, 10, 12, 13, 14, 15, 16]
    assert inputs.positions.tolist() == [4, 9, 3, 4, 5, 0, 1]
    assert (inputs.num_tokens, inputs.num_decode_rows) == (7, 2)
    assert inputs.sampled_rows.tolist() == [0, 1, 6]
    assert inputs.sampled_entries == (1, 0, 3)
    assert [(span.first_row, span.start, span.num_queries, span.context_len) for span in inputs.spans] == [
        (0, 4, 1, 5),
        (1, 9, 1, 10),
        (2, 3, 3, 6),
        (5, 0, 2, 2),
    ]


def test_every_token_has_a_slot_in_its_block() -> None:
    inputs = build_step_inputs([_entry(Phase.PREFILL, (1, 2), 3, (6, 2))], 4, CPU)
    assert inputs.slots.tolist() == [27, 8]


@pytest.mark.parametrize(("phase", "num_decode_rows"), [(Phase.DECODE, 2), (Phase.PREFILL, 0)])
def test_a_lone_token_is_computed_as_two_equal_rows(phase: Phase, num_decode_rows: int) -> None:
    inputs = build_step_inputs([_entry(phase, (5,), 3, (0,))], 16, CPU)
    assert inputs.num_tokens == 1
    assert inputs.num_decode_rows == num_decode_rows
    assert inputs.token_ids.tolist() == [5, 5]
    assert inputs.positions.tolist() == [3, 3]
    assert inputs.slots.tolist() == [3, 3]
    assert inputs.sampled_rows.tolist() == [0]


def test_every_token_of_a_decode_entry_is_a_query_of_its_own_among_the_decode_rows() -> None:
    entries = [
        _entry(Phase.DECODE, (10,), 4, (5, 6)),
        _entry(Phase.PREFILL, (12, 13), 3, (7, 8)),
        _entry(Phase.DECODE, (20, 21, 22), 3, (0, 1)),
    ]
    inputs = build_step_inputs(entries, 4, CPU)
    assert inputs.token_ids.tolist() == [20, 10, 21, 22, 12, 13]
    assert inputs.positions.tolist() == [3, 4, 4, 5, 3, 4]
    assert (inputs.num_tokens, inputs.num_decode_rows) == (6, 4)
    assert inputs.sampled_rows.tolist() == [1, 3, 5]
    assert inputs.sampled_entries == (0, 2, 1)
    assert [(span.phase, span.first_row, span.start, span.num_queries) for span in inputs.spans] == [
        (Phase.DECODE, 0, 3, 1),
        (Phase.DECODE, 1, 4, 1),
        (Phase.DECODE, 2, 4, 1),
        (Phase.DECODE, 3, 5, 1),
        (Phase.PREFILL, 4, 3, 2),
    ]
