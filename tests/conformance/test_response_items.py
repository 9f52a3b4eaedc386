"""Calls of functions and reasoning as items of a response, read by the openai SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.responses import Response

from pd_serve.protocol.link import Open, Role
from tests.conformance.shapes import again_strictly, strictly
from tests.fakes import CHAT_TEMPLATE, byte_ids
from tests.fakes_worker import MockWorker, Script, mock_worker
from tests.unit.router.cluster import MODEL, cluster

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    "strict": True,
}
ARGUMENTS = '{"city": "Rome"}'
CALLED = f'Let me see. <tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nIt is summer.\n</think>\n\nSunny."
THINKING = CHAT_TEMPLATE + "{# </think> #}"


@asynccontextmanager
async def answering(tmp_path: Path, text: str, template: str = CHAT_TEMPLATE) -> AsyncIterator[tuple[AsyncOpenAI, MockWorker]]:
    worker = mock_worker(role=Role.BOTH, script=Script(reply=lambda prompt: byte_ids(text)))
    async with cluster(tmp_path, worker, template=template) as c, httpx.AsyncClient(verify=False) as http:
        yield AsyncOpenAI(base_url=c.url + "/v1", api_key="none", http_client=http, max_retries=0), worker


async def test_a_call_is_an_item_whose_result_can_be_sent_back(tmp_path: Path) -> None:
    async with answering(tmp_path, CALLED) as (sdk, worker):
        asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "max_output_tokens": 500}
        answer = strictly(Response, (await sdk.responses.with_raw_response.create(input="hi", **asked)).text)
        message, call = answer.output
        assert (answer.status, message.type, answer.output_text.strip()) == ("completed", "message", "Let me see.")
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "29 degrees"}
        await sdk.responses.create(input=[{"role": "user", "content": "hi"}, *answer.output, result], **asked)  # type: ignore[list-item]
        prompts = [bytes(token - 4 for token in frame.token_ids if token >= 4) for frame in worker.of(Open) if isinstance(frame, Open)]
    assert b"29 degrees" in prompts[1]
    assert b"29 degrees" not in prompts[0]


async def test_a_call_is_streamed_as_its_arguments_come(tmp_path: Path) -> None:
    async with answering(tmp_path, CALLED) as (sdk, _), sdk.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[4:] == [
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta") == ARGUMENTS
    assert [item.type for item in final.output] == ["message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_before_the_message(tmp_path: Path, stream: bool) -> None:
    async with answering(tmp_path, THOUGHT, THINKING) as (sdk, _):
        asked: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 500}
        if stream:
            async with await sdk.responses.create(stream=True, **asked) as events:
                *_, last = [again_strictly(event) async for event in events]
            assert last.type == "response.completed"
            answer = last.response
        else:
            answer = strictly(Response, (await sdk.responses.with_raw_response.create(**asked)).text)
        reasoning, message = answer.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert (reasoning.content[0].text.strip(), message.type, answer.output_text.strip()) == ("It is summer.", "message", "Sunny.")
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        again = await sdk.responses.create(model=MODEL, input=[*answer.output, {"role": "user", "content": "and?"}])  # type: ignore[list-item]
        assert again.status == "completed"


async def test_what_is_wrong_with_tools_is_told_in_the_words_of_this_endpoint(tmp_path: Path) -> None:
    async with answering(tmp_path, "x") as (sdk, _):
        for fields, param in (
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await sdk.responses.create(**({"model": MODEL, "input": "hi"} | fields))  # type: ignore[call-overload]
            assert refused.value.param == param
