"""Workers of two ranks with what came after them: answers of a form, the word of prefix caches to routers, roles that change under them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, running, wait_until
from tests.fakes import write_tokenizer
from tests.unit.engine.model_folders import write_config

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
}
SETTINGS = {"model.load_format": "random", "model.name": "tiny", "engine.threads": "1", "kv.num_blocks": "256", "tp": "2"}
BLOCK = 16
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
PROMPTS = [[(i * 7 + salt * 31) % 250 + 5 for i in range(100 + salt)] for salt in range(4)]
NUM_BLOCKS = sum(len(prompt) // BLOCK for prompt in PROMPTS)


def ask(cluster: Cluster, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 450, "temperature": 0, **more}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def switch(cluster: Cluster, worker_id: str, role: str) -> None:
    reply = httpx.post(f"{cluster.url}/admin/workers/{worker_id}/role", json={"role": role, "deadline_s": 0.2}, timeout=60)
    assert reply.status_code == 200, reply.text


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    model = write_config(write_tokenizer(tmp_path / "model"), **SHAPE, eos_token_id=0)
    with running(tmp_path / "logs", prefill=1, decode=2, model=str(model), settings=SETTINGS) as cluster:
        yield cluster


@pytest.mark.slow
def test_forms_caches_and_roles_of_workers_of_two_ranks(cluster: Cluster) -> None:
    assert [len(worker["rank_pids"]) for worker in cluster.workers()] == [2, 2, 2]

    def all_answers() -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            formed = pool.map(lambda prompt: ask(cluster, prompt, response_format=FORM), PROMPTS)
            free = pool.map(lambda prompt: ask(cluster, prompt, ignore_eos=True), PROMPTS)
            return [text_of(answer) for answer in (*formed, *free)]

    answers = all_answers()
    for text in answers[: len(PROMPTS)]:
        thing = json.loads(text)
        assert set(thing) == {"colour", "size"}
        assert thing["colour"] in ("red", "green")
        assert 0 <= thing["size"] <= 99

    wait_until(lambda: cluster.metric(cluster.url, "pd_serve_prefix_known_blocks") >= 2 * NUM_BLOCKS, 10, "events of both phases")
    assert ask(cluster, PROMPTS[0], max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64

    decode, prefill = cluster.worker("decode")["id"], cluster.worker("prefill")["id"]
    incarnations = {worker["incarnation"] for worker in cluster.workers()}
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            during = pool.submit(all_answers)
            wait_until(lambda: any(worker["running"] for worker in cluster.workers()), 30, "answers are being made")
            switch(cluster, decode, "prefill")
            switch(cluster, prefill, "decode")
            assert during.result() == answers
        assert all_answers() == answers
        decode, prefill = prefill, decode
    assert {worker["incarnation"] for worker in cluster.workers()} == incarnations


@pytest.mark.slow
@pytest.mark.parametrize(("has_tokenizer", "words"), [(False, "'response_format'"), (True, "no grammar can be followed")])
def test_a_form_that_ranks_cannot_keep_is_refused_by_name(has_tokenizer: bool, words: str, tmp_path: Path) -> None:
    """Without the tokens' texts, or without a token that ends."""
    folder = write_tokenizer(tmp_path / "model") if has_tokenizer else tmp_path / "model"
    model = write_config(folder, **SHAPE, eos_token_id=None if has_tokenizer else 0)
    with running(tmp_path / "logs", model=str(model), settings=SETTINGS) as cluster:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "response_format": FORM}
        reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=20)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]
        assert ask(cluster, PROMPTS[0], max_tokens=4)["usage"]["completion_tokens"] == 4
