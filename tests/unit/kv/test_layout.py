from __future__ import annotations

import numpy as np
import pytest

from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder

LAYOUTS = [
    KVLayout(2, 3, 4, 5, 7, dtype, planes, order)
    for dtype in (KVDtype.FLOAT32, KVDtype.BFLOAT16, KVDtype.FP8_E4M3)
    for planes in (1, 2)
    for order in KVOrder
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_segments_cover_a_block_once(layout: KVLayout) -> None:
    covered = np.zeros(layout.block_nbytes, dtype=int)
    for segment in layout.segments():
        assert segment.nbytes == segment.stride
        covered[segment.offset : segment.offset + layout.block_size * segment.stride] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_segments_of_single_heads_are_those_of_all(layout: KVLayout) -> None:
    covered = np.zeros(layout.block_nbytes, dtype=int)
    for head in range(layout.num_kv_heads):
        for segment in layout.segments(range(head, head + 1)):
            for token in range(layout.block_size):
                start = segment.offset + token * segment.stride
                covered[start : start + segment.nbytes] += 1
    assert (covered == 1).all()


def test_heads_that_a_rank_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="are not heads of 3"):
        LAYOUTS[0].segments(range(2, 4))


def test_scales_are_a_byte_per_token_and_head() -> None:
    layout = KVLayout(2, 3, 64, 16, 7, KVDtype.FP8_E4M3)
    assert layout.bytes_per_token == 2 * 2 * 3 * (64 + 1)
    assert layout.block_nbytes == 2 * 3 * 16 * 65


def test_latent_is_one_plane() -> None:
    """DeepSeek-V2: 512 + 64 elements per token and layer (arXiv:2405.04434, section 2.1)."""
    layout = KVLayout(60, 1, 512 + 64, 16, 7, KVDtype.BFLOAT16, num_planes=1)
    assert layout.bytes_per_token == 60 * 576 * 2
    assert layout.pool_nbytes == 7 * 16 * layout.bytes_per_token


def test_same_and_convertible() -> None:
    base = KVLayout(2, 3, 4, 5, 7, KVDtype.FLOAT32)
    assert base.is_same_as(KVLayout(2, 3, 4, 5, 99, KVDtype.FLOAT32))
    for other in (
        KVLayout(2, 3, 4, 6, 7, KVDtype.FLOAT32),
        KVLayout(2, 3, 4, 5, 7, KVDtype.FP8_E4M3),
        KVLayout(2, 3, 4, 5, 7, KVDtype.FLOAT32, 2, KVOrder.HEAD_MAJOR),
    ):
        assert not base.is_same_as(other)
        assert base.can_become(other)
    assert not base.can_become(KVLayout(3, 3, 4, 5, 7, KVDtype.FLOAT32))
