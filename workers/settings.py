"""What the pure machines of a worker are created with: resolved from Config and the loaded model by the rank, by hand in tests."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.ids import PeerId
from pd_serve.kv.layout import KVLayout
from pd_serve.kv.routes import Route, plan_routes
from pd_serve.protocol.link import PeerInfo
from pd_serve.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class MachineSettings:
    info: PeerInfo
    """This worker as it presents itself to others."""
    vocab_size: int
    max_model_len: int
    """Longest prompt + output, tokens; never more than the pool holds (`pool_limited_len`)."""
    max_waiting: int
    headroom_tokens: int
    quarantine_retry_s: float
    quarantine_fence_share: float
    hard_fence_after_s: float
    rejoin_after_s: float
    """Seconds between two attempts to join a peer."""
    load_interval_s: float
    heartbeat_s: float
    """Longest silence between two load frames on a link."""
    max_packing_nbytes: int = 1 << 18
    """Packed bytes of one layer that are staged together."""
    num_idle_blocks: int = 0
    """The pool's last blocks, which no sequence gets: the engine's own (EnginePlan)."""
    has_grammars: bool = True
    """Answers can be made to keep to a grammar (EnginePlan)."""

    def problem_of(self, sampling: SamplingParams) -> str:
        """Why no token can be sampled by these here; empty when one can."""
        if sampling.grammar is not None and not self.has_grammars:
            return "this worker's model folder has no tokenizer.json, or names no end-of-sequence token: no grammar can be followed"
        return sampling.problem(self.vocab_size)

    @property
    def self_id(self) -> PeerId:
        return self.info.peer

    @property
    def layout(self) -> KVLayout:
        return self.info.layout

    def routes_from(self, writer: PeerInfo) -> tuple[Route, ...]:
        """What each rank of a writer sends to each of ours; a lease's contributors are numbered by it."""
        return plan_routes(writer.num_model_kv_heads, writer.num_ranks, self.info.num_ranks)

    def routes_to(self, holder: PeerInfo) -> tuple[Route, ...]:
        """The same for what ours send."""
        return plan_routes(self.info.num_model_kv_heads, self.info.num_ranks, holder.num_ranks)

    @property
    def flush_patience_s(self) -> float:
        """Seconds for which the flush of a stopped push may keep source blocks before its peer is let go of."""
        return 3 * self.hard_fence_after_s


def pool_limited_len(layout: KVLayout, max_model_len: int, num_idle_blocks: int = 0) -> int:
    """The longest prompt + output that a worker can promise: what the model allows and one sequence alone fits into the pool."""
    return min(max_model_len, (layout.num_blocks - num_idle_blocks) * layout.block_size)
