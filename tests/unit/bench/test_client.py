"""The client against a server that behaves, and against some that do not: always a record, with its error."""

from __future__ import annotations

import time

import pytest

from pd_serve.bench.client import Endpoint, RequestStyle
from pd_serve.bench.errors import BenchError
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.runner import closed_loop, open_loop
from tests.ports import free_port
from tests.unit.bench.openai_stub import MODEL, Stub, serving

PLAN = RequestPlan(3, "request", 0.0, (5, 6, 7), 4)


async def one(stub: Stub, plan: RequestPlan = PLAN, style: RequestStyle | None = None) -> RequestRecord:
    with serving(stub):
        async with Endpoint(stub.url, api_key="sesame", timeout_s=5, style=style or RequestStyle()) as endpoint:
            return await endpoint.stream(plan, time.monotonic())


async def test_every_token_has_a_time_even_without_text() -> None:
    stub = Stub(num_cached=2)
    record = await one(stub)
    assert (record.index, record.status, record.error, record.finish_reason) == (3, 200, "", "length")
    assert len(record.token_s) == record.num_output_tokens == 4
    assert record.sent_s <= record.token_s[0] <= record.token_s[-1]
    assert record.num_cached_tokens == 2
    assert stub.bodies[0]["prompt"] == [5, 6, 7]
    assert stub.bodies[0]["model"] == MODEL
    assert stub.bodies[0]["ignore_eos"] is True
    assert set(stub.keys) == {"bearer sesame"}


async def test_chat_sends_text_as_one_message() -> None:
    stub = Stub()
    record = await one(stub, RequestPlan(0, "request", 0.0, "hello", 3), RequestStyle(chat=True, every_token=False))
    assert len(record.token_s) == 3
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert "logprobs" not in stub.bodies[0]


async def test_a_server_that_does_not_say_is_counted_by_arrivals() -> None:
    record = await one(Stub())
    assert record.num_cached_tokens == -1


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_error_status_is_a_record(status: int) -> None:
    record = await one(Stub(status=status, error="not now"))
    assert (record.status, record.error, record.token_s) == (status, "not now", ())


async def test_a_cut_stream_keeps_what_came() -> None:
    record = await one(Stub(cut_after=2))
    assert len(record.token_s) == 2
    assert not record.ok
    assert record.status == 200


async def test_an_error_event_is_told() -> None:
    record = await one(Stub(error_after=1))
    assert (len(record.token_s), record.error) == (1, "the worker was lost")


async def test_an_answer_that_is_no_stream_is_told() -> None:
    record = await one(Stub(content_type="text/html"))
    assert "event stream" in record.error


async def test_an_extension_that_is_refused_is_not_sent_again() -> None:
    stub = Stub(refused_field="ignore_eos")
    with serving(stub):
        async with Endpoint(stub.url) as endpoint:
            records = await closed_loop(endpoint, [PLAN, RequestPlan(4, "request", 0.0, "x", 2)], 1)
    assert [record.ok for record in records] == [True, True]
    assert ["ignore_eos" in body for body in stub.bodies] == [True, False, False]


async def test_a_server_that_ends_is_a_record_and_one_that_is_not_there_an_error() -> None:
    stub = Stub()
    with serving(stub):
        async with Endpoint(stub.url) as endpoint:
            pass
    async with Endpoint(stub.url, MODEL) as endpoint:
        record = await endpoint.stream(PLAN, time.monotonic())
    assert record.status == 0
    assert record.error
    with pytest.raises(BenchError, match="is it running"):
        await Endpoint(f"http://127.0.0.1:{free_port()}").__aenter__()


async def test_no_model_is_an_error() -> None:
    with serving(Stub(has_models=False)) as stub, pytest.raises(BenchError, match="no model"):
        await Endpoint(stub.url).__aenter__()


async def test_loops_send_every_plan_once_and_tell_of_each() -> None:
    plans = [RequestPlan(index, "request", 0.001 * (9 - index), (index,), 1) for index in range(10)]
    told: list[int] = []
    with serving(Stub()) as stub:
        async with Endpoint(stub.url) as endpoint:
            opened = await open_loop(endpoint, plans, lambda record: told.append(record.index))
            closed = await closed_loop(endpoint, plans, 3, lambda record: told.append(record.index))
    assert [record.index for record in opened] == [record.index for record in closed] == list(range(10))
    assert sorted(told) == sorted([*range(10), *range(10)])
    assert all(record.sent_s >= record.planned_s for record in opened)
    assert len(stub.bodies) == 20
