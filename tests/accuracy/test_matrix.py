"""One matrix over all in which two workers may differ, for every family of models: block size, order, type of the elements, family.

What decode holds is what prefill computed, converted once; the tokens are those of one worker alone. A seeded sample runs always, so that
each family and each value is met; all cells with `make test-matrix`. Workers of several ranks are processes: test_matrix_of_ranks.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pd_serve.errors import TransportUnavailableError
from tests.accuracy.converting import Kind, Pair, Sizes
from tests.accuracy.test_kv_conversion import check
from tests.accuracy.tiny_models import TINY_MODELS
from tests.accuracy.tiny_sparse_models import SPARSE_MODELS

FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "qwen3-moe", "mixtral", "v3")
SIZES = (8, 16, 64)
ORDERS = ("token_major", "head_major")
STORED = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8_e4m3"))
KINDS = tuple(Kind(size, dtype, order, kv_dtype) for size, order, (dtype, kv_dtype) in product(SIZES, ORDERS, STORED))
Cell = tuple[str, Kind, Kind]
CELLS: tuple[Cell, ...] = tuple(product(FAMILIES, KINDS, KINDS))
SEED = 1
NUM_PER_FAMILY = 1


def config_of(family: str, vocab_size: int = 256) -> dict[str, Any]:
    model = {**TINY_MODELS, **SPARSE_MODELS}[family]()
    return {**model.config.to_dict(), "architectures": [type(model).__name__], "vocab_size": vocab_size}


def sample(seed: int) -> list[Cell]:
    rng = random.Random(seed)
    return [cell for family in FAMILIES for cell in rng.sample([cell for cell in CELLS if cell[0] == family], NUM_PER_FAMILY)]


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    family, prefill, decode = request.param
    try:
        pair = Pair(tmp_path, prefill, decode, sizes=Sizes(config_of(family)))
    except TransportUnavailableError as error:
        pytest.skip(f"no UCX: {error}")
    yield pair
    pair.close()


def _name(cell: Any) -> str:
    return "--".join(map(str, cell))


@pytest.mark.parametrize("pair", sample(SEED), indirect=True, ids=_name)
def test_a_sample_of_the_matrix(pair: Pair) -> None:
    check(pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", CELLS, indirect=True, ids=_name)
def test_the_whole_matrix(pair: Pair) -> None:
    check(pair)


def test_the_sample_meets_every_value_of_every_axis_on_both_sides() -> None:
    cells = sample(SEED)
    assert {family for family, _, _ in cells} == set(FAMILIES)
    for side in (1, 2):
        kinds = [cell[side] for cell in cells]
        assert {kind.block_size for kind in kinds} == set(SIZES)
        assert {kind.order for kind in kinds} == set(ORDERS)
        assert {(kind.dtype, kind.kv_dtype) for kind in kinds} == set(STORED)
