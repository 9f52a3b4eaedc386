from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.engine.weights import CheckpointWeights, RandomWeights
from pd_serve.errors import ModelError
from tests.unit.engine.model_folders import write_checkpoint, write_config

CPU = torch.device("cpu")
NORM = "model.norm.weight"


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    single = Checkpoint.open(write_checkpoint(tmp_path / "single"))
    sharded = Checkpoint.open(write_checkpoint(tmp_path / "sharded", num_shards=3))
    assert len(sharded.files) == 3
    assert {name: entry.shape for name, entry in single.tensors.items()} == {name: entry.shape for name, entry in sharded.tensors.items()}
    one, other = (CheckpointWeights(checkpoint, torch.float32, CPU) for checkpoint in (single, sharded))
    assert all(torch.equal(one.get(name, entry.shape), other.get(name, entry.shape)) for name, entry in single.tensors.items())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"shard model-00002-of-00003\.safetensors is missing"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(keep: int, tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated"):
        Checkpoint.open(tmp_path)


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    for header in (b"not json", b"[]", b'{"x": 1}', b'{"x": {"shape": "a", "data_offsets": [0, 0]}}', b"\xff\xfe"):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelError):
            Checkpoint.open(tmp_path)


def test_an_index_must_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="not a plain file name"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ModelError, match="holds no safetensors"):
        Checkpoint.open(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    weights = CheckpointWeights(Checkpoint.open(write_checkpoint(tmp_path)), torch.float32, CPU)
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        weights.get("lm_head.weight", (97, 32))
    with pytest.raises(ModelError, match=r"norm\.weight has shape \[32\]; config\.json asks for \[33\]"):
        weights.get(NORM, (33,))


def test_weights_arrive_in_the_engines_dtype(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path))
    assert CheckpointWeights(checkpoint, torch.bfloat16, CPU).get(NORM, (32,)).dtype is torch.bfloat16


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = (RandomWeights(seed, torch.float32, CPU) for seed in (1, 1, 2))
    again.get("b", (3, 3))
    assert torch.equal(first.get("a", (3, 3)), again.get("a", (3, 3)))
    assert not torch.equal(first.get("a", (3, 3)), first.get("b", (3, 3)))
    assert not torch.equal(first.get("a", (3, 3)), other.get("a", (3, 3)))
    assert torch.equal(first.get(NORM, (4,)), torch.ones(4))
