"""Which workers can exchange KV. Asked by routers before a worker is taken, and by workers before they join."""

from __future__ import annotations

from pd_serve.protocol.link import PeerInfo


def exchange_problem(one: PeerInfo, other: PeerInfo) -> tuple[str, object, object] | None:
    """Why KV of the one cannot be turned into KV of the other: what differs, and both values. None if it can, whatever their block sizes,
    orders, types of elements and numbers of ranks. The same in both directions."""
    if not one.layout.can_become(other.layout):
        return "KV layout", one.layout, other.layout
    if one.num_model_kv_heads != other.num_model_kv_heads:
        return "number of KV heads", one.num_model_kv_heads, other.num_model_kv_heads
    return None
