from __future__ import annotations

import math

import pytest
import torch

from pd_serve.engine.models.rotary import RotaryTable, inverse_frequencies, rotate_
from pd_serve.engine.rope import RopeParams, RopeType

CPU = torch.device("cpu")


def test_rotation_is_that_of_the_definition() -> None:
    torch.manual_seed(0)
    heads, positions = torch.randn(4, 3, 8), torch.tensor([0, 5, 1, 90])
    table = RotaryTable(RopeParams(10000.0), 8, 100, torch.float32, CPU)
    expected = heads.clone()
    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            a, b = heads[row, :, pair], heads[row, :, pair + 4]
            expected[row, :, pair] = a * math.cos(angle) - b * math.sin(angle)
            expected[row, :, pair + 4] = b * math.cos(angle) + a * math.sin(angle)
    rotate_(heads, *table.at(positions))
    torch.testing.assert_close(heads, expected)


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    table = RotaryTable(RopeParams(10000.0), 16, 200, torch.float32, CPU)

    def score(query_position: int, key_position: int) -> float:
        turned = []
        for heads, position in ((query, query_position), (key, key_position)):
            heads = heads.clone()
            rotate_(heads, *table.at(torch.tensor([position])))
            turned.append(heads.flatten())
        return float(turned[0] @ turned[1])

    assert score(150, 140) == pytest.approx(score(30, 20), abs=1e-4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(RopeParams(500000.0), 128)
    scaled = inverse_frequencies(RopeParams(500000.0, RopeType.LLAMA3, 8.0, 8192, 1.0, 4.0), 128)
    assert torch.equal(scaled[:20], plain[:20])
    assert torch.equal(scaled[-20:], plain[-20:] / 8)
    assert bool((scaled <= plain).all())


def test_yarn_ramps_between_kept_and_interpolated() -> None:
    plain = inverse_frequencies(RopeParams(10000.0), 64)
    scaled = inverse_frequencies(RopeParams(10000.0, RopeType.YARN, 4.0, 4096), 64)
    assert float(scaled[0]) == float(plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 4)
    assert bool((scaled <= plain).all())


def test_attention_factor_scales_cosine_and_sine() -> None:
    table = RotaryTable(RopeParams(10000.0, RopeType.YARN, 4.0, 64, attention_factor=1.5), 8, 4, torch.float32, CPU)
    cosine, signed_sine = table.at(torch.tensor([0]))
    assert cosine.eq(1.5).all()
    assert signed_sine.eq(0).all()
