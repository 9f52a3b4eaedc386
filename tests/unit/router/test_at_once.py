"""A request is answered alike whether it comes whole in one read, which needs no task, or not, which does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pd_serve.protocol.link import Role
from router.api.generate import LONG_TEXT
from router.exchange import Exchange
from router.tokenizer import FolderTokenizer
from tests.fakes_worker import mock_worker
from tests.patience import PATIENCE_S
from tests.unit.router.cluster import Cluster, chat_body, cluster, completion_body

BAD: list[tuple[int, dict[str, object]]] = [
    (400, {"temperature": 9}),
    (400, {"prompt": [10_000]}),
    (404, {"model": "another"}),
    (400, {"prompt": ""}),
]


async def ask(c: Cluster, path: str, body: dict[str, object], num_parts: int) -> tuple[int, str]:
    """Status and body, without what differs from answer to answer."""
    data = json.dumps(body).encode()
    request = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rsplit(":", 1)[1]))
    cut = len(request) - 5 * (num_parts - 1)
    for part in (request[:cut], request[cut:]):
        writer.write(part)
        await asyncio.sleep(0.02 if num_parts > 1 else 0)
    async with asyncio.timeout(PATIENCE_S):
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    text = answer.decode()
    if b"chunked" not in head and b'"choices"' in answer:
        text = json.loads(answer)["choices"][0]
    return int(head.split()[1]), str(text) if b"chunked" not in head else str(text.count("data: "))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_whole_and_in_parts_are_answered_alike(tmp_path: Path, path: str) -> None:
    body = chat_body if "chat" in path else completion_body
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        cases = [(200, body()), (200, body(stream=True)), *[(status, completion_body(**fields)) for status, fields in BAD]]
        for status, asked in cases if "chat" not in path else cases[:2]:
            at_once, in_parts = await ask(c, path, asked, 1), await ask(c, path, asked, 2)
            assert at_once == in_parts
            assert at_once[0] == status


async def test_a_long_chat_is_rendered_once_and_tokenized_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    render = FolderTokenizer.render_chat

    def seen(*given: Any) -> str:
        rendered.append(1)
        return render(*given)

    monkeypatch.setattr(FolderTokenizer, "render_chat", seen)
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        messages = [{"role": "user", "content": "<|im_start|>" * (LONG_TEXT // 12 + 1)}]
        assert (await ask(c, "/v1/chat/completions", chat_body(messages=messages), 1))[0] == 200
        assert rendered == [1]


async def test_a_bug_in_an_answer_is_an_error_500_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        with monkeypatch.context() as patch:
            patch.setattr(Exchange, "_collect", lambda self: 1 // 0)
            status, answer = await ask(c, "/v1/completions", completion_body(), 1)
        assert status == 500
        assert "division" not in answer
        assert (await ask(c, "/v1/completions", completion_body(), 1))[0] == 200
