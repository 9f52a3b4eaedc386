"""What ranks do together, and what each takes of a model. Ranks here are threads: a group belongs to its objects, not to the process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from pd_serve.config import Config
from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.engine.families.registry import describe
from pd_serve.engine.loader import plan_engine
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.parallel import Collective, SingleRank, check_degree, open_group
from pd_serve.engine.parallel_shares import Share, degrees, scaled
from pd_serve.engine.weights import CheckpointWeights, Part, RandomWeights
from pd_serve.errors import ConfigError, EngineError
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.unit.engine.model_folders import write_checkpoint, write_config

CPU = torch.device("cpu")
QUERY = "model.layers.1.self_attn.q_proj.weight"
LOST = r"lost the other ranks|is closed"
T = TypeVar("T")


def _place(kind: str, folder: Path) -> str:
    if kind == "file":
        return f"file://{folder}/group"
    return f"tcp://127.0.0.1:{free_port()}"


@contextmanager
def _group(num_ranks: int, rendezvous: str) -> Iterator[Callable[[Callable[[Collective], T]], list[T]]]:
    """Runs a function on every rank at once."""
    with ThreadPoolExecutor(num_ranks) as pool:
        groups = list(pool.map(lambda rank: open_group(rank, num_ranks, rendezvous, CPU, PATIENCE_S), range(num_ranks)))
        yield lambda function: list(pool.map(function, groups))
        for group in groups:
            group.close()
            group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_sums_are_equal_on_all_ranks_and_independent_of_an_elements_place(
    kind: str, num_ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    parts = [torch.randn(307, 129, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(num_ranks)]
    with _group(num_ranks, _place(kind, tmp_path)) as on_all:
        whole = on_all(lambda group: group.all_reduce(parts[group.rank].clone()))
        row = on_all(lambda group: group.all_reduce(parts[group.rank][11:12].clone()))
    for rank in range(num_ranks):
        assert torch.equal(whole[rank], whole[0])
        assert torch.equal(row[rank][0], whole[0][11])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    assert torch.allclose(whole[0].float(), torch.stack(parts).float().sum(0), atol=tolerance)


def test_sums_replace_the_tensor_also_under_inference_mode(tmp_path: Path) -> None:
    def add(group: Collective) -> bool:
        with torch.inference_mode():
            tensor = torch.full((3, 5), float(group.rank + 1))
            return group.all_reduce(tensor) is tensor and bool((tensor == 6).all())

    with _group(3, f"file://{tmp_path}/group") as on_all:
        assert on_all(add) == [True] * 3


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_the_smallest_value_of_all_is_agreed_on(kind: str, tmp_path: Path) -> None:
    with _group(3, _place(kind, tmp_path)) as on_all:
        assert on_all(lambda group: group.minimum(10**12 - group.rank)) == [10**12 - 2] * 3


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_group_without_one_of_its_ranks_is_of_no_use(kind: str, tmp_path: Path) -> None:
    place = _place(kind, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: open_group(rank, 2, place, CPU, PATIENCE_S), range(2)))
    groups[1].close()
    for group in groups:
        for _ in range(2):
            with pytest.raises(EngineError, match=LOST):
                group.all_reduce(torch.ones(2))
        group.close()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_that_came_too_late_finds_a_group_that_is_of_no_use(kind: str, tmp_path: Path) -> None:
    """What the waiting rank has sent must not be taken for its part of a later sum."""
    place = _place(kind, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: open_group(rank, 2, place, CPU, 2.0), range(2)))

    def sum_twice(group: Collective) -> None:
        for _ in range(2):
            group.all_reduce(torch.ones(2))

    for group in groups:
        with pytest.raises(EngineError, match=LOST):
            sum_twice(group)
        group.close()


def test_one_rank_needs_no_group() -> None:
    alone = open_group(0, 1, "", CPU, 1.0)
    tensor = torch.ones(2)
    assert isinstance(alone, SingleRank)
    assert alone.all_reduce(tensor) is tensor
    assert alone.minimum(7) == 7


def test_no_folder_is_left_where_ranks_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _group(3, f"file://{tmp_path}/group"), pytest.raises(EngineError):
        open_group(1, 2, f"file://{tmp_path}/other", CPU, 0.1)
    assert {path.name for path in tmp_path.iterdir()} <= {"group", "other"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_nobody_meets_gives_up_in_time(rank: int, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"rank {rank} of 2 did not meet the others"):
        open_group(rank, 2, f"file://{tmp_path}/group", CPU, 0.5)


@pytest.mark.parametrize("rendezvous", ["", "group", "file://host/path", "file:group", "tcp://127.0.0.1", "env://", "http://127.0.0.1:1"])
def test_places_where_ranks_cannot_meet_are_config_errors(rendezvous: str) -> None:
    with pytest.raises(ConfigError, match="no place where ranks can meet"):
        open_group(0, 2, rendezvous, CPU, 0.5)


def _info(folder: Path, num_heads: int, num_kv_heads: int, intermediate_size: int) -> ModelInfo:
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "intermediate_size": intermediate_size}
    return describe(write_config(folder, hidden_size=8 * num_heads, **sizes), has_weights=False)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 8, 128), (1, 2, 4, 8, 16, 32)),
        ((9, 3, 1536), (1, 3)),
        ((14, 2, 4864), (1, 2)),
        ((12, 4, 96), (1, 2, 4, 12)),
        ((12, 3, 96), (1, 3, 6, 12)),
        ((8, 1, 24), (1, 2, 4, 8)),
        ((8, 8, 25), (1,)),
    ],
)
def test_degrees_share_query_heads_kv_heads_and_mlp_evenly(sizes: tuple[int, int, int], expected: tuple[int, ...], tmp_path: Path) -> None:
    info = _info(tmp_path, *sizes)
    assert degrees(info) == expected
    for degree in expected:
        check_degree(info, degree)
        shares = [Share(rank, degree) for rank in range(degree)]
        assert [head for share in shares for head in share.of(info.num_heads)] == list(range(info.num_heads))
        for share in shares:
            # A query head finds the KV head of its group on its own rank, at the place that the rank's own grouping gives it.
            query, key = share.of(info.num_heads), share.of_kv_heads(info.num_kv_heads)
            own_group = len(query) // len(key)
            for place, head in enumerate(query):
                assert key[place // own_group] == head // (info.num_heads // info.num_kv_heads)


def test_a_degree_that_does_not_fit_names_those_that_do(tmp_path: Path) -> None:
    info = _info(tmp_path, 9, 3, 1536)
    with pytest.raises(ConfigError, match=r"engine\.tp 2 does not fit LlamaForCausalLM .* degrees that do: 1, 3$"):
        check_degree(info, 2)
    with pytest.raises(ConfigError, match=r"degrees that do: 1$"):
        check_degree(replace(info, architecture="OtherForCausalLM"), 3)


def test_parts_of_a_checkpoint_are_cuts_of_its_tensors(tmp_path: Path) -> None:
    weights = CheckpointWeights(Checkpoint.open(write_checkpoint(tmp_path)), torch.float32, CPU)
    whole = weights.get(QUERY, (32, 32))
    assert torch.equal(weights.get(QUERY, (32, 32), Part(0, range(8, 16))), whole[8:16])
    assert torch.equal(weights.get(QUERY, (32, 32), Part(1, range(24, 32))), whole[:, 24:])
    half = CheckpointWeights(Checkpoint.open(tmp_path), torch.bfloat16, CPU).get(QUERY, (32, 32), Part(1, range(16)))
    assert half.dtype is torch.bfloat16
    assert half.shape == (32, 16)


def test_parts_of_random_weights_are_cuts_of_what_one_rank_draws() -> None:
    weights = RandomWeights(0, torch.float32, CPU)
    whole = weights.get(QUERY, (6, 8))
    assert torch.equal(weights.get(QUERY, (6, 8), Part(0, range(2, 4))), whole[2:4])
    part = weights.get(QUERY, (6, 8), Part(1, range(4, 8)))
    assert torch.equal(part, whole[:, 4:])
    assert part.untyped_storage().nbytes() == part.nbytes
    assert torch.equal(weights.get("model.norm.weight", (8,), Part(0, range(3))), torch.ones(3))


def test_elements_of_heads_follow_the_heads() -> None:
    assert scaled(range(2, 4), 16) == range(32, 64)
    assert [Share(rank, 4).of_kv_heads(2) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [Share(rank, 2).is_first for rank in range(2)] == [True, False]


def test_ranks_agree_on_the_pool_that_fits_all_of_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")

    def num_blocks(group: Collective) -> int:
        kv = {"memory_bytes": (3 - group.rank) << 20}
        return plan_engine(folder, _config(kv, tp=2), group).layout.num_blocks

    with _group(2, f"file://{tmp_path}/group") as on_all:
        agreed = on_all(num_blocks)
    alone = plan_engine(folder, _config({"memory_bytes": 2 << 20}, tp=1)).layout.num_blocks
    assert agreed == [2 * alone, 2 * alone]


def _config(kv: dict[str, int], tp: int) -> Config:
    return Config.model_validate({"model": {"dtype": "float32"}, "kv": kv, "engine": {"device": "cpu", "tp": tp}})
