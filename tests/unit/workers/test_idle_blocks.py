"""Blocks that the engine keeps for itself (captured steps write their idle rows there) are given to nobody."""

from __future__ import annotations

from tests.machine_fakes import Worker, layout, peer_info
from workers.settings import pool_limited_len


def test_the_pool_gives_out_all_blocks_but_the_last_ones() -> None:
    pool = Worker(peer_info("decode", num_blocks=8), num_idle_blocks=1).machine.pool
    assert sorted(pool.allocate(pool.num_allocatable)) == list(range(7))


def test_no_request_is_promised_what_only_they_could_hold() -> None:
    size = layout(8).block_size
    assert pool_limited_len(layout(8), 10**6) == 8 * size
    assert pool_limited_len(layout(8), 10**6, num_idle_blocks=1) == 7 * size
