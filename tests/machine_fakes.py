"""Small builders for tests of the pure machines: a worker with a tiny pool, its peers, frames and records."""

from __future__ import annotations

from typing import TypeVar

from pd_serve.engine.batch import Batch, SampledToken, StepResult
from pd_serve.engine.scheduler import SchedulerSettings
from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, LinkId, PeerId, RouterId, WorkerId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import Lease, Open, PeerInfo, Peers, Prefill, Role, Target, WorkerFrame
from pd_serve.protocol.notify import Completed
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.transport.base import PeerJoined
from workers.events import (
    Action,
    Event,
    FrameReceived,
    LinkOpened,
    OpenWindow,
    RunBatch,
    SendFrame,
    StepDone,
    TransportReported,
    WindowOpened,
)
from workers.machine import WorkerMachine
from workers.prefill.completions import StepCompletions
from workers.settings import MachineSettings

LINK = LinkId(1)
EOS = 0
A = TypeVar("A")
F = TypeVar("F")


def layout(num_blocks: int = 8, block_size: int = 4) -> KVLayout:
    """Two layers; one token's keys (or values) of a layer are 4 bytes."""
    return KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=block_size, num_blocks=num_blocks, dtype=KVDtype.FLOAT16)


def peer_id(name: str, incarnation: int = 1) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(incarnation))


def peer_info(name: str, role: Role = Role.DECODE, num_blocks: int = 8, incarnation: int = 1) -> PeerInfo:
    return PeerInfo(peer_id(name, incarnation), role, 1, "model", layout(num_blocks), "fake", (b"meta",))


PREFILL = peer_info("prefill", Role.PREFILL)
DECODE = peer_info("decode", Role.DECODE)


class Worker:
    """A WorkerMachine with one open link, and the time."""

    def __init__(
        self, info: PeerInfo, headroom_tokens: int = 4, prefill_chunk: int = 0, num_idle_blocks: int = 0, has_grammars: bool = True
    ) -> None:
        settings = MachineSettings(
            info=info,
            vocab_size=100,
            max_model_len=info.layout.num_blocks * info.layout.block_size,
            max_waiting=4,
            headroom_tokens=headroom_tokens,
            quarantine_retry_s=1.0,
            quarantine_fence_share=0.9,
            hard_fence_after_s=10.0,
            rejoin_after_s=1.0,
            load_interval_s=0.1,
            heartbeat_s=1000.0,
            num_idle_blocks=num_idle_blocks,
            has_grammars=has_grammars,
        )
        scheduler = SchedulerSettings(64, 8, prefill_chunk, frozenset({EOS}), settings.max_model_len)
        self.now = 100.0
        self.machine = WorkerMachine(settings, scheduler, iter(map(Epoch, range(1000, 2000))).__next__)
        self._completions = StepCompletions()
        self.do(LinkOpened(LINK, RouterId("router")))

    def do(self, event: Event) -> tuple[Action, ...]:
        actions = self.machine.handle(event, self.now)
        for step in all_of(RunBatch, actions):
            self._completions.begin(step.completions)
        return actions

    def frame(self, frame: Open | Prefill | Peers | object) -> tuple[Action, ...]:
        return self.do(FrameReceived(LINK, frame))  # type: ignore[arg-type]

    def join(self, info: PeerInfo, one_sided: bool = True) -> None:
        self.frame(Peers((info,)))
        self.do(TransportReported(PeerJoined(info.peer, "lane", one_sided, 1e9, 1e-5)))

    def reserve(self, frame: Open) -> tuple[Action, ...]:
        """Open with a writer, and let the window open."""
        return self.do(WindowOpened(only(OpenWindow, self.frame(frame)).window.lease_id))

    def finish_step(self, batch: Batch, token_id: int, is_cut: bool = False) -> tuple[Action, ...]:
        """Every entry that samples gets `token_id`. What the machine answers, and the completions that go out with the step."""
        sampled = tuple(SampledToken(entry.attempt_id, token_id, None, is_cut) for entry in batch.entries if entry.sample is not None)
        result = StepResult(batch.step_id, sampled, self.now, self.now)
        completions = self._completions.take(result)
        return (*self.do(StepDone(result)), *completions)

    @property
    def num_held_blocks(self) -> int:
        return self.machine.pool.counts().held


def all_of(kind: type[A], actions: tuple[Action, ...]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def only(kind: type[A], actions: tuple[Action, ...]) -> A:
    found = all_of(kind, actions)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {actions}"
    return found[0]


def frames(kind: type[F], actions: tuple[Action, ...]) -> list[F]:
    return [action.frame for action in actions if isinstance(action, SendFrame) and isinstance(action.frame, kind)]


def only_frame(kind: type[F], actions: tuple[Action, ...]) -> F:
    found = frames(kind, actions)
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {actions}"
    return found[0]


def replies(actions: tuple[Action, ...]) -> list[WorkerFrame]:
    """Frames about attempts: without load and peer reports."""
    return [action.frame for action in actions if isinstance(action, SendFrame) and hasattr(action.frame, "attempt_id")]


def batch_of(actions: tuple[Action, ...]) -> Batch:
    return only(RunBatch, actions).batch


def prompt(num_tokens: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + num_tokens))


def open_frame(
    attempt: int, token_ids: tuple[int, ...], writer: PeerId | None = PREFILL.peer, max_tokens: int = 4, outputs: int = 0
) -> Open:
    return Open(AttemptId(attempt), token_ids, outputs, SamplingParams(max_tokens=max_tokens), writer, timeout_s=5.0)


def prefill_frame(attempt: int, token_ids: tuple[int, ...], lease_id: int = 1, num_cached: int = 0, holder: PeerInfo = DECODE) -> Prefill:
    blocks = tuple(range(holder.layout.num_blocks_for(len(token_ids))))
    target = Target(Lease(LeaseId(lease_id), Epoch(1000 + lease_id), holder.peer), blocks, num_cached)
    return Prefill(AttemptId(attempt), token_ids, 0, SamplingParams(max_tokens=4), target)


def completed(target: Target, frame: Open, first_token: int = 42, **changes: object) -> Completed:
    """The record that fits the target, but for `changes`."""
    geometry = layout()
    fields: dict[str, object] = {
        "lease_id": target.lease.lease_id,
        "epoch": target.lease.epoch,
        "attempt_id": frame.attempt_id,
        "contributor": 0,
        "num_contributors": 1,
        "first_token": first_token,
        "logprobs": None,
        "num_tokens": len(frame.token_ids),
        "num_layers": geometry.num_layers,
        "nbytes": (len(frame.token_ids) - target.num_cached_tokens) * geometry.bytes_per_token,
        "num_cached_tokens": 0,
        "compute_to_notice_s": 0.001,
    }
    return Completed(**(fields | changes))  # type: ignore[arg-type]
