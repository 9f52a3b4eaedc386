"""Real processes with latent attention and experts: prefill and decode workers of other block sizes answer as one worker does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.accuracy.test_sparse_invariance import DEEPSEEK
from tests.cluster import running
from tests.e2e.test_layouts_differ import COMMON, EXACT, POOLS, PROMPTS, answers

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "kv_lora_rank": 48, "q_lora_rank": 32, "v_head_dim": 24}
CONFIG = {**DEEPSEEK, **SIZES, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "vocab_size": 20_480}
BYTES_PER_TOKEN = (48 + 16) * 3 * 4


async def test_latents_are_pushed_to_blocks_of_another_size(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    settings = {**COMMON, **POOLS}
    with running(tmp_path / "one", prefill=0, decode=0, colocated=1, model=str(model), settings=settings) as colocated:
        expected = await answers(colocated)
    with running(tmp_path / "two", model=str(model), settings={**settings, **EXACT}) as cluster:
        assert await answers(cluster) == expected
        cluster.assert_clean()
        assert cluster.metric(cluster.url, "pd_serve_moves_total") == 0
        address = cluster.worker("prefill")["address"]
        pushed = cluster.metric(address, "pd_serve_kv_transfer_bytes_total")
    # What decode has cached of an earlier prompt is not sent again.
    assert pushed % BYTES_PER_TOKEN == 0
    assert sum(map(len, PROMPTS)) / 2 < pushed / BYTES_PER_TOKEN < 2 * sum(map(len, PROMPTS))
