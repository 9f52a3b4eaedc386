"""What a worker tells of its model."""

from __future__ import annotations

from pathlib import Path

from pd_serve.engine.identity import describe_rope, identify
from pd_serve.engine.rope import RopeParams, RopeType
from tests.unit.engine.model_folders import write_checkpoint


def test_a_rope_is_told_by_what_differs_from_the_defaults() -> None:
    assert describe_rope(RopeParams(10000.0)) == "default theta=10000"
    scaled = RopeParams(500000.0, RopeType.LLAMA3, factor=8.0, original_max_len=8192)
    assert describe_rope(scaled) == "llama3 theta=500000 factor=8 original_max_len=8192"


def test_a_copy_without_tokenizer_is_the_same_model_and_another_tokenizer_is_not(tmp_path: Path) -> None:
    from pd_serve.engine.families.registry import describe

    folder = write_checkpoint(tmp_path / "a")
    info = describe(folder)
    bare = identify("a", folder, info)
    assert (bare.tokenizer, bare.vocab_size) == ("", info.vocab_size)
    (folder / "tokenizer.json").write_text("{}")
    first = identify("b", folder, info)
    (folder / "tokenizer.json").write_text("[]")
    second = identify("b", folder, info)
    assert bare.has_vocabulary_of(first)
    assert not first.has_vocabulary_of(second)
