"""Which rank of one worker sends which KV heads to which rank of another: pure arithmetic, the same on both sides.

Heads are shared out in order: of H heads over T ranks each holds H / T; where there are more ranks than heads, T / H neighbours hold the
same one. MLA's latent is one head that every rank holds. Every head that a target rank holds has exactly one source, and copies of a head
take turns, so that no source rank sends more than its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_serve.kv.conversion import HeadSlice


class Route(msgspec.Struct, frozen=True, array_like=True):
    """What one source rank owes one target rank."""

    src_rank: int
    dst_rank: int
    heads: HeadSlice


def rank_heads(total_heads: int, num_ranks: int, rank: int) -> range:
    """The heads of the model that a rank holds. Raises ValueError for a degree that the heads cannot be shared out to."""
    if num_ranks < 1 or (total_heads % num_ranks and num_ranks % total_heads):
        raise ValueError(f"{total_heads} KV heads cannot be shared out to {num_ranks} ranks")
    if num_ranks >= total_heads:
        head = rank * total_heads // num_ranks
        return range(head, head + 1)
    each = total_heads // num_ranks
    return range(rank * each, (rank + 1) * each)


def plan_routes(total_heads: int, num_src_ranks: int, num_dst_ranks: int) -> tuple[Route, ...]:
    """By target rank, then source rank. Raises ValueError, as rank_heads."""
    if num_src_ranks < 1 or num_dst_ranks < 1:
        raise ValueError(f"no routes from {num_src_ranks} ranks to {num_dst_ranks}")
    held = [rank_heads(total_heads, num_src_ranks, rank) for rank in range(num_src_ranks)]
    routes: list[Route] = []
    for dst_rank in range(num_dst_ranks):
        wanted = rank_heads(total_heads, num_dst_ranks, dst_rank)
        head = wanted.start
        while head < wanted.stop:
            holders = [rank for rank, heads in enumerate(held) if head in heads]
            src_rank = holders[dst_rank % len(holders)]
            past = min(held[src_rank].stop, wanted.stop)
            routes.append(Route(src_rank, dst_rank, HeadSlice(head - held[src_rank].start, head - wanted.start, past - head)))
            head = past
    return tuple(routes)


def routes_to(routes: Sequence[Route], dst_rank: int) -> tuple[Route, ...]:
    """What a target rank waits for: its set of contributors."""
    return tuple(route for route in routes if route.dst_rank == dst_rank)
