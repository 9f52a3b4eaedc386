"""Figures in docs/planning.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.models import model_shape

PAGE = (Path(__file__).parents[3] / "docs/planning.md").read_text(encoding="utf-8")
WEIGHTS = re.findall(r"^\| ([\w.-]+) \| ([\d,]+ K?i?B) \| ([\d,]+ K?i?B) \| ([\d,]+ B) \| ([\d,]+ K?i?B)", PAGE, re.MULTILINE)
ATTENTION = re.findall(r"^\| ([\w.-]+)(?:, [\w ]+)? \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \|$", PAGE, re.MULTILINE)


def nbytes(text: str) -> int:
    number, unit = text.replace(",", "").split()
    return int(number) * {"B": 1, "KiB": 1024}[unit]


@pytest.mark.parametrize("row", WEIGHTS, ids=lambda row: row[0])
def test_weights_of_kv(row: tuple[str, ...]) -> None:
    shape = model_shape(row[0])
    assert [nbytes(cell) for cell in row[1:]] == [
        shape.bytes_per_token(KVDtype.BFLOAT16),
        shape.bytes_per_token(KVDtype.FP8_E4M3, has_scales=False),
        shape.bytes_per_token(KVDtype.FP8_E4M3),
        shape.rank_bytes_per_token(KVDtype.BFLOAT16, 8),
    ]


@pytest.mark.parametrize("row", ATTENTION, ids=lambda row: row[0])
def test_shares_of_attention(row: tuple[str, ...]) -> None:
    shape = model_shape(row[0])
    for cell, length in zip(row[1:], (8192, 32_768, 131_072), strict=True):
        digits = len(cell.partition(".")[2])
        assert f"{100 * shape.attention_flop(length) / shape.prompt_flop(length):.{digits}f}" == cell


def test_both_tables_were_found() -> None:
    assert (len(WEIGHTS), len(ATTENTION)) == (7, 5)
