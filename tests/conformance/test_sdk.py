"""The real openai SDK, sync and async, against the router: what it makes of answers, streams and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from pd_serve.config import SecurityConfig
from pd_serve.protocol.link import Role
from tests.conformance.shapes import again_strictly, strictly
from tests.fakes_worker import Script, mock_worker
from tests.unit.router.cluster import MODEL, Cluster, cluster, until
from tests.unit.router.elsewhere import serving_elsewhere

KEY = "sk-one"
ANSWER = "hello world, this is a long answer"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with serving_elsewhere(tmp_path_factory.mktemp("sdk"), security=SecurityConfig(api_keys=(KEY,))) as made:
        yield made


@pytest.fixture(scope="module")
def client(here: Cluster) -> Iterator[OpenAI]:
    with httpx.Client(verify=False) as http, OpenAI(base_url=here.url + "/v1", api_key=KEY, max_retries=0, http_client=http) as made:
        yield made


@pytest.fixture
async def aclient(here: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with (
        httpx.AsyncClient(verify=False) as http,
        AsyncOpenAI(base_url=here.url + "/v1", api_key=KEY, max_retries=0, http_client=http) as made,
    ):
        yield made


@asynccontextmanager
async def sdk_of(c: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with httpx.AsyncClient(verify=False) as http, AsyncOpenAI(base_url=c.url + "/v1", api_key="none", http_client=http) as made:
        yield made


def test_chat(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, max_completion_tokens=100, logprobs=True, top_logprobs=2, n=2, user="u", metadata={"a": "b"}, store=False
    )
    answer = strictly(ChatCompletion, raw.text)
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_async_gives_the_request_id(aclient: AsyncOpenAI) -> None:
    answer = await aclient.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, extra_headers={"x-request-id": "mine-1"})
    assert answer._request_id == "mine-1"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert (await aclient.chat.completions.create(model=MODEL, messages=HI, max_tokens=1))._request_id.startswith("req_")  # type: ignore[union-attr]


def test_chat_stream(client: OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=100, stream=True, stream_options={"include_usage": True, "include_obfuscation": True}
    ) as stream:
        chunks = [again_strictly(chunk) for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert [chunk.obfuscation is not None for chunk in chunks if chunk.choices and chunk.choices[0].delta.content] == [True] * len(ANSWER)


async def test_chat_stream_async_by_the_helper(aclient: AsyncOpenAI) -> None:
    async with aclient.chat.completions.stream(model=MODEL, messages=HI, max_completion_tokens=100) as stream:
        kinds = {event.type async for event in stream}
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (await stream.get_final_completion()).choices[0].message.content == ANSWER


def test_completions(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=["hi", "ho"], max_tokens=5, logprobs=2, seed=1, best_of=1)
    answer = strictly(Completion, raw.text)
    assert [choice.text for choice in answer.choices] == [ANSWER[:5]] * 2
    with client.completions.create(model=MODEL, prompt="hi", max_tokens=100, stream=True, echo=True) as stream:
        assert "".join(again_strictly(chunk).choices[0].text for chunk in stream) == "hi" + ANSWER


async def test_completions_async(aclient: AsyncOpenAI) -> None:
    answer = await aclient.completions.create(model=MODEL, prompt=[[10, 11], [12]], max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_responses(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "again"},
        ],
        max_output_tokens=100,
        temperature=0,
        metadata={"topic": "greeting"},
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    answer = strictly(Response, raw.text)
    assert (answer.output_text, answer.status, answer.metadata) == (ANSWER, "completed", {"topic": "greeting"})
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(ANSWER) + 1
    short = client.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert (short.status, short.incomplete_details and short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    again = client.responses.create(model=MODEL, input=[*answer.output, {"role": "user", "content": "and?"}], max_output_tokens=3)
    assert again.output_text == ANSWER[:3]


def test_responses_stream(client: OpenAI) -> None:
    with client.responses.create(model=MODEL, input="hi", max_output_tokens=100, stream=True) as stream:
        events = [again_strictly(event) for event in stream]
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begun = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    ended = ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert (kinds[:4], kinds[-4:], set(kinds[4:-4])) == (begun, ended, {"response.output_text.delta"})
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER


async def test_responses_stream_async_by_the_helper(aclient: AsyncOpenAI) -> None:
    async with aclient.responses.stream(model=MODEL, input="hi", max_output_tokens=100) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (kinds[-1], final.output_text) == ("response.completed", ANSWER)
    async with await aclient.responses.create(model=MODEL, input="hi", max_output_tokens=4, stream=True) as events:
        *_, last = [again_strictly(event) async for event in events]
    assert last.type == "response.incomplete"
    assert last.response.output_text == ANSWER[:4]


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert again_strictly(model).id == MODEL
    strictly(Model, client.models.with_raw_response.retrieve(MODEL).text)


def test_errors_are_of_the_class_and_have_the_fields_that_tell(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert (refused.value.code, refused.value.param, refused.value.type) == ("invalid_value", "temperature", "invalid_request_error")
    assert refused.value.request_id is not None
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: tempo"):
        client.chat.completions.create(model=MODEL, messages=HI, extra_body={"tempo": 1})
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=MODEL, prompt="hi", suffix="ho")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=MODEL, messages=HI, max_tokens=10_000_000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt="hi")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError, match="not stored") as stored:
            client.responses.create(model=MODEL, input="hi", **fields)  # type: ignore[call-overload]
        assert stored.value.param == next(iter(fields))
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="sk-two").models.list()
    assert stranger.value.code == "invalid_api_key"


async def test_a_429_is_asked_again_after_the_time_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    worker = mock_worker(role=Role.BOTH, script=Script(stall_after=1))
    async with cluster(tmp_path, worker, max_open_requests=1) as c, sdk_of(c) as sdk:
        held = await sdk.completions.create(model=MODEL, prompt="hi", stream=True, max_tokens=50)

        async def sleep(seconds: float) -> None:
            waited.append(seconds)
            await held.close()
            await until(lambda: c.services.admission.num_open == 0, "the held request is gone")

        monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
        with pytest.raises(openai.RateLimitError) as refused:
            await sdk.with_options(max_retries=0).completions.create(model=MODEL, prompt="hi", max_tokens=1)
        assert (refused.value.code, refused.value.response.headers["retry-after"]) == ("overloaded", "1")
        answer = await sdk.completions.create(model=MODEL, prompt="hi", max_tokens=1)
    assert answer.choices[0].text == "h"
    assert waited == [1.0]


async def test_a_stream_that_breaks_is_an_error_of_the_sdk(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(fail_after=2, interval_s=0.01))
    async with cluster(tmp_path, worker, max_moves=0) as c, sdk_of(c) as sdk:
        stream = await sdk.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError) as broken:
            [chunk async for chunk in stream]
        assert broken.value.code == "engine_error"
        events = [event async for event in await sdk.responses.create(model=MODEL, input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert again_strictly(events[-1]).response.status == "failed"
