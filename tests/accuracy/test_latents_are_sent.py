"""With latent attention one vector per token and layer is sent, kv_lora_rank + qk_rope_head_dim elements of it, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pd_serve.config import Config, KVConfig, ModelConfig
from pd_serve.engine.batch import Batch
from pd_serve.engine.loader import plan_engine
from tests.accuracy.test_kv_block_by_block import LENGTHS, Rank, different_blocks, entry, joined_ranks, push_in_chunks, scrambled_prompts
from tests.accuracy.test_sparse_invariance import DEEPSEEK

CONFIG = {**DEEPSEEK, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "vocab_size": 256}
NUM_LAYERS = 3


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_token_takes_its_latents_bytes(dtype: str, nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig.model_validate({"dtype": dtype, "load_format": "random"})
    layout = plan_engine(tmp_path, Config(model=model, kv=KVConfig(num_blocks=8))).layout
    assert (layout.num_planes, layout.num_kv_heads) == (1, 1)
    assert layout.bytes_per_token == (64 + 16) * NUM_LAYERS * nbytes


@pytest.fixture(params=["float32", "bfloat16"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    yield from joined_ranks(tmp_path, CONFIG, request.param)


def test_latents_arrive_as_they_were_computed(ranks: tuple[Rank, Rank]) -> None:
    """push_in_chunks holds what was put, by the completion records, to length * bytes_per_token of every prompt."""
    prefill, decode = ranks
    assert decode.layout.bytes_per_token == (64 + 16) * NUM_LAYERS * decode.layout.dtype.nbytes
    prompts = scrambled_prompts(prefill.layout.num_blocks, decode.layout.num_blocks)
    before = decode.runner.cache.region.clone()
    push_in_chunks(prefill, decode, prompts, 7)
    assert different_blocks(prompts, prefill, decode, ("source", "target")) == []
    written = int((decode.runner.cache.region != before).sum())
    assert written <= sum(LENGTHS) * decode.layout.bytes_per_token
    assert written > sum(LENGTHS) * decode.layout.bytes_per_token * 0.95, "bytes that were by chance what they had been are few"
    for prompt in prompts:
        decode.runner.execute(Batch(1, (entry(prompt, prompt.own, 0, len(prompt.token_ids)),)))
    assert different_blocks(prompts, decode, decode, ("own", "target")) == []

    # A checker never seen failing is not trusted.
    last = prompts[-1]
    decode.runner.cache.layer(2).slab[last.target[3], 0, 5, 0, 0] += 1
    assert different_blocks(prompts, prefill, decode, ("source", "target")) == [(last.number, 2, 3)]
    assert not torch.equal(decode.runner.cache.region, before)
