"""The life of one choice of a client's request, over all its attempts. Pure: the dispatcher feeds events and carries out actions.

    NeedAssignment -> Assigned -> Open to decode -> Reserved -> Prefill to prefill -> tokens from decode ... -> Finished
          ^                                                                             |
          +---- the attempt failed, its worker was lost, it was preempted: a move <-----+

A move opens a new attempt elsewhere with prompt + tokens so far and the remaining budget. Sampling is keyed by position, so the client
sees a pause and nothing else. Frames of an attempt that was left are ignored: its id is never used again.

What must stay true: every leg that may still hold something for an attempt that is left gets exactly one Cancel; a client that has not
cancelled gets exactly one of Finished and GaveUp, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from pd_serve.errors import AttemptError, ContextLengthError, InvalidRequestError, NoWorkerError, PdServeError, UnavailableError
from pd_serve.ids import AttemptId, PeerId
from pd_serve.protocol.link import (
    Cancel,
    Closed,
    Failed,
    FinishReason,
    Open,
    Prefill,
    PrefillDone,
    RefusalReason,
    Refused,
    Reserved,
    RouterFrame,
    TokenOutput,
)
from pd_serve.protocol.sampling import SamplingParams
from router.moves import ERRORS, MOVE_REASONS, ORDERLY, PARTNER_FAULTS, REFUSALS, MoveReason


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    transfer_timeout_s: float
    handover_timeout_s: float
    """From prefill's word that all is sent to decode's first token: the record may have been lost on the way."""
    max_moves: int
    """Moves after a fault; those that a worker asks for in good order (preempted, draining, no room) are not counted."""


# ---- events


class Assigned(msgspec.Struct, frozen=True):
    """Where the next attempt goes. `prefill` None: decode computes the prompt itself."""

    prefill: PeerId | None
    decode: PeerId


class FrameArrived(msgspec.Struct, frozen=True):
    peer: PeerId
    frame: Reserved | Refused | PrefillDone | Failed | Closed


class TokenArrived(msgspec.Struct, frozen=True):
    peer: PeerId
    token: TokenOutput


class WorkerLost(msgspec.Struct, frozen=True):
    """The link to the worker is gone; it forgets everything of this router by itself."""

    peer: PeerId


class CancelRequested(msgspec.Struct, frozen=True):
    """The client is gone, or wants no more (a stop string was found)."""


class TimedOut(msgspec.Struct, frozen=True):
    """The request's time in the queue or in all is up."""


class HandoverTimedOut(msgspec.Struct, frozen=True):
    """So long after AwaitHandover."""

    attempt_id: AttemptId


Event = Assigned | FrameArrived | TokenArrived | WorkerLost | CancelRequested | TimedOut | HandoverTimedOut


# ---- actions


class Send(msgspec.Struct, frozen=True):
    peer: PeerId
    frame: RouterFrame


class NeedAssignment(msgspec.Struct, frozen=True):
    """Answer with Assigned when a place is found."""

    exclude: frozenset[PeerId]
    """To be avoided where there is a choice; where there is none they may be tried again."""
    reason: MoveReason


class Emit(msgspec.Struct, frozen=True):
    token: TokenOutput


class Finished(msgspec.Struct, frozen=True):
    reason: FinishReason


class GaveUp(msgspec.Struct, frozen=True):
    error: PdServeError


class AwaitHandover(msgspec.Struct, frozen=True):
    """Answer with HandoverTimedOut after `timeout_s`, whatever has happened by then."""

    attempt_id: AttemptId
    timeout_s: float


Action = Send | NeedAssignment | Emit | Finished | GaveUp | AwaitHandover


class _Leg(Enum):
    """What a worker may still hold for the current attempt."""

    UNTOLD = auto()
    HELD = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Attempt:
    attempt_id: AttemptId
    decode: PeerId
    prefill: PeerId | None
    decode_leg: _Leg = _Leg.HELD
    prefill_leg: _Leg = _Leg.UNTOLD
    has_spoken: bool = False
    """Decode has sent a token."""


class Lifecycle:
    """One choice of one request. Begin with `start()`; over when `is_done`."""

    def __init__(
        self,
        settings: LifecycleSettings,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        new_attempt_id: Callable[[], AttemptId],
    ) -> None:
        self._settings = settings
        self._token_ids = list(token_ids)
        self._num_prompt_tokens = len(token_ids)
        self._sampling = sampling
        self._new_attempt_id = new_attempt_id
        self._attempt: _Attempt | None = None
        self._faults = 0
        self._suspects: frozenset[PeerId] = frozenset()
        self.fault: tuple[MoveReason, PeerId] | None = None
        """Why the last attempt was left, and who is blamed; None: it goes on, or ended otherwise."""
        self.is_done = False

    @property
    def attempt_id(self) -> AttemptId | None:
        """Of the current attempt; None while waiting for an assignment or done. Frames of other attempts need not be handed in."""
        return self._attempt.attempt_id if self._attempt else None

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Workers whose loss this lifecycle must hear of."""
        if self._attempt is None:
            return ()
        return (self._attempt.decode,) if self._attempt.prefill is None else (self._attempt.decode, self._attempt.prefill)

    @property
    def num_output_tokens(self) -> int:
        return len(self._token_ids) - self._num_prompt_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and tokens so far: what an assignment must find room for."""
        return tuple(self._token_ids)

    def limit_output(self, max_tokens: int) -> None:
        """Generate no more than so many tokens in all. Precondition: no attempt is under way, and more than have been generated."""
        self._sampling = msgspec.structs.replace(self._sampling, max_tokens=max_tokens)

    def start(self) -> tuple[Action, ...]:
        return (NeedAssignment(frozenset(), MoveReason.FIRST),)

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """`now` is monotonic seconds; nothing here depends on it yet but the signature is that of every machine."""
        if self.is_done:
            return ()
        match event:
            case Assigned():
                return self._on_assigned(event)
            case FrameArrived(peer, frame):
                return self._on_frame(peer, frame)
            case TokenArrived(peer, token):
                return self._on_token(peer, token)
            case WorkerLost(peer):
                return self._on_worker_lost(peer)
            case CancelRequested():
                return self._end()
            case HandoverTimedOut(attempt_id):
                return self._on_handover_timed_out(attempt_id)
            case TimedOut():
                waiting = self._attempt is None
                detail = "no worker became free in time" if waiting else "the request took too long"
                return (*self._end(), GaveUp(NoWorkerError(detail) if waiting else UnavailableError(detail)))

    def _on_assigned(self, event: Assigned) -> tuple[Action, ...]:
        assert self._attempt is None, "assigned twice"
        self._attempt = _Attempt(self._new_attempt_id(), event.decode, event.prefill)
        self.fault = None
        frame = Open(
            attempt_id=self._attempt.attempt_id,
            token_ids=self.token_ids,
            num_output_tokens=self.num_output_tokens,
            sampling=self._sampling_left(),
            writer=event.prefill,
            timeout_s=self._settings.transfer_timeout_s,
        )
        return (Send(event.decode, frame),)

    def _sampling_left(self) -> SamplingParams:
        num_output_tokens = self.num_output_tokens
        if not num_output_tokens:
            return self._sampling
        return msgspec.structs.replace(self._sampling, max_tokens=self._sampling.max_tokens - num_output_tokens)

    def _on_frame(self, peer: PeerId, frame: Reserved | Refused | PrefillDone | Failed | Closed) -> tuple[Action, ...]:
        attempt = self._attempt
        if attempt is None or frame.attempt_id != attempt.attempt_id or peer not in self.peers:
            return ()
        from_decode = peer == attempt.decode
        if not from_decode and attempt.prefill_leg is not _Leg.HELD:
            return ()
        match frame:
            case Reserved():
                return self._on_reserved(attempt, frame) if from_decode else ()
            case PrefillDone():
                if from_decode:
                    return ()
                attempt.prefill_leg = _Leg.ENDED
                return (AwaitHandover(attempt.attempt_id, self._settings.handover_timeout_s),)
            case Refused(reason=reason, detail=detail):
                return self._on_refused(attempt, reason, detail) if from_decode else ()
            case Failed(reason=failure, detail=detail):
                return self._leg_failed(attempt, peer, MOVE_REASONS[failure], detail)
            case Closed():
                return self._leg_failed(attempt, peer, MoveReason.REFUSED, "the worker closed the attempt unasked")

    def _on_reserved(self, attempt: _Attempt, frame: Reserved) -> tuple[Action, ...]:
        if attempt.prefill is None or frame.target is None or attempt.prefill_leg is not _Leg.UNTOLD:
            return ()
        attempt.prefill_leg = _Leg.HELD
        prefill = Prefill(attempt.attempt_id, self.token_ids, self.num_output_tokens, self._sampling_left(), frame.target)
        return (Send(attempt.prefill, prefill),)

    def _on_refused(self, attempt: _Attempt, reason: RefusalReason, detail: str) -> tuple[Action, ...]:
        attempt.decode_leg = _Leg.ENDED
        if reason is RefusalReason.TOO_LONG:
            return (*self._end(), GaveUp(ContextLengthError(detail)))
        if reason is RefusalReason.INVALID:
            return (*self._end(), GaveUp(InvalidRequestError(detail)))
        blamed = attempt.prefill if reason is RefusalReason.NOT_JOINED and attempt.prefill else attempt.decode
        return self._move(REFUSALS[reason], blamed, detail)

    def _leg_failed(self, attempt: _Attempt, peer: PeerId, reason: MoveReason, detail: str) -> tuple[Action, ...]:
        """A worker that tells of a transfer gone wrong blames its partner."""
        if peer == attempt.decode:
            attempt.decode_leg, partner = _Leg.ENDED, attempt.prefill
        else:
            attempt.prefill_leg, partner = _Leg.ENDED, attempt.decode
        return self._move(reason, partner if partner and reason in PARTNER_FAULTS else peer, detail)

    def takes(self, peer: PeerId, token: TokenOutput) -> bool:
        """The common case of TokenArrived, once per token of every request: True when all there is to do is to emit the token, which has
        been taken. False: nothing has changed, `handle` knows what to do.
        """
        attempt = self._attempt
        if attempt is None or token.finish is not None or token.attempt_id != attempt.attempt_id or peer != attempt.decode:
            return False
        self._token_ids.append(token.token_id)
        attempt.has_spoken = True
        attempt.prefill_leg = _Leg.ENDED  # a token means that all KV has arrived
        return True

    def _on_token(self, peer: PeerId, token: TokenOutput) -> tuple[Action, ...]:
        if self.takes(peer, token):
            return (Emit(token),)
        attempt = self._attempt
        if attempt is None or token.finish is None or token.attempt_id != attempt.attempt_id or peer != attempt.decode:
            return ()
        self._token_ids.append(token.token_id)
        attempt.decode_leg = attempt.prefill_leg = _Leg.ENDED
        return (Emit(token), *self._end(), Finished(token.finish))

    def _on_handover_timed_out(self, attempt_id: AttemptId) -> tuple[Action, ...]:
        attempt = self._attempt
        if attempt is None or attempt.attempt_id != attempt_id or attempt.has_spoken:
            return ()
        return self._move(MoveReason.TIMEOUT, attempt.decode, f"{attempt.decode} has not spoken since the prompt was handed over")

    def _on_worker_lost(self, peer: PeerId) -> tuple[Action, ...]:
        attempt = self._attempt
        if attempt is None:
            return ()
        if peer == attempt.decode:
            attempt.decode_leg = _Leg.ENDED
        elif peer == attempt.prefill and attempt.prefill_leg is not _Leg.ENDED:
            attempt.prefill_leg = _Leg.ENDED
        else:
            return ()
        return self._move(MoveReason.PEER_LOST, peer, f"{peer} was lost")

    def _move(self, reason: MoveReason, blamed: PeerId, detail: str) -> tuple[Action, ...]:
        """Leave the attempt and ask for another place, or give up when faults have used up the moves."""
        self.fault = (reason, blamed)
        if reason not in ORDERLY:
            self._faults += 1
            self._suspects |= {blamed}
        if self._faults > self._settings.max_moves:
            return (*self._end(), GaveUp(ERRORS.get(reason, AttemptError)(detail)))
        return (*self._leave_attempt(), NeedAssignment(self._suspects | {blamed}, reason))

    def _end(self) -> tuple[Action, ...]:
        self.is_done = True
        return self._leave_attempt()

    def _leave_attempt(self) -> tuple[Action, ...]:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return ()
        cancels: list[Action] = []
        if attempt.decode_leg is _Leg.HELD:
            cancels.append(Send(attempt.decode, Cancel(attempt.attempt_id)))
        if attempt.prefill is not None and attempt.prefill_leg is _Leg.HELD:
            cancels.append(Send(attempt.prefill, Cancel(attempt.attempt_id)))
        return tuple(cancels)
