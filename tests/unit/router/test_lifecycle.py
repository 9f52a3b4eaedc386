from __future__ import annotations

import itertools

import pytest

from pd_serve.errors import ContextLengthError, EngineError, InvalidRequestError, NoWorkerError, UnavailableError
from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.protocol.link import (
    Cancel,
    Closed,
    Failed,
    FailureReason,
    FinishReason,
    Lease,
    Open,
    Prefill,
    PrefillDone,
    RefusalReason,
    Refused,
    Reserved,
    Target,
    TokenOutput,
)
from pd_serve.protocol.sampling import SamplingParams
from router.lifecycle import (
    Action,
    Assigned,
    AwaitHandover,
    CancelRequested,
    Emit,
    Finished,
    FrameArrived,
    GaveUp,
    HandoverTimedOut,
    Lifecycle,
    LifecycleSettings,
    MoveReason,
    NeedAssignment,
    Send,
    TimedOut,
    TokenArrived,
    WorkerLost,
)

PROMPT = (1, 2, 3)
P1, P2, D1, D2 = (PeerId(WorkerId(name), Incarnation(1)) for name in ("p1", "p2", "d1", "d2"))


class Driver:
    """A lifecycle and shorthands for what its workers say about the current attempt."""

    def __init__(self, max_moves: int = 2, max_tokens: int = 10) -> None:
        ids = map(AttemptId, itertools.count(1))
        self.lifecycle = Lifecycle(LifecycleSettings(60.0, 10.0, max_moves), PROMPT, SamplingParams(max_tokens=max_tokens), ids.__next__)
        assert self.lifecycle.start() == (NeedAssignment(frozenset(), MoveReason.FIRST),)

    def do(self, event: object) -> tuple[Action, ...]:
        return self.lifecycle.handle(event, 0.0)  # type: ignore[arg-type]

    @property
    def attempt(self) -> AttemptId:
        assert self.lifecycle.attempt_id is not None
        return self.lifecycle.attempt_id

    def assign(self, prefill: PeerId | None = P1, decode: PeerId = D1) -> Open:
        (send,) = self.do(Assigned(prefill, decode))
        assert isinstance(send, Send)
        assert send.peer == decode
        assert isinstance(send.frame, Open)
        return send.frame

    def reserve(self) -> tuple[Action, ...]:
        return self.do(FrameArrived(D1, Reserved(self.attempt, target(), 0)))

    def token(self, token_id: int, finish: FinishReason | None = None) -> tuple[Action, ...]:
        return self.do(TokenArrived(D1, TokenOutput(self.attempt, token_id, finish)))

    def fail(self, peer: PeerId, reason: FailureReason) -> tuple[Action, ...]:
        return self.do(FrameArrived(peer, Failed(self.attempt, reason, "because")))


def target() -> Target:
    return Target(Lease(LeaseId(1), Epoch(1), D1), (0,), 0)


def test_a_request_runs_from_open_to_finish() -> None:
    driver = Driver()
    opening = driver.assign()
    assert (opening.token_ids, opening.writer, opening.num_output_tokens) == (PROMPT, P1, 0)
    (send,) = driver.reserve()
    assert isinstance(send, Send)
    assert send.peer == P1
    assert isinstance(send.frame, Prefill)
    assert send.frame.target == target()
    assert driver.do(FrameArrived(P1, PrefillDone(driver.attempt, 3, 0))) == (AwaitHandover(driver.attempt, 10.0),)
    first = TokenOutput(driver.attempt, 7)
    assert driver.do(TokenArrived(D1, first)) == (Emit(first),)
    actions = driver.token(8, FinishReason.STOP)
    assert [type(action) for action in actions] == [Emit, Finished]
    assert driver.lifecycle.is_done


def test_a_request_whose_record_was_lost_moves_and_only_decode_is_cancelled() -> None:
    driver = Driver()
    lost = driver.assign().attempt_id
    driver.reserve()
    driver.do(FrameArrived(P1, PrefillDone(lost, 3, 0)))
    assert driver.do(HandoverTimedOut(lost)) == (Send(D1, Cancel(lost)), NeedAssignment(frozenset({D1}), MoveReason.TIMEOUT))
    assert driver.do(HandoverTimedOut(lost)) == ()
    again = driver.assign(P2, D2).attempt_id
    assert driver.do(HandoverTimedOut(lost)) == (), "the time of another attempt"
    driver.do(FrameArrived(D2, Reserved(again, target(), 0)))
    driver.do(FrameArrived(P2, PrefillDone(again, 3, 0)))
    assert len(driver.do(TokenArrived(D2, TokenOutput(again, 7)))) == 1
    assert driver.do(HandoverTimedOut(again)) == (), "decode has spoken"


def test_decode_may_speak_before_prefill_says_that_it_is_done() -> None:
    driver = Driver()
    driver.assign()
    driver.reserve()
    driver.token(7)
    assert driver.do(FrameArrived(P1, PrefillDone(driver.attempt, 3, 0))) == ()


def test_a_local_attempt_needs_no_prefill() -> None:
    driver = Driver()
    assert driver.assign(prefill=None).writer is None
    assert driver.do(FrameArrived(D1, Reserved(driver.attempt, None, 0))) == ()
    assert driver.lifecycle.peers == (D1,)


def test_a_move_carries_the_tokens_so_far_and_the_rest_of_the_budget() -> None:
    driver = Driver(max_tokens=10)
    first = driver.assign()
    driver.reserve()
    driver.token(7)
    driver.token(8)
    assert driver.fail(D1, FailureReason.PREEMPTED) == (NeedAssignment(frozenset({D1}), MoveReason.PREEMPTED),)
    again = driver.assign(P2, D2)
    assert again.attempt_id != first.attempt_id
    assert again.token_ids == (*PROMPT, 7, 8)
    assert (again.num_output_tokens, again.sampling.max_tokens) == (2, 8)


def test_a_failed_prefill_cancels_decode_and_only_decode() -> None:
    driver = Driver()
    driver.assign()
    attempt = driver.attempt
    driver.reserve()
    actions = driver.fail(P1, FailureReason.ENGINE)
    assert actions == (Send(D1, Cancel(attempt)), NeedAssignment(frozenset({P1}), MoveReason.ENGINE))


def test_a_failed_decode_cancels_prefill_and_only_prefill() -> None:
    driver = Driver()
    driver.assign()
    attempt = driver.attempt
    driver.reserve()
    actions = driver.fail(D1, FailureReason.ENGINE)
    assert actions == (Send(P1, Cancel(attempt)), NeedAssignment(frozenset({D1}), MoveReason.ENGINE))


def test_prefill_is_not_cancelled_before_it_was_told() -> None:
    driver = Driver()
    driver.assign()
    assert driver.fail(D1, FailureReason.ENGINE) == (NeedAssignment(frozenset({D1}), MoveReason.ENGINE),)


@pytest.mark.parametrize("reason", [FailureReason.TRANSFER, FailureReason.PEER_LOST, FailureReason.TIMEOUT])
def test_a_transfer_gone_wrong_is_blamed_on_the_partner(reason: FailureReason) -> None:
    driver = Driver()
    driver.assign()
    driver.reserve()
    need = driver.fail(D1, reason)[-1]
    assert isinstance(need, NeedAssignment)
    assert need.exclude == {P1}


def test_frames_and_tokens_of_an_attempt_that_was_left_are_ignored() -> None:
    driver = Driver()
    driver.assign()
    old = driver.attempt
    driver.reserve()
    driver.do(WorkerLost(P1))
    assert driver.do(TokenArrived(D1, TokenOutput(old, 9))) == ()
    driver.assign()
    assert driver.do(TokenArrived(D1, TokenOutput(old, 9))) == ()
    assert driver.do(FrameArrived(D1, Failed(old, FailureReason.ENGINE, ""))) == ()
    assert driver.do(FrameArrived(D1, Reserved(old, target(), 0))) == ()
    assert driver.lifecycle.num_output_tokens == 0


def test_a_token_from_another_worker_is_ignored() -> None:
    driver = Driver()
    driver.assign()
    assert driver.do(TokenArrived(D2, TokenOutput(driver.attempt, 9))) == ()
    assert driver.do(TokenArrived(P1, TokenOutput(driver.attempt, 9))) == ()


def test_prefill_may_be_lost_once_a_token_proves_that_its_kv_has_arrived() -> None:
    driver = Driver()
    driver.assign()
    driver.reserve()
    driver.token(7)
    assert driver.do(WorkerLost(P1)) == ()
    assert driver.fail(P1, FailureReason.PEER_LOST) == ()


def test_a_lost_decode_is_sent_nothing_and_prefill_is_cancelled() -> None:
    driver = Driver()
    driver.assign()
    attempt = driver.attempt
    driver.reserve()
    assert driver.do(WorkerLost(D1)) == (Send(P1, Cancel(attempt)), NeedAssignment(frozenset({D1}), MoveReason.PEER_LOST))


def test_loss_of_a_worker_that_is_not_used_changes_nothing() -> None:
    driver = Driver()
    driver.assign()
    assert driver.do(WorkerLost(D2)) == ()


def test_cancel_reaches_both_legs_once_and_ends_everything() -> None:
    driver = Driver()
    driver.assign()
    attempt = driver.attempt
    driver.reserve()
    assert driver.do(CancelRequested()) == (Send(D1, Cancel(attempt)), Send(P1, Cancel(attempt)))
    assert driver.do(CancelRequested()) == ()
    assert driver.do(TokenArrived(D1, TokenOutput(attempt, 7))) == ()
    assert driver.do(FrameArrived(D1, Closed(attempt))) == ()
    assert driver.lifecycle.is_done


@pytest.mark.parametrize(("is_assigned", "error"), [(False, NoWorkerError), (True, UnavailableError)])
def test_a_timeout_gives_up_and_cancels(is_assigned: bool, error: type[Exception]) -> None:
    driver = Driver()
    if is_assigned:
        driver.assign()
    actions = driver.do(TimedOut())
    assert isinstance(actions[-1], GaveUp)
    assert type(actions[-1].error) is error
    assert len(actions) == 1 + is_assigned
    assert driver.do(TimedOut()) == ()


def test_faults_use_up_the_moves() -> None:
    driver = Driver(max_moves=2)
    for _ in range(2):
        driver.assign()
        assert isinstance(driver.fail(D1, FailureReason.ENGINE)[-1], NeedAssignment)
    driver.assign()
    (gave_up,) = driver.fail(D1, FailureReason.ENGINE)
    assert isinstance(gave_up, GaveUp)
    assert isinstance(gave_up.error, EngineError)
    assert gave_up.error.message == "because"
    assert driver.lifecycle.is_done


@pytest.mark.parametrize("reason", [FailureReason.PREEMPTED, FailureReason.DRAINING])
def test_moves_in_good_order_are_not_counted(reason: FailureReason) -> None:
    driver = Driver(max_moves=0)
    for _ in range(5):
        driver.assign()
        assert isinstance(driver.fail(D1, reason)[-1], NeedAssignment)


def test_a_full_worker_is_avoided_only_this_time() -> None:
    driver = Driver(max_moves=0)
    driver.assign()
    need = driver.do(FrameArrived(D1, Refused(driver.attempt, RefusalReason.NO_CAPACITY, "")))
    assert need == (NeedAssignment(frozenset({D1}), MoveReason.NO_CAPACITY),)
    driver.assign(decode=D2)
    need = driver.do(FrameArrived(D2, Refused(driver.attempt, RefusalReason.NO_CAPACITY, "")))
    assert need == (NeedAssignment(frozenset({D2}), MoveReason.NO_CAPACITY),)


def test_suspects_of_faults_stay_avoided() -> None:
    driver = Driver()
    driver.assign()
    driver.fail(D1, FailureReason.ENGINE)
    driver.assign(decode=D2)
    need = driver.do(WorkerLost(D2))[-1]
    assert isinstance(need, NeedAssignment)
    assert need.exclude == {D1, D2}


@pytest.mark.parametrize(("reason", "error"), [(RefusalReason.TOO_LONG, ContextLengthError), (RefusalReason.INVALID, InvalidRequestError)])
def test_a_request_that_no_worker_can_serve_is_not_moved(reason: RefusalReason, error: type[Exception]) -> None:
    driver = Driver()
    driver.assign()
    (gave_up,) = driver.do(FrameArrived(D1, Refused(driver.attempt, reason, "no")))
    assert isinstance(gave_up, GaveUp)
    assert type(gave_up.error) is error


def test_an_unjoined_writer_is_avoided() -> None:
    driver = Driver()
    driver.assign()
    need = driver.do(FrameArrived(D1, Refused(driver.attempt, RefusalReason.NOT_JOINED, "")))
    assert need == (NeedAssignment(frozenset({P1}), MoveReason.PEER_LOST),)


def test_closed_unasked_counts_as_a_fault() -> None:
    driver = Driver()
    driver.assign()
    assert driver.do(FrameArrived(D1, Closed(driver.attempt))) == (NeedAssignment(frozenset({D1}), MoveReason.REFUSED),)


def test_a_second_reservation_starts_no_second_prefill() -> None:
    driver = Driver()
    driver.assign()
    assert len(driver.reserve()) == 1
    assert driver.reserve() == ()
