"""The rest of what is asked of ucx where processes die or stall, over NIXL."""

from __future__ import annotations

import pytest

from tests.contract.ucx.test_death import (
    test_a_busy_target_outlives_a_writer_killed_with_writes_queued,
    test_a_flush_behind_writes_to_a_stopped_then_killed_target_is_never_ok,
    test_a_silent_writer_with_keys_is_only_fenced_by_its_end,
    test_a_stopped_target_delays_its_own_transfers_only,
    test_a_stopped_writer_is_not_taken_for_dead_and_goes_on,
    test_bytes_are_there_after_the_flush,
    test_closing_while_the_other_writes_is_told_and_harms_nobody,
)

__all__ = [
    "test_a_busy_target_outlives_a_writer_killed_with_writes_queued",
    "test_a_flush_behind_writes_to_a_stopped_then_killed_target_is_never_ok",
    "test_a_silent_writer_with_keys_is_only_fenced_by_its_end",
    "test_a_stopped_target_delays_its_own_transfers_only",
    "test_a_stopped_writer_is_not_taken_for_dead_and_goes_on",
    "test_bytes_are_there_after_the_flush",
    "test_closing_while_the_other_writes_is_told_and_harms_nobody",
]

pytestmark = pytest.mark.slow
