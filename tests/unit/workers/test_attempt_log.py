"""Lines about attempts carry the attempt's id."""

from __future__ import annotations

import logging

import pytest

from pd_serve.ids import AttemptId, LinkId
from pd_serve.protocol.link import Cancel, Closed, Failed, FailureReason
from workers.attempt_log import AttemptLog
from workers.events import FrameReceived, SendFrame

LINK = LinkId(1)
ATTEMPT = AttemptId(2**60 + 1)


def test_a_failure_is_a_warning_with_its_attempt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "workers.attempt_log"):
        AttemptLog().observe(FrameReceived(LINK, Cancel(ATTEMPT)), (SendFrame(LINK, Failed(ATTEMPT, FailureReason.ENGINE, "boom")),))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "boom" in record.getMessage()
    assert record.__dict__["attempt_id"] == str(ATTEMPT)


def test_every_step_is_told_at_debug_and_none_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    steps = (FrameReceived(LINK, Cancel(ATTEMPT)), (SendFrame(LINK, Closed(ATTEMPT)),))
    with caplog.at_level(logging.INFO, "workers.attempt_log"):
        AttemptLog().observe(*steps)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "workers.attempt_log"):
        AttemptLog().observe(*steps)
    assert [record.getMessage() for record in caplog.records] == [f"attempt {ATTEMPT}: Cancel received", f"attempt {ATTEMPT}: Closed sent"]
    assert {record.__dict__["attempt_id"] for record in caplog.records} == {str(ATTEMPT)}
