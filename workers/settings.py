"""What the pure machines of a worker are created with: resolved from Config and the loaded model by the rank, by hand in tests."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.ids import PeerId
from pd_serve.kv.digest import KVDigest
from pd_serve.kv.layout import KVLayout
from pd_serve.protocol.link import PeerInfo


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
    num_contributors: int = 1
    """Prefill ranks that write under one lease."""
    kv_digest: KVDigest | None = None
    """Set: transfers carry a digest of their bytes (prefill) and must (decode)."""

    @property
    def self_id(self) -> PeerId:
        return self.info.peer

    @property
    def layout(self) -> KVLayout:
        return self.info.layout

    @property
    def flush_patience_s(self) -> float:
        """Seconds for which the flush of a stopped push may keep source blocks before its peer is let go of."""
        return 3 * self.hard_fence_after_s


def pool_limited_len(layout: KVLayout, max_model_len: int) -> int:
    """The longest prompt + output that a worker can promise: what the model allows and one sequence alone fits into the pool."""
    return min(max_model_len, layout.num_blocks * layout.block_size)
