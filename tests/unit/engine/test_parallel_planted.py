"""The tests of ranks see mistakes: each is planted in a copy of the tree, where the test named for it must fail."""

from __future__ import annotations

import pytest

from tests.mutation import Mutation
from tests.mutations import ROOT, survives

_ENGINE = "tests/unit/engine/"
_TOGETHER = _ENGINE + "test_parallel.py::test_ranks_together_give_the_tokens_and_the_kv_of_one"
_PLACES = _ENGINE + "test_parallel_group.py::test_sums_are_equal_on_all_ranks_and_independent_of_an_elements_place"

MISTAKES: dict[str, Mutation] = {
    "attention-of-ranks-not-summed": Mutation(
        "pd_serve/engine/models/llama.py",
        "hidden = hidden + all_reduce(layer.output(attended, num_decode))",
        "hidden = hidden + layer.output(attended, num_decode)",
        _TOGETHER,
    ),
    "bias-added-by-every-rank": Mutation(
        "pd_serve/engine/models/mlp.py",
        "if shape.has_bias and share.is_first else None",
        "if shape.has_bias else None",
        _TOGETHER,
    ),
    "kv-heads-of-another-rank": Mutation(
        "pd_serve/engine/parallel_shares.py",
        "return rank_heads(total, self.num_ranks, self.rank)",
        "return rank_heads(total, self.num_ranks, self.num_ranks - 1 - self.rank)",
        _TOGETHER,
    ),
    "sums-in-the-librarys-order": Mutation(
        "pd_serve/engine/parallel_torch.py",
        'self._has_one_order = num_ranks == 2 or device.type == "cuda"',
        "self._has_one_order = True",
        _PLACES,
    ),
    "own-part-first": Mutation(
        "pd_serve/engine/parallel_sockets.py",
        "torch.add(parts[0], parts[1], out=tensor)",
        "torch.add(parts[self.num_ranks - 1 - self.rank], parts[1], out=tensor)",
        _PLACES,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_sharing_a_model_out_is_found(name: str) -> None:
    assert survives(MISTAKES[name]) == ""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fits_the_line_it_changes(name: str) -> None:
    assert (ROOT / MISTAKES[name].path).read_text(encoding="utf-8").count(MISTAKES[name].old) == 1
