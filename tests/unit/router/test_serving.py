"""Answers, whole and streamed, through real sockets and mock workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from pd_serve.protocol.link import Open, Prefill, Role
from pd_serve.protocol.openai_responses import ChatChunk, ChatCompletion, Completion, CompletionChunk
from tests.fakes import byte_ids
from tests.fakes_worker import Board, MockWorker, Script, mock_worker
from tests.unit.router.cluster import cluster, completion_body, events_of

ANSWER = "hello world, this is a long answer"


def pair(script: Script | None = None) -> tuple[MockWorker, MockWorker]:
    board = Board()
    script = script or Script()
    return mock_worker("prefill-0", Role.PREFILL, script=script, board=board), mock_worker(
        "decode-0", Role.DECODE, script=script, board=board
    )


async def test_whole_chat_answer(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with cluster(tmp_path, prefill, decode) as c:
        response = await c.chat(max_tokens=100)
        assert response.status_code == 200
        answer = ChatCompletion.model_validate_json(response.content)
    choice = answer.choices[0]
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    opened = decode.of(Open)[0]
    assert isinstance(opened, Open)
    assert opened.writer == prefill.info.info.peer
    assert answer.usage.prompt_tokens == len(opened.token_ids)
    assert answer.usage.completion_tokens == len(ANSWER) + 1
    assert len(prefill.of(Prefill)) == 1
    assert prefill.of(Prefill)[0].token_ids == opened.token_ids  # type: ignore[union-attr]


async def test_whole_and_streamed_answers_are_equal(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        for max_tokens, reason in ((5, "length"), (100, "stop"), (1, "length")):
            whole = ChatCompletion.model_validate_json((await c.chat(max_tokens=max_tokens)).content)
            response = await c.chat(max_tokens=max_tokens, stream=True, stream_options={"include_usage": True})
            assert response.headers["content-type"].startswith("text/event-stream")
            *events, done = events_of(response.text)
            assert done == "[DONE]"
            chunks = [ChatChunk.model_validate(event) for event in events]
            assert chunks[0].choices[0].delta.role == "assistant"
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert text == whole.choices[0].message.content
            assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [reason]
            assert chunks[-1].usage == whole.usage
            assert all(chunk.usage is None for chunk in chunks[:-1])
            assert whole.choices[0].finish_reason == reason


async def test_stop_string_across_tokens_is_cut_and_cancels(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(eos_after=False, interval_s=0.002))
    async with cluster(tmp_path, worker) as c:
        whole = ChatCompletion.model_validate_json((await c.chat(max_tokens=500, stop=["world", "zzz"])).content)
        assert whole.choices[0].message.content == "hello "
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens == len("hello world")
        events = events_of((await c.complete(max_tokens=500, stop="o w", stream=True)).text)
        chunks = [CompletionChunk.model_validate(event) for event in events[:-1]]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hell"
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_multibyte_characters_are_never_split(tmp_path: Path) -> None:
    text = "né 世界 👩‍👩‍👧 end"
    worker = mock_worker(role=Role.BOTH, script=Script(reply=lambda prompt: byte_ids(text)))
    async with cluster(tmp_path, worker) as c:
        events = events_of((await c.complete(max_tokens=200, stream=True)).text)
        pieces = [CompletionChunk.model_validate(event).choices[0].text for event in events[:-1]]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        cut = Completion.model_validate_json((await c.complete(max_tokens=len("né 世".encode()) - 1)).content)
        assert cut.choices[0].text == "né \ufffd"


async def test_n_choices_send_the_prompt_once(tmp_path: Path) -> None:
    prefill, decode = pair()
    async with cluster(tmp_path, prefill, decode) as c:
        answer = ChatCompletion.model_validate_json((await c.chat(n=3, seed=7, temperature=1)).content)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) == 1
        assert answer.usage.completion_tokens == 3 * 8
        chunks = [ChatChunk.model_validate(event) for event in events_of((await c.chat(n=2, stream=True)).text)[:-1]]
        assert {choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason} == {0, 1}
    opened = [frame for frame in decode.of(Open) if isinstance(frame, Open)]
    assert len(prefill.of(Prefill)) == 2
    assert [frame.writer is None for frame in opened] == [False, True, True, False, True]
    assert [frame.sampling.seed for frame in opened[:3]] == [7, 8, 9]


async def test_prompt_forms_and_echo(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(reply=lambda prompt: prompt[::-1], eos_after=False))
    async with cluster(tmp_path, worker) as c:
        for prompt, texts in (
            ("ab", ["ba"]),
            (["ab", "cd"], ["ba", "dc"]),
            (list(byte_ids("xy")), ["yx"]),
            ([list(byte_ids("xy")), list(byte_ids("z!"))], ["yx", "!z"]),
        ):
            answer = Completion.model_validate_json((await c.complete(prompt=prompt, max_tokens=2)).content)
            assert [choice.text for choice in answer.choices] == texts
            assert answer.usage.prompt_tokens == 2 * len(texts)
        answer = Completion.model_validate_json((await c.complete(prompt=["ab", "cd"], max_tokens=2, n=2, echo=True)).content)
        assert [choice.text for choice in answer.choices] == ["abba", "abba", "cddc", "cddc"]
        assert answer.usage.prompt_tokens == 4
        events = events_of((await c.complete(prompt="ab", max_tokens=2, echo=True, stream=True)).text)
        assert "".join(CompletionChunk.model_validate(event).choices[0].text for event in events[:-1]) == "abba"


async def test_logprobs_of_both_apis(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        answer = ChatCompletion.model_validate_json((await c.chat(max_tokens=3, logprobs=True, top_logprobs=2)).content)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert [entry.token for entry in logprobs.content] == ["h", "e", "l"]
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
        assert logprobs.content[0].bytes == (ord("h"),)
        assert logprobs.content[0].top_logprobs[1].logprob == -1.25
        events = events_of((await c.chat(max_tokens=3, logprobs=True, stream=True)).text)
        chunks = [ChatChunk.model_validate(event) for event in events[:-1]]
        tokens = [entry.token for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
        assert tokens == ["h", "e", "l"]
        old = Completion.model_validate_json((await c.complete(max_tokens=3, logprobs=1)).content).choices[0].logprobs
        assert old is not None
        assert old.tokens == ("h", "e", "l")
        assert old.text_offset == (0, 1, 2)
        assert old.top_logprobs is not None
        assert old.top_logprobs[0] == {"h": -0.25}


async def test_usage_shows_cached_tokens_within_the_prompt(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(num_cached_tokens=10_000))
    async with cluster(tmp_path, worker) as c:
        usage = Completion.model_validate_json((await c.complete(prompt="abcd")).content).usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens == 4


async def test_extensions_reach_the_worker(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, worker) as c:
        response = await c.complete(
            max_tokens=5,
            top_k=3,
            top_p=0.5,
            min_p=0.1,
            temperature=0.7,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": 5, "5": -100},
            ignore_eos=True,
            min_tokens=2,
            stop_token_ids=[9],
            seed=-1,
        )
        assert response.status_code == 200
    frame = worker.of(Open)[0]
    assert isinstance(frame, Open)
    sampling = frame.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (3, 0.5, 0.1, 0.7)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, -0.5)
    assert sampling.logit_bias == ((5, -100.0), (7, 5.0))
    assert sampling.ignore_eos
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.seed) == (2, (9,), 2**63 - 1)


async def test_stop_token_ends_the_text_before_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        answer = Completion.model_validate_json((await c.complete(max_tokens=50, stop_token_ids=list(byte_ids(" ")))).content)
        assert answer.choices[0].text == "hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 6


async def test_openai_client_works(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    async with cluster(tmp_path, *pair()) as c, httpx.AsyncClient() as http:
        client = openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="none", http_client=http, max_retries=0)
        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].finish_reason == "length"
        assert [entry.token for entry in answer.choices[0].logprobs.content] == list("hello")
        first = answer.choices[0].logprobs.content[0]
        assert (first.logprob, first.bytes) == (-0.25, [ord("h")])
        assert [(top.token, top.logprob) for top in first.top_logprobs] == [("h", -0.25), (first.top_logprobs[1].token, -1.25)]
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            stream=True,
            max_completion_tokens=5,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "hello"
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
        *others, last = chunks
        assert [chunk.usage for chunk in others] == [None] * len(others)
        assert last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (answer.usage.prompt_tokens, 5)
        assert last.usage.total_tokens == answer.usage.total_tokens
        old = await client.completions.create(model="tiny", prompt="hi", max_tokens=100, logprobs=2)
        assert old.choices[0].text == ANSWER
        assert old.choices[0].finish_reason == "stop"
        assert "".join(old.choices[0].logprobs.tokens) == ANSWER
        assert old.choices[0].logprobs.token_logprobs == [-0.25] * len(ANSWER)
        assert old.choices[0].logprobs.text_offset == list(range(len(ANSWER)))
        assert [len(top) for top in old.choices[0].logprobs.top_logprobs] == [2] * len(ANSWER)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=10**6)
        assert refused.value.code == "context_length_exceeded"


async def test_requests_sent_before_an_answer_was_read_are_answered_in_turn(tmp_path: Path) -> None:
    """A stream, a refusal and a whole answer on one connection, all asked for at once."""
    bodies = [completion_body(stream=True), completion_body(max_tokens=10**6), completion_body(max_tokens=3)]
    requests = b""
    for last, fields in enumerate(bodies, 1 - len(bodies)):
        body = json.dumps(fields).encode()
        end = "connection: close\r\n" if last == 0 else ""
        requests += f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{end}content-length: {len(body)}\r\n\r\n".encode() + body
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(requests)
        answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        writer.close()
    assert [answer[:3] for answer in answers] == [b"200", b"400", b"200"]
    assert answers[0].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert Completion.model_validate_json(answers[2].partition(b"\r\n\r\n")[2]).usage.completion_tokens == 3
