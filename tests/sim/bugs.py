"""Machines with one historic mistake each. Every one must be found by the simulator: a checker never seen failing is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from pd_serve.engine.scheduler import Scheduler, SequenceUpdate
from pd_serve.engine.sequence import Sequence
from pd_serve.ids import AttemptId, Epoch, LeaseId, LinkId, PeerId
from pd_serve.kv.lease import HeldLease, LeaseState, LeaseTable
from pd_serve.protocol.link import Failed, FailureReason, FinishReason, Open, PeerInfo, Prefill, TokenOutput
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from router.lifecycle import Action as RouterAction
from router.lifecycle import Event as LifecycleEvent
from router.lifecycle import Finished, Lifecycle, Send
from tests.sim.fabric import FabricFaults, Lane
from tests.sim.scenario import STALLING
from tests.sim.world import Planted
from workers.decode.machine import DecodeMachine, _Attempt
from workers.decode.quarantine import Quarantine
from workers.events import Action, FlushThenNotify, OpenWindow, PushPlan, SendFrame, StopPush
from workers.machine import WorkerMachine
from workers.peers import PeerTable, _Entry
from workers.prefill.machine import PrefillMachine, _Job
from workers.prefill.spent import SpentLeases

_ANY: Mapping[str, object] = MappingProxyType({})


class _Spoilt(WorkerMachine):
    """Swaps the classes of the parts named below for broken ones."""

    parts: tuple[tuple[str, type], ...] = ()

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        for path, broken in self.parts:
            part: object = self
            for name in path.split("."):
                part = getattr(part, name)
            part.__class__ = broken


def _spoil(path: str, broken: type, scenario: Mapping[str, object] = _ANY) -> Planted:
    return Planted(type(broken.__name__, (_Spoilt,), {"parts": ((path, broken),)}), scenario=scenario)


class FreeOnAbandon(Quarantine):
    """A cancel, timeout or error on decode frees the blocks while prefill still writes (F1)."""

    def abandon(self, lease_id: LeaseId, now: float) -> list[Action]:
        actions = super().abandon(lease_id, now)
        self._leases.quarantine(lease_id)
        self._leases.writer_let_go(lease_id)
        self._ask_again_at.pop(lease_id, None)
        return actions


class FreeOnDeadline(Quarantine):
    """A quarantined lease is freed after a while, whatever its writer does."""

    def on_tick(self, now: float) -> list[Action]:
        for lease in self._leases:
            if lease.state is not LeaseState.GRANTED and now >= lease.abandoned_at + 0.1:
                self._release(lease.lease_id)
        return super().on_tick(now)


class FreeOnLoss(Quarantine):
    """A lost peer is taken for one that can write no more."""

    def on_peer_lost(self, peer: PeerId, fenced: bool) -> None:
        super().on_peer_lost(peer, True)


class FreeSourceEarly(PrefillMachine):
    """Source blocks go back when the prompt is computed, not when its transfer is flushed (F2)."""

    def on_update(self, update: SequenceUpdate, ended_at: float) -> list[Action]:
        actions = super().on_update(update, ended_at)
        if update.prompt_done:
            self._scheduler.release(update.sequence)
        return actions


class FreeInFlight(Scheduler):
    """Blocks of a cancelled sequence go back while its step still computes into them."""

    def release(self, sequence: Sequence) -> None:
        blocks, sequence.block_table = sequence.block_table, []
        self._pool.release(blocks)


class AcceptAnyEpoch(LeaseTable):
    """Records are matched by lease alone."""

    def check(self, lease_id: LeaseId, epoch: Epoch, writer: PeerId) -> HeldLease:
        lease = self.get(lease_id)
        return super().check(lease_id, lease.epoch if lease else epoch, writer)


class CountCompletions(DecodeMachine):
    """A completion is counted, not identified: it fills the oldest lease of its writer (F5)."""

    def on_completed(self, peer: PeerId, notice: Completed, now: float, damage: str = "") -> list[Action]:
        for lease in self._leases.of_writer(peer):
            if lease.state is LeaseState.GRANTED:
                attempt = self._attempts[lease.attempt_id]
                return self._filled(attempt, lease, msgspec.structs.replace(notice, num_tokens=len(attempt.sequence.token_ids)))
        return []


class NoWindowBeforeReserved(DecodeMachine):
    """The writer hears of the lease before a checked write would be let in."""

    def open(self, link_id: LinkId, frame: Open, is_joined: bool, now: float) -> list[Action]:
        actions = super().open(link_id, frame, is_joined, now)
        for action in tuple(actions):
            if isinstance(action, OpenWindow):
                actions += super().on_window_opened(action.window.lease_id)
        return actions

    def on_window_opened(self, lease_id: LeaseId) -> list[Action]:
        return []


class OpenWindowOnQuietLease(Quarantine):
    """Blocks of an abandoned lease are reissued on Quiesced while its window is still open."""

    def _release(self, lease_id: LeaseId) -> None:
        self._leases.quarantine(lease_id)
        super()._release(lease_id)


class OpenWindowOnFreeBlocks(DecodeMachine):
    """Blocks of a filled lease are reissued while its window is still open."""

    def _filled(self, attempt: _Attempt, lease: HeldLease, notice: Completed) -> list[Action]:
        actions = super()._filled(attempt, lease, notice)
        self._pool.release(self._closing.pop(lease.lease_id))
        return actions


class FailAfterClosed(DecodeMachine):
    """A cancelled attempt is also reported as failed."""

    def cancel(self, link_id: LinkId, attempt_id: AttemptId, now: float) -> list[Action]:
        actions = super().cancel(link_id, attempt_id, now)
        return [SendFrame(link_id, Failed(attempt_id, FailureReason.ENGINE, "cancelled")), *actions] if actions else []


class AbsoluteDeadline(DecodeMachine):
    """The time a transfer may take is told as a point of the router's clock (F30). With AbsoluteTimeout."""

    def open(self, link_id: LinkId, frame: Open, is_joined: bool, now: float) -> list[Action]:
        return super().open(link_id, msgspec.structs.replace(frame, timeout_s=frame.timeout_s - now), is_joined, now)


class LeakOnCancel(DecodeMachine):
    """A cancelled sequence's blocks are forgotten."""

    def _end(self, attempt: _Attempt) -> None:
        if self._scheduler.get(attempt.sequence.attempt_id) is None and attempt.sequence.num_output_tokens == 2:
            attempt.sequence.block_table = attempt.sequence.block_table[:-1]
        super()._end(attempt)


class NoLeaseDeadline(LeaseTable):
    """Decode waits for a completion for ever (F6)."""

    def expired(self, now: float) -> tuple[HeldLease, ...]:
        return ()

    def next_deadline(self) -> float | None:
        return None


class AskOnce(Quarantine):
    """A lost Abandon, or its lost answer, leaves the lease for ever."""

    def abandon(self, lease_id: LeaseId, now: float) -> list[Action]:
        actions = super().abandon(lease_id, now)
        self._ask_again_at.pop(lease_id, None)
        return actions

    def _fence_silent(self, now: float) -> list[Action]:
        return []

    def next_deadline(self) -> float | None:
        return None


class NoTombstones(SpentLeases):
    """A Prefill that was overtaken by its Abandon is begun all the same."""

    def contains(self, holder: PeerId, lease_id: LeaseId) -> bool:
        return False


class PushOn(PrefillMachine):
    """Quiesced is sent though the running step goes on pushing (F1)."""

    def _stop(self, job: _Job, now: float) -> list[Action]:
        return [action for action in super()._stop(job, now) if not isinstance(action, StopPush)]


class SkipFirstToken(PrefillMachine):
    """A token that was never computed is taken for cached, with the totals made to fit."""

    def start(self, link_id: LinkId, frame: Prefill, holder: PeerInfo | None) -> list[Action]:
        actions = super().start(link_id, frame, holder)
        job = self._jobs.get(frame.attempt_id)
        if job is not None and len(frame.token_ids) > 8 and job.sequence.num_cached_tokens == 0 and holder is not None:
            job.sequence.num_computed_tokens = job.sequence.num_cached_tokens = 1
            owed = len(frame.token_ids) - max(1, frame.target.num_cached_tokens)
            skipped = (len(frame.token_ids) - frame.target.num_cached_tokens - owed) * holder.layout.bytes_per_token
            job.pushed_nbytes = [nbytes + skipped for nbytes in job.pushed_nbytes]
            job.sequence.block_table = list(self._pool.allocate(1)) if self._pool.num_allocatable else []
        return actions


class WrongSlots(PrefillMachine):
    """The blocks of a prefix that decode has are left out of the target's indices (F3)."""

    def _plans(self, job: _Job, blocks: tuple[int, ...], start: int, end: int) -> list[PushPlan]:
        right = job.target
        shift = right.num_cached_tokens // self._pool.block_size
        job.target = msgspec.structs.replace(right, blocks=right.blocks[shift:] + right.blocks[:shift])
        plans = super()._plans(job, blocks, start, end)
        job.target = right
        return plans


class ForgetAbandoned(PrefillMachine):
    """Abandon of a job that has ended is not answered."""

    def on_abandon(self, peer: PeerId, notice: object, now: float) -> list[Action]:
        return [action for action in super().on_abandon(peer, notice, now) if not isinstance(action, FlushThenNotify)]  # type: ignore[arg-type]


class RemoveUnfenced(PeerTable):
    """A lost peer is removed at once, and its fence is never heard of."""

    def on_report(self, event: PeerJoined | PeerRefused | PeerLost | PeerFenced, now: float) -> None:
        super().on_report(event, now)
        if isinstance(event, PeerLost):
            self._lost_now = event.peer

    def reconcile(self, now: float, is_busy: object) -> list[Action]:
        for entry in self._entries.values():
            self._hurry(entry)
        return super().reconcile(now, lambda peer: False)

    def _hurry(self, entry: _Entry) -> None:
        entry.look_at = None


class FinishTwice(Lifecycle):
    """The client hears of the end twice."""

    def _on_token(self, peer: PeerId, token: TokenOutput) -> tuple[RouterAction, ...]:
        actions = super()._on_token(peer, token)
        return (*actions, Finished(FinishReason.STOP)) if any(isinstance(action, Finished) for action in actions) else actions


class DeafToLoss(Lifecycle):
    """A lost worker is not noticed."""

    def _on_worker_lost(self, peer: PeerId) -> tuple[RouterAction, ...]:
        return ()


class ForgetOneLeg(Lifecycle):
    """An attempt that is left is not cancelled where it is still held (F27)."""

    def _leave_attempt(self) -> tuple[RouterAction, ...]:
        super()._leave_attempt()
        return ()


class AbsoluteTimeout(Lifecycle):
    """Sends deadlines, not durations."""

    def handle(self, event: LifecycleEvent, now: float) -> tuple[RouterAction, ...]:
        return tuple(_with_deadline(action, now) for action in super().handle(event, now))


def _with_deadline(action: RouterAction, now: float) -> RouterAction:
    if isinstance(action, Send) and isinstance(action.frame, Open):
        return Send(action.peer, msgspec.structs.replace(action.frame, timeout_s=now + action.frame.timeout_s))
    return action


class FullBudgetAfterMove(Lifecycle):
    """A moved request forgets what it has generated."""

    @property
    def num_output_tokens(self) -> int:
        return 0


_LATE_COPIES = {
    "lanes": (Lane.CHECKED,),
    "fabric": FabricFaults(write_duplicate=0.5),
    "transport_stall": STALLING,
    "cancel_share": 0.5,
}
"""Checked writes come again while windows that are to be closed are still open."""
_LATE_PREFILLS = {"lanes": (Lane.SHM,), "transfer_timeout_s": 0.004, "spike": (0.3, 0.1)}
"""Links are slower than deadlines."""
_LATE_WRITES = {"lanes": (Lane.RDMA, Lane.SHM), "transfer_timeout_s": 2.0, "num_faults": 5, "num_requests": 40, "num_layers": 3}
"""Writes land after the loss of their writer."""
_LOST_RECORDS = {"fabric": FabricFaults(notice_loss=0.2), "cancel_share": 0.0}


@dataclass(frozen=True, slots=True)
class Bug:
    planted: Planted
    symptom: str
    """What the checker must say, a regular expression."""
    near: int = 0
    """Where to begin to look: a seed that found it."""


BUGS: dict[str, Bug] = {
    "free_on_abandon": Bug(_spoil("decode._quarantine", FreeOnAbandon), "writes under lease|foreign KV"),
    "free_on_deadline": Bug(_spoil("decode._quarantine", FreeOnDeadline), "writes under lease|foreign KV", near=14),
    "free_on_loss": Bug(_spoil("decode._quarantine", FreeOnLoss, _LATE_WRITES), "writes under lease|foreign KV"),
    "free_source_early": Bug(_spoil("prefill", FreeSourceEarly), "still being read by a transfer|foreign KV"),
    "free_in_flight": Bug(_spoil("scheduler", FreeInFlight), "which was given back|foreign KV"),
    "accept_any_epoch": Bug(_spoil("leases", AcceptAnyEpoch), "foreign KV|gets|computes|writes under lease", near=16),
    "count_completions": Bug(_spoil("decode", CountCompletions), "foreign KV|gets|computes|writes under lease"),
    "no_window_before_reserved": Bug(_spoil("decode", NoWindowBeforeReserved), "foreign KV", near=117),
    "open_window_on_free_blocks": Bug(_spoil("decode", OpenWindowOnFreeBlocks, _LATE_COPIES), "writes under lease|foreign KV"),
    "open_window_on_quiet_lease": Bug(_spoil("decode._quarantine", OpenWindowOnQuietLease, _LATE_COPIES), "writes under lease|foreign KV"),
    "fail_after_closed": Bug(_spoil("decode", FailAfterClosed), "second terminal frame"),
    "absolute_deadline": Bug(
        Planted(machine=_spoil("decode", AbsoluteDeadline).machine, lifecycle=AbsoluteTimeout), "failed although|no end after"
    ),
    "leak_on_cancel": Bug(_spoil("decode", LeakOnCancel), "references differ"),
    "no_lease_deadline": Bug(_spoil("leases", NoLeaseDeadline, _LOST_RECORDS), "no end after"),
    "ask_once": Bug(_spoil("decode._quarantine", AskOnce), "no end after"),
    "no_tombstones": Bug(_spoil("prefill._spent", NoTombstones, _LATE_PREFILLS), "writes under lease|foreign KV"),
    "push_on": Bug(_spoil("prefill", PushOn), "given back|writes under lease|foreign KV"),
    "skip_first_token": Bug(_spoil("prefill", SkipFirstToken), "foreign KV|references differ"),
    "wrong_slots": Bug(_spoil("prefill", WrongSlots), "writes into blocks|foreign KV|outside its window"),
    "forget_abandoned": Bug(_spoil("prefill", ForgetAbandoned), "no end after"),
    "remove_unfenced": Bug(_spoil("peers", RemoveUnfenced), "no end after|deadline that Tick", near=12),
    "finish_twice": Bug(Planted(lifecycle=FinishTwice), "ends twice"),
    "deaf_to_loss": Bug(Planted(lifecycle=DeafToLoss), "no end after"),
    "forget_one_leg": Bug(Planted(lifecycle=ForgetOneLeg), "still held"),
    "full_budget_after_move": Bug(Planted(lifecycle=FullBudgetAfterMove), "gets|samples|computes|failed although", near=13),
}
