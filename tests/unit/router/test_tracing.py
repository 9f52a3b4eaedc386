"""One trace per request for OpenTelemetry, and nothing of it unless it is asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import pytest

from pd_serve.config import ObserveConfig
from pd_serve.errors import ConfigError
from pd_serve.protocol.link import Role
from router.observing import check_observing
from router.tracing import Tracing
from router.waterfall import Noted
from router.worker_traces import noted_by
from tests.fakes_traces import LAYER_NBYTES, NUM_LAYERS, told_by
from tests.fakes_worker import Board, MockWorker, Script, mock_worker
from tests.unit.router.cluster import Cluster, cluster, completion_body

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
ROOT = Path(__file__).resolve().parents[3]
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def pair(fail_after: int = -1) -> tuple[MockWorker, MockWorker]:
    board = Board()
    prefill = mock_worker("prefill-0", Role.PREFILL, board=board)
    decode = mock_worker("decode-0", Role.DECODE, script=Script(fail_after=fail_after), board=board)
    for worker in (prefill, decode):
        worker.traces = told_by
    return prefill, decode


async def spans_of(c: Cluster, headers: Mapping[str, str | bytes], sample_ratio: float = 1.0) -> list[sdk.ReadableSpan]:
    """Of one request of five tokens."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from router.otel import RequestSpans

    exporter = InMemorySpanExporter()
    services = c.services
    spans = RequestSpans(SimpleSpanProcessor(exporter), services.router_id, services.model_name, sample_ratio)
    tracing = Tracing(spans, partial(noted_by, services))
    services.dispatcher.timeline.on_end = tracing.ended
    await c.http.post("/v1/completions", json=completion_body(max_tokens=5, ignore_eos=True), headers=dict(headers))
    await tracing.close()
    return list(exporter.get_finished_spans())


async def test_router_prefill_every_push_and_decode_are_in_the_client_s_trace(tmp_path: Path) -> None:
    async with cluster(tmp_path, *pair()) as c:
        spans = await spans_of(c, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"})
    by_name = {span.name: span for span in spans}
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE_ID}
    tree = {
        "attempt": "request",
        "router": "attempt",
        "router queue": "router",
        "router reserve": "router",
        "prefill": "attempt",
        "prefill queue": "prefill",
        "prefill compute": "prefill",
        "prefill push": "prefill",
        "decode": "attempt",
        "decode reserve": "decode",
        "decode first step": "decode",
        "decode tokens": "decode",
    }
    for name, parent in tree.items():
        assert by_name[name].parent.span_id == by_name[parent].context.span_id, name
    root = by_name["request"]
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.attributes["pd_serve.request_id"] == "mine"
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    pushes = by_name["prefill push"].events
    assert [(event.attributes["layer"], event.attributes["bytes"]) for event in pushes] == [(n, LAYER_NBYTES) for n in range(NUM_LAYERS)]
    assert all(span.start_time <= span.end_time for span in spans)
    assert by_name["prefill compute"].end_time - by_name["prefill compute"].start_time == pytest.approx(6e6, abs=2e3)


async def test_a_request_that_failed_is_an_error_and_one_without_a_parent_begins_a_trace(tmp_path: Path) -> None:
    async with cluster(tmp_path, *pair(fail_after=2), max_moves=0) as c:
        spans = await spans_of(c, {})
    (root,) = [span for span in spans if span.name == "request"]
    assert root.parent is None
    assert root.status.status_code.name == "ERROR"


@pytest.mark.parametrize(
    ("traceparent", "sample_ratio"), [(f"00-{TRACE_ID}-{PARENT_ID}-00", 1.0), ("", 0.0)], ids=["by its client", "by the ratio"]
)
async def test_what_is_not_sampled_makes_no_spans(tmp_path: Path, traceparent: str, sample_ratio: float) -> None:
    async with cluster(tmp_path, *pair()) as c:
        assert await spans_of(c, {"traceparent": traceparent} if traceparent else {}, sample_ratio) == []


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-00", "\u00e9" * 40], ids=["words", "short", "latin"])
async def test_a_bad_traceparent_is_none(tmp_path: Path, traceparent: str) -> None:
    async with cluster(tmp_path, *pair()) as c:
        spans = await spans_of(c, {"traceparent": traceparent.encode("latin-1")})
    assert [span.parent for span in spans if span.name == "request"] == [None]


async def test_trouble_with_one_batch_does_not_end_tracing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[frozenset[str]] = []

    async def broken(names: Iterable[str]) -> Mapping[str, Noted]:
        asked.append(frozenset(names))
        raise OSError("planted")

    async with cluster(tmp_path, *pair()) as c:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from router.otel import RequestSpans
        from tests.unit.router.cluster import until

        tracing = Tracing(RequestSpans(SimpleSpanProcessor(InMemorySpanExporter()), "r", "m", 1.0), broken, collect_s=0.0)
        c.services.dispatcher.timeline.on_end = tracing.ended
        for count in (1, 2):
            await c.http.post("/v1/completions", json=completion_body())
            await until(lambda count=count: len(asked) == count, "asked")
        await tracing.close()
    assert "planted" in caplog.text


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    check_observing(ObserveConfig(otlp_endpoint="http://127.0.0.1:4318"))
    with pytest.raises(ConfigError, match="http"):
        check_observing(ObserveConfig(otlp_endpoint="127.0.0.1:4318"))


def test_nothing_of_it_is_imported_unless_asked_for() -> None:
    """tests/test_floors.py keeps the library in router/otel.py; nobody imports that as a module is loaded."""
    for path in (ROOT / "router").rglob("*.py"):
        top_level = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "router.otel" not in {getattr(node, "module", "") for node in top_level}, path.name
