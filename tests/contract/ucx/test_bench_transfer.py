"""`bench transfer` on both lanes, as small as it can be: every case moves its bytes (measuring compares them on both sides)."""

from __future__ import annotations

import pytest

from pd_serve.bench.transfer import TransferOptions, measure, num_cases
from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.ucx.bindings import open_binding


def test_every_case_is_measured_on_shared_memory_and_tcp() -> None:
    try:
        open_binding("auto")
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    options = TransferOptions(
        layouts=("2x1x8x4",), num_tokens=64, rounds=2, runs=(1, 32), pass_nbytes=256 << 10, pool_nbytes=1 << 20, perftest="none"
    )
    advanced: list[None] = []
    outcomes, notes = measure(options, lambda: advanced.append(None))
    assert len(outcomes) == len(advanced) == num_cases(options) == 10
    assert [outcome.lane for outcome in outcomes] == ["shm"] * 5 + ["tcp"] * 5
    assert "puts" in notes[0]
    assert "checked messages" in notes[1]
    for outcome in outcomes:
        figures = outcome.figures()
        assert figures["bytes"] in (256 << 10, 64 * 2 * 2 * 8 * 2)
        assert min(value for name, value in figures.items() if name != "write_cpu_s.p50") > 0
