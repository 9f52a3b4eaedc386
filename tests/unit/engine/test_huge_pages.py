from __future__ import annotations

import torch

from pd_serve.engine.huge_pages import PAGE_NBYTES, anonymous_mappings, use_huge_pages, whole_pages

MAPS = """\
7f0000000000-7f0000600000 rw-p 00000000 00:00 0
7f0000600000-7f0000800000 r--p 00000000 00:00 0
7f0000a00000-7f0000c00000 rw-p 00000000 08:01 77                         /a/file of weights
7f0000c00000-7f0000e00000 rw-p 00000000 00:00 0                          [heap]
7f0000e00000-7f0001000000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
"""


def test_only_the_processs_own_writable_memory_is_moved() -> None:
    assert list(anonymous_mappings(MAPS)) == [(0x7F0000000000, 0x7F0000600000), (0x7F0000C00000, 0x7F0000E00000)]


def test_pages_that_hold_some_of_the_memory_and_lie_in_one_mapping_are_whole() -> None:
    page = PAGE_NBYTES
    mappings = [(page // 2, 4 * page), (4 * page, 6 * page), (7 * page, 7 * page + 100)]
    assert whole_pages([(0, 10)], mappings) == []
    assert whole_pages([(page + 5, 2 * page + 1)], mappings) == [(page, 3 * page)]
    assert whole_pages([(3 * page, 5 * page)], mappings) == [(3 * page, 4 * page), (4 * page, 5 * page)]
    assert whole_pages([(page, page + 1), (3 * page, 3 * page + 1)], mappings) == [(page, 2 * page), (3 * page, 4 * page)]
    assert whole_pages([(7 * page, 7 * page + 50), (9 * page, 9 * page + 1)], mappings) == []


def test_memory_keeps_its_contents_and_a_little_is_left_alone() -> None:
    much, little = torch.arange(10 << 20, dtype=torch.int32), torch.ones(4)
    moved = use_huge_pages([(much.data_ptr(), much.nbytes)])
    assert 0 <= moved <= much.nbytes + PAGE_NBYTES
    assert torch.equal(much, torch.arange(10 << 20, dtype=torch.int32))
    assert use_huge_pages([(little.data_ptr(), little.nbytes)]) == 0
