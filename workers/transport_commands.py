"""What the transport thread is told besides the machine's actions, and what it tells the control thread besides the machine's events.

Commands come from the control thread (the machine's transport actions, BeginStep, StepEnded) and from the engine thread (LayerReady,
StepSampled); all are frozen. Everything the thread has to say goes through one sink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pd_serve.engine.batch import StepResult
from pd_serve.ids import PeerId
from pd_serve.protocol.link import Sample
from pd_serve.transport.base import Region
from workers.events import (
    AddPeer,
    CloseWindow,
    FlushDone,
    FlushThenNotify,
    HardFence,
    NoticeArrived,
    OpenWindow,
    PushNow,
    PushPlan,
    RemovePeer,
    SendNotice,
    StopPush,
    TransportReported,
    WindowClosed,
    WindowOpened,
)
from workers.prefill.pusher import Packer
from workers.prefill.staging import StagingRing


@dataclass(frozen=True, slots=True)
class BeginStep:
    """The pushes of a step, and the records of the prompts that end with it; given before the engine thread gets the step."""

    step_id: int
    plans: tuple[PushPlan, ...]
    completions: tuple[FlushThenNotify, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerReady:
    """The KV of a layer, and of those held back before it, is in the pool for the whole step, or will be once `ready` returns. Posted by
    the engine thread, inside on_layer."""

    step_id: int
    layer: int
    written_at: float
    """Monotonic seconds."""
    ready: Callable[[], None] | None = None
    """Blocks until the device has written it (CUDA event synchronize); None where it already is."""
    held: tuple[float, ...] = ()
    """When each of the layers right before it was written that go out with it; oldest first."""


@dataclass(frozen=True, slots=True)
class StepSampled:
    """The step has ended well, and its completions are due. Posted by the engine thread, so that no other thread stands between the end of
    compute and the records; no LayerReady of the step follows."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class StepEnded:
    """No LayerReady of the step follows."""

    step_id: int


@dataclass(frozen=True, slots=True)
class UsePacker:
    """How KV is packed for peers whose pools have another layout, and the memory for it behind the pool. Given once."""

    packer: Packer
    staging_offset: int
    staging_nbytes: int
    slot_nbytes: int

    def ring(self) -> StagingRing:
        return StagingRing(self.staging_offset, self.staging_nbytes, self.slot_nbytes)


TransportCommand = (
    AddPeer
    | RemovePeer
    | OpenWindow
    | CloseWindow
    | PushNow
    | StopPush
    | FlushThenNotify
    | SendNotice
    | HardFence
    | BeginStep
    | LayerReady
    | StepSampled
    | StepEnded
    | UsePacker
)


@dataclass(frozen=True, slots=True)
class SamplesObserved:
    """For the next Report; the machine does not need them."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class TransportFailed:
    """The thread has ended on an error it cannot survive; the worker must end."""

    detail: str


@dataclass(frozen=True, slots=True)
class PeerRemoved:
    """End of one RemovePeer: whatever is said of that peer from now on is of a later join."""

    peer: PeerId


TransportOutput = (
    TransportReported | NoticeArrived | FlushDone | WindowOpened | WindowClosed | PeerRemoved | SamplesObserved | TransportFailed
)


@dataclass(frozen=True, slots=True)
class AllocatePool:
    """The transport allocates the KV pool (host memory)."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class RegisterPool:
    """The engine allocated the KV pool; it must outlive the thread."""

    address: int
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True)
class TransportReady:
    """What the rest of the rank needs to know of a transport that is up."""

    region: Region
    metadata: bytes
    lanes: tuple[str, ...]
