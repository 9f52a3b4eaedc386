"""1P1D with the model on GPUs: the answer, and the way its KV went. NOT YET RUN ON A GPU."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from tests.cluster import running

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]


def test_a_chat_request_is_answered_and_its_kv_pushed(tmp_path: Path) -> None:
    settings = {"kv.num_blocks": "512", "kv.block_size": "256"}
    with running(tmp_path, dtype="bfloat16", device="cuda", settings=settings) as cluster:
        body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]
        prefill = cluster.worker("prefill")
        cluster.assert_clean()
        assert cluster.metric(prefill["address"], "pd_serve_kv_transfer_bytes_total") > 0
