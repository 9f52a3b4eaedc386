"""Calls of tools and reasoning through a router, as the openai library asks for them and reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from pd_serve.protocol.link import Open, Role
from pd_serve.protocol.openai_responses import ChatChunk, ChatCompletion
from tests.fakes import CHAT_TEMPLATE, byte_ids
from tests.fakes_worker import Script, mock_worker
from tests.unit.router.cluster import Cluster, cluster, events_of
from tests.unit.router.tools.answers import RECORDED
from tests.unit.router.tools.test_prompts import CALL, CONVERSATION, FUNCTION, WEATHER

THINKING = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n{{ '<think>\n' if think else '' }}{%") + "{# </think> #}"
CALLED = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
PARALLEL = RECORDED["Qwen 2.5"].text
ADD = {"type": "function", "function": {"name": "get_current_temperature"}}


@asynccontextmanager
async def answering(tmp_path: Path, text: str, template: str = CHAT_TEMPLATE, eos_after: bool = True) -> AsyncIterator[Cluster]:
    script = Script(reply=lambda prompt: byte_ids(text), eos_after=eos_after)
    async with cluster(tmp_path, mock_worker(role=Role.BOTH, script=script), template=template) as made:
        yield made


@asynccontextmanager
async def client_of(c: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx.AsyncClient() as http:
        yield openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="none", http_client=http, max_retries=0)


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "tools": [WEATHER, ADD], **more}


async def streamed(c: Cluster, **more: Any) -> list[ChatChunk]:
    *events, done = events_of((await c.chat(**fields(stream=True, stream_options={"include_usage": True}, **more))).text)
    assert done == "[DONE]"
    return [ChatChunk.model_validate(event) for event in events]


async def whole(c: Cluster, **more: Any) -> ChatCompletion:
    return ChatCompletion.model_validate_json((await c.chat(**fields(**more))).content)


def put_together(chunks: list[ChatChunk]) -> dict[str, object]:
    told: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        told["content"] += choice.delta.content or ""
        told["reasoning"] += choice.delta.reasoning_content or ""
        told["finish"] = choice.finish_reason or told["finish"]
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(told["calls"])
                told["calls"][call.index] = [call.function.name, ""]
            told["calls"][call.index][1] += call.function.arguments
    return told | {"calls": [tuple(call) for call in told["calls"].values()]}


def as_told(answer: ChatCompletion) -> dict[str, object]:
    choice = answer.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return {
        "content": choice.message.content or "",
        "reasoning": choice.message.reasoning_content or "",
        "calls": calls,
        "finish": choice.finish_reason,
    }


async def test_parallel_calls_as_the_library_reads_them(tmp_path: Path) -> None:
    async with answering(tmp_path, "Let me see.\n" + PARALLEL) as c, client_of(c) as client:
        answer = await client.chat.completions.create(**fields())
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        assert [call.type for call in message.tool_calls] == ["function", "function"]
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == list(RECORDED["Qwen 2.5"].calls)
        assert len({call.id for call in message.tool_calls}) == 2
        again = await client.chat.completions.create(
            **fields(
                messages=[
                    {"role": "user", "content": "hi"},
                    message,
                    {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20"},
                ]
            )
        )
        assert again.choices[0].finish_reason == "tool_calls"
        stream = await client.chat.completions.create(**fields(stream=True))
        deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        firsts = [call for call in calls if call.id is not None]
        assert [(call.index, call.type, call.function.name, call.function.arguments) for call in firsts] == [
            (0, "function", "get_current_temperature", ""),
            (1, "function", "get_weather", ""),
        ]
        for index, (_, arguments) in enumerate(RECORDED["Qwen 2.5"].calls):
            pieces = [call.function.arguments for call in calls if call.index == index and call.id is None]
            assert "".join(pieces) == arguments
            assert len(pieces) > 5
        assert all(call.function.name is None and call.type is None for call in calls if call.id is None)


async def test_the_librarys_own_stream_and_its_parsing(tmp_path: Path) -> None:
    class get_weather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(get_weather)
    async with (
        answering(tmp_path, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>') as c,
        client_of(c) as client,
    ):
        kinds: list[str] = []
        async with client.chat.completions.stream(**fields(tools=[tool])) as stream:
            async for event in stream:
                kinds.append(event.type)
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.delta") >= len('{"city": "Paris"}')
        assert kinds.count("tool_calls.function.arguments.done") == 1
        assert "content.delta" not in kinds
        call = final.choices[0].message.tool_calls[0].function  # type: ignore[index]
        assert call.parsed_arguments == get_weather(city="Paris")
        parsed = await client.chat.completions.parse(**fields(tools=[tool]))
        assert parsed.choices[0].message.content is None
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == get_weather(city="Paris")  # type: ignore[index]
        again = fields(
            messages=[
                {"role": "user", "content": "hi"},
                final.choices[0].message.model_dump(),
                {"role": "tool", "tool_call_id": "x", "content": "y"},
            ]
        )
        assert (await client.chat.completions.create(**again)).choices[0].message.tool_calls


ANSWERS = {
    "calls": PARALLEL,
    "text only": "Just text, a < b. ",
    "no call": '<tool_call>{"name": }</tool_call> text',
    "thoughts": "<think>\nHm, é.\n</think>\n\nYes.",
    "thoughts and a call": "<think>Look.</think>\n" + PARALLEL,
}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS.keys())
async def test_streams_tell_the_same_as_whole_answers(tmp_path: Path, text: str) -> None:
    async with answering(tmp_path, text, THINKING) as c:
        for more in ({}, {"max_tokens": 40}, {"stop": ["location", "text"]}, {"n": 1, "logprobs": True}, {"parallel_tool_calls": False}):
            answer, chunks = await whole(c, **more), await streamed(c, **more)
            assert put_together(chunks) == as_told(answer), more
            assert chunks[-1].usage == answer.usage
            logprobs = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
            assert len(logprobs) == (len(answer.choices[0].logprobs.content) if answer.choices[0].logprobs else 0)
            assert bool(logprobs) == ("logprobs" in more)


async def test_an_answer_that_is_cut_says_length_and_keeps_what_there_is(tmp_path: Path) -> None:
    async with answering(tmp_path, PARALLEL) as c:
        answer = as_told(await whole(c, max_tokens=100))
        assert answer["finish"] == "length"
        assert answer["calls"] == [("get_current_temperature", '{"location": "San Franci')] or answer["calls"]
        assert as_told(await whole(c, max_tokens=20)) == {"content": PARALLEL[:20], "reasoning": "", "calls": [], "finish": "length"}


async def test_one_call_at_a_time_ends_with_it(tmp_path: Path) -> None:
    """The model would go on for ever."""
    async with answering(tmp_path, PARALLEL, eos_after=False) as c:
        answer = await whole(c, parallel_tool_calls=False, max_tokens=700)
        assert as_told(answer)["calls"] == list(RECORDED["Qwen 2.5"].calls[:1])
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.completion_tokens == PARALLEL.index("}}") + 2


async def test_reasoning_is_told_apart_and_counted(tmp_path: Path) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    async with answering(tmp_path, text, THINKING) as c, client_of(c) as client:
        answer = await whole(c, tools=None)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content, message.tool_calls) == ("Hm.", "Yes.", None)
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nHm.\n</think>") - len("<think")
        from_library = await client.chat.completions.create(**fields(tools=openai.NOT_GIVEN))
        assert from_library.usage is not None
        assert from_library.usage.completion_tokens_details is not None
        assert from_library.choices[0].message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        response = await client.responses.create(model="tiny", input="hi")
        assert response.output_text == "Yes."
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == answer.usage.completion_tokens_details.reasoning_tokens
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        assert "".join([event.delta async for event in stream if event.type == "response.output_text.delta"]) == "Yes."
    async with answering(tmp_path / "open", "Hm.</think>Yes.", THINKING) as c:
        told = put_together(await streamed(c, tools=None, chat_template_kwargs={"think": True}))
        assert told == {"content": "Yes.", "reasoning": "Hm.", "calls": [], "finish": "stop"}
        assert as_told(await whole(c, tools=None))["content"] == "Hm.</think>Yes."


async def test_without_tools_and_reasoning_nothing_is_told_apart(tmp_path: Path) -> None:
    text = "<think>x</think>" + PARALLEL
    async with answering(tmp_path, text) as c:
        for more in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
            answer = await c.chat(**fields(**more))
            assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
            assert "completion_tokens_details" not in answer.json()["usage"]


async def test_the_prompt_tells_of_tools_only_where_they_may_be_called(tmp_path: Path) -> None:
    seen: list[str] = []

    def reply(prompt: tuple[int, ...]) -> tuple[int, ...]:
        return byte_ids("ok")

    worker = mock_worker(role=Role.BOTH, script=Script(reply=reply))
    async with cluster(tmp_path, worker) as c:
        for more in ({}, {"tool_choice": "none"}, {"messages": list(CONVERSATION)}):
            assert (await c.chat(**fields(**more))).status_code == 200
        seen = [c.services.codec.decode(frame.token_ids) for frame in worker.of(Open) if isinstance(frame, Open)]
    assert ["# Tools" in prompt for prompt in seen] == [True, False, True]
    assert json.dumps({"city": "Paris"}) in seen[2]


def with_function(**changes: object) -> dict[str, object]:
    return {"type": "function", "function": {**FUNCTION, **changes}}


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [with_function(name="not a name")]}, "tools[0].function.name"),
    ({"tools": [with_function(parameters="x")]}, "tools[0].function.parameters"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [with_function(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({"tools": [with_function(parameters={"properties": {"a": {"type": "what"}}})], "tool_choice": "required"}, "tools"),
    ({"tools": [with_function(name=f"f{number}") for number in range(129)]}, "tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"function_call": {"name": "x"}}, "function_call"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": None, "tool_calls": [CALL]}]}, "messages[1].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "type": "function"}]}]}, "messages[0].tool_calls[0].function"),
]


async def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    async with answering(tmp_path, "x") as c:
        for more, param in REFUSED:
            reply = await c.chat(**fields(**more))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    async with answering(tmp_path / "unknown", "x", "{{ tools }}" + CHAT_TEMPLATE) as c:
        reply = await c.chat(**fields())
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
        assert "model.tool_parser" in reply.text


async def test_calls_that_are_asked_for_are_made_by_a_grammar(tmp_path: Path) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    cases: list[tuple[object, str, list[tuple[str, str]]]] = [
        (named, '{"city": "Paris"}', [("get_weather", '{"city": "Paris"}')]),
        ("required", f"[{CALLED}, {CALLED}]", [("get_weather", '{"city": "Rome"}')] * 2),
    ]
    for number, (choice, text, calls) in enumerate(cases):
        worker = mock_worker(role=Role.BOTH, script=Script(reply=lambda prompt, text=text: byte_ids(text)))
        async with cluster(tmp_path / str(number), worker, template="{{ tools }}" + THINKING) as c:
            answer = as_told(await whole(c, tool_choice=choice))
            assert answer == {"content": "", "reasoning": "", "calls": calls, "finish": "tool_calls"}
            assert put_together(await streamed(c, tool_choice=choice)) == answer
            grammars = {frame.sampling.grammar for frame in worker.of(Open) if isinstance(frame, Open)}
        assert len(grammars) == 1
        assert None not in grammars


async def test_each_choice_is_read_by_itself(tmp_path: Path) -> None:
    async with answering(tmp_path, PARALLEL) as c:
        answer = await whole(c, n=2)
        ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
        assert len(set(ids)) == 4
        chunks = await streamed(c, n=2)
        for index in (0, 1):
            mine = [chunk.model_copy(update={"choices": tuple(one for one in chunk.choices if one.index == index)}) for chunk in chunks]
            assert put_together(mine)["calls"] == list(RECORDED["Qwen 2.5"].calls)
