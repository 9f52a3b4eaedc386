from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from pd_serve.kv.routes import plan_routes, rank_heads, routes_to

SHAPES = [*product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), (3, 1, 3), (3, 3, 1), (3, 3, 3), (9, 3, 1), (1, 3, 2), (3, 6, 3)]


@pytest.mark.parametrize(("total", "num_src", "num_dst"), SHAPES)
def test_every_head_of_every_target_rank_comes_from_one_rank_that_holds_it(total: int, num_src: int, num_dst: int) -> None:
    routes = plan_routes(total, num_src, num_dst)
    for dst_rank in range(num_dst):
        wanted = rank_heads(total, num_dst, dst_rank)
        got: list[int] = []
        for route in routes_to(routes, dst_rank):
            sent = [rank_heads(total, num_src, route.src_rank)[index] for index in route.heads.src]
            assert sent == [wanted[index] for index in route.heads.dst]
            got += sent
        assert got == list(wanted)
    assert len({(route.src_rank, route.dst_rank) for route in routes}) == len(routes), "one route per pair"


@pytest.mark.parametrize(("total", "num_src", "num_dst"), [(1, 4, 4), (1, 2, 4), (2, 4, 4), (2, 8, 4), (4, 4, 4)])
def test_copies_of_a_head_take_turns(total: int, num_src: int, num_dst: int) -> None:
    sent = Counter(route.src_rank for route in plan_routes(total, num_src, num_dst))
    assert max(sent.values()) == -(-num_dst // num_src) or max(sent.values()) == max(1, num_dst // num_src)


def test_equal_degrees_send_rank_to_rank() -> None:
    assert [(route.src_rank, route.dst_rank) for route in plan_routes(8, 4, 4)] == [(rank, rank) for rank in range(4)]


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match="3 KV heads cannot be shared out to 2 ranks"):
        plan_routes(3, 1, 2)


@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 1), (1, 0), (-1, 1)])
def test_a_worker_without_ranks_is_refused(num_src: int, num_dst: int) -> None:
    with pytest.raises(ValueError, match="no routes"):
        plan_routes(4, num_src, num_dst)
