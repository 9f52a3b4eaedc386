"""What happens to a worker (events) and what it decides to do (actions): the only words between WorkerMachine and the rank's threads.

Events come from the front's socket, the transport thread and the engine thread, in the order in which they happened; WorkerMachine.handle
turns each into actions; the control thread carries those out. Everything here is frozen, so it may cross threads.

What the executor of the actions must keep:
  order    actions that concern the transport reach its thread in the order given, after every LayerReady that the engine thread posted
           before the StepDone they answer
  step     the completions of a step that ends well are carried out after its last LayerReady, perhaps before StepDone is handled; those
           of a step that fails never are
  flush    a FlushThenNotify ends in exactly one FlushDone; its notice is sent only if the flush was ok and counts every put of earlier
           actions (also of layers handed over by the running step before a StopPush); a peer that is removed ends its flushes with ok=False
  stop     after StopPush(lease) no put of that lease is issued any more, also for layers that the running step has yet to finish
  window   an OpenWindow ends in exactly one WindowOpened, once a checked write under the lease would be let in; a CloseWindow in exactly
           one WindowClosed, once none would
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from pd_serve.engine.batch import Batch, StepResult
from pd_serve.ids import AttemptId, LeaseId, LinkId, PeerId, RouterId
from pd_serve.kv.conversion import Packing
from pd_serve.kv.digest import TokenSpan
from pd_serve.protocol.link import Lease, Role, RouterFrame, Sample, WorkerFrame
from pd_serve.protocol.notify import NoticeUnion
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused, WriteWindow

# ---- events


@dataclass(frozen=True, slots=True)
class LinkOpened:
    link_id: LinkId
    router_id: RouterId


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The router is gone: everything it asked for ends, unanswered."""

    link_id: LinkId


@dataclass(frozen=True, slots=True)
class FrameReceived:
    link_id: LinkId
    frame: RouterFrame


@dataclass(frozen=True, slots=True)
class TransportReported:
    """A peer came, went, or can write no more."""

    event: PeerJoined | PeerRefused | PeerLost | PeerFenced


@dataclass(frozen=True, slots=True)
class NoticeArrived:
    """A record of a joined peer, decoded. One that does not decode is counted by the transport thread and never gets here."""

    peer: PeerId
    notice: NoticeUnion
    damage: str = ""
    """Why the KV that a Completed speaks of is not what its writer sent, where this worker verifies transfers."""


@dataclass(frozen=True, slots=True)
class FlushDone:
    """End of one FlushThenNotify; the notice, if any, went out if and only if `ok`."""

    token: int
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """End of one OpenWindow. Only now may the writer hear of the lease: a checked write that came before the window would be dropped."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """End of one CloseWindow. `fenced`: no write of the lease can land any more, whatever its writer does."""

    lease_id: LeaseId
    fenced: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The engine raised; what the step wrote is worthless, and nothing of the step is still running."""

    step_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    deadline_s: float
    """Seconds from now after which what still runs is failed."""


@dataclass(frozen=True, slots=True)
class RoleSet:
    role: Role
    deadline_s: float = inf
    """Seconds from now after which what runs in the old role is failed, to be moved."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline()` has come, or simply some time has passed."""


Event = (
    LinkOpened
    | LinkClosed
    | FrameReceived
    | TransportReported
    | NoticeArrived
    | FlushDone
    | WindowOpened
    | WindowClosed
    | StepDone
    | StepFailed
    | DrainRequested
    | RoleSet
    | Tick
)


# ---- actions


@dataclass(frozen=True, slots=True, eq=False)
class PushPlan:
    """Which bytes of one attempt one rank pushes to one rank of decode, layer by layer.

    Equal layouts: layer l is `ranges` + (l * local stride, l * remote stride, 0), straight out of the pool. Others: `packings`, each packed
    for every layer, and `ranges` is empty.
    """

    attempt_id: AttemptId
    lease: Lease
    ranges: NDArray[np.int64]
    """[n, 3] for layer 0: offset in the local pool, offset in the holder's pool, length; bytes, coalesced."""
    local_layer_stride: int
    remote_layer_stride: int
    num_layers: int
    chunk_index: int
    """0 for the first plan of the attempt on this route, counting up: names the chunk in traces."""
    packings: tuple[Packing, ...] = ()
    src_rank: int = 0
    dst_rank: int = 0
    span: TokenSpan | None = None
    """Of `ranges`: which tokens they are, for the digest."""

    @property
    def layer_nbytes(self) -> int:
        """Payload bytes of one layer."""
        return int(self.ranges[:, 2].sum()) + sum(packing.nbytes for packing in self.packings)

    @property
    def nbytes(self) -> int:
        """Payload bytes over all layers."""
        return self.layer_nbytes * self.num_layers


@dataclass(frozen=True, slots=True)
class SendFrame:
    link_id: LinkId
    frame: WorkerFrame


@dataclass(frozen=True, slots=True)
class PushNow:
    """Push all layers at once: the KV is already there (a cached prefix)."""

    plan: PushPlan


@dataclass(frozen=True, slots=True)
class StopPush:
    """Issue no further put under the lease, now and for ever."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class FlushThenNotify:
    """Flush everything issued to the peer; if that succeeded, send the notice; report FlushDone."""

    peer: PeerId
    token: int
    notice: NoticeUnion | None
    compute_ended_at: float | None
    """Monotonic seconds at which prefill's compute ended: fills in Completed.compute_to_notice_s. None for other notices."""
    src_rank: int = 0
    """Of this worker: whose puts are flushed, and who sends the notice ..."""
    dst_rank: int = 0
    """... to this rank of the peer."""


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Run one step; ends in StepDone or StepFailed. Never given while another step runs."""

    batch: Batch
    pushes: tuple[PushPlan, ...]
    """To be issued layer by layer as on_layer fires; known to the transport thread before the step begins."""
    completions: tuple[FlushThenNotify, ...] = ()
    """Of prompts that end with this step: each with a Completed that lacks what is sampled, and carried out when the step has ended."""


@dataclass(frozen=True, slots=True)
class SendNotice:
    peer: PeerId
    notice: NoticeUnion


@dataclass(frozen=True, slots=True)
class AddPeer:
    peer: PeerId
    metadata: tuple[bytes, ...]
    """By rank of the peer."""


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """Forget the peer; its unfinished flushes end with ok=False, and nothing is reported of it afterwards."""

    peer: PeerId


@dataclass(frozen=True, slots=True, eq=False)
class OpenWindow:
    window: WriteWindow
    span: TokenSpan | None = None
    """Which tokens are to be written, for the digest."""


@dataclass(frozen=True, slots=True)
class CloseWindow:
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class HardFence:
    """End the peer's process if it can be reached; PeerLost or PeerFenced follows."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Observe:
    sample: Sample


Action = (
    SendFrame
    | RunBatch
    | PushNow
    | StopPush
    | FlushThenNotify
    | SendNotice
    | AddPeer
    | RemovePeer
    | OpenWindow
    | CloseWindow
    | HardFence
    | Observe
)
