"""Which workers can exchange KV. Asked by routers before a worker is taken, and by workers before they join.

What must be equal is named part by part, so that a refusal says what to mend. What may differ (block sizes, orders, types of elements,
numbers of ranks) is converted by the transfer; `conversion` says into what.
"""

from __future__ import annotations

from typing import NamedTuple

from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.kv.routes import plan_routes, rank_heads
from pd_serve.protocol.link import PeerInfo

_SHORT = {KVDtype.FLOAT32: "fp32", KVDtype.BFLOAT16: "bf16", KVDtype.FLOAT16: "fp16", KVDtype.FP8_E4M3: "fp8"}
_ORDERS = {KVOrder.TOKEN_MAJOR: "token", KVOrder.HEAD_MAJOR: "head"}


class Difference(NamedTuple):
    """A part that has to be equal and is not."""

    what: str
    one: object
    other: object


def differences(one: PeerInfo, other: PeerInfo) -> tuple[Difference, ...]:
    """Why the two cannot work together; empty if they can. The same parts in both directions, with the values exchanged."""
    found = [
        Difference(what, mine, theirs)
        for what, mine, theirs in (
            ("protocol version", one.protocol_version, other.protocol_version),
            ("transport", one.transport, other.transport),
            ("rope", one.model.rope, other.model.rope),
            ("KV layout", _family(one.layout), _family(other.layout)),
            ("number of KV heads", one.num_model_kv_heads, other.num_model_kv_heads),
        )
        if mine != theirs
    ]
    if not one.model.has_vocabulary_of(other.model):
        found.append(Difference("vocabulary", one.model.vocabulary, other.model.vocabulary))
    if one.model_fingerprint != other.model_fingerprint:
        found.append(Difference("model fingerprint", _content(one), _content(other)))
    if one.num_model_kv_heads == other.num_model_kv_heads and not _is_routable(one, other):
        found.append(Difference(f"ranks that share {one.num_model_kv_heads} KV heads", _shares(one), _shares(other)))
    return tuple(found)


def conversion(src: PeerInfo, dst: PeerInfo) -> str:
    """What a transfer changes on the way, such as `block 16->64, bf16->fp8`; `none` where KV goes as it lies. They have no differences."""
    changes = [
        f"{label}{mine}->{theirs}"
        for label, mine, theirs in (
            ("block ", src.layout.block_size, dst.layout.block_size),
            ("", _SHORT[src.layout.dtype], _SHORT[dst.layout.dtype]),
            ("order ", _ORDERS[src.layout.order], _ORDERS[dst.layout.order]),
            ("ranks ", src.num_ranks, dst.num_ranks),
        )
        if mine != theirs
    ]
    return ", ".join(changes) or "none"


def _family(layout: KVLayout) -> str:
    """What KVLayout.can_become compares."""
    kind = "latents" if layout.num_planes == 1 else "keys and values"
    return f"{layout.num_layers} layers of {kind}, {layout.head_dim} wide"


def _content(info: PeerInfo) -> str:
    return f"{info.model_fingerprint} ({info.model.name})" if info.model.name else info.model_fingerprint


def _is_routable(one: PeerInfo, other: PeerInfo) -> bool:
    """In both directions; the number of heads is the same. Each rank has to hold as many in its pool as the routes expect there."""
    total = one.num_model_kv_heads
    if not one.num_ranks or not other.num_ranks:
        return False
    try:
        plan_routes(total, one.num_ranks, other.num_ranks)
        return all(len(rank_heads(total, info.num_ranks, 0)) == info.layout.num_kv_heads for info in (one, other))
    except ValueError:
        return False


def _shares(info: PeerInfo) -> str:
    return f"{info.num_ranks} with {info.layout.num_kv_heads} each"
