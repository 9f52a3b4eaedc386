"""Spans for OpenTelemetry, of requests that have ended: the extra `otel`, imported when `observe.otlp_endpoint` is set and not otherwise.

    request                                    of the client's trace where it gave a traceparent
      attempt                                  one for each placement
        router      queue, reserve
        prefill     queue, compute, push       push has an event for each layer of each chunk
        decode      reserve, wait for KV, join, first step, tokens

All spans of a request are made by the router, at its end, and placed on its clock (router/waterfall.py): workers carry no context, and the
monotonic clocks of several hosts do not compare. Sources: https://www.w3.org/TR/trace-context/ and OpenTelemetry's conventions for
generative AI (gen_ai.*).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from pd_serve import __version__
from pd_serve.errors import ConfigError
from pd_serve.protocol.overview import AttemptWaterfall, Place, Span, Waterfall

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(f"observe.otlp_endpoint needs the extra `otel` (pip install 'pd-serve[otel]'): {error}") from error

MAX_EVENTS = 8192
"""Of one span: layers times chunks."""
_WELL = frozenset({"stop", "length", "cancelled", "tool_calls"})
_TRACES_PATH = "/v1/traces"


class EndedRequest(NamedTuple):
    waterfall: Waterfall
    traceparent: str
    received_s: float
    """When its HTTP request began to come in; not positive."""
    arrived_at_ns: int
    """Since the epoch."""
    output_tokens: int


class RequestSpans:
    """emit() for each request, close() at the end. Exporting is the processor's, in a thread of its own."""

    def __init__(self, processor: SpanProcessor, router_id: str, model: str, sample_ratio: float) -> None:
        names = {"service.name": "pd-serve-router", "service.version": __version__, "service.instance.id": router_id}
        self._provider = TracerProvider(
            resource=Resource.create(names),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            span_limits=SpanLimits(max_events=MAX_EVENTS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pd_serve.router", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def emit(self, request: EndedRequest) -> None:
        told = request.waterfall
        parent = self._propagator.extract({"traceparent": request.traceparent}, Context()) if request.traceparent else Context()
        attributes: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": told.prompt_tokens,
            "gen_ai.usage.output_tokens": request.output_tokens,
            "gen_ai.response.id": told.response_id,
            "gen_ai.response.finish_reasons": (told.outcome,),
            "pd_serve.request_id": told.request_id,
            "pd_serve.choice": told.choice,
        }
        start, end = self._at(request, request.received_s), self._at(request, told.ended_s or 0.0)
        root = self._tracer.start_span("request", parent, SpanKind.SERVER, attributes, start_time=start)
        if root.is_recording():
            inside = set_span_in_context(root, Context())
            for attempt in told.attempts:
                self._attempt(request, attempt, inside)
            if told.outcome not in _WELL:
                root.set_status(Status(StatusCode.ERROR, told.outcome))
        root.end(end)

    def close(self) -> None:
        """Sends what is left. Blocks for at most some seconds."""
        self._provider.shutdown()

    def _attempt(self, request: EndedRequest, attempt: AttemptWaterfall, parent: Context) -> None:
        if not attempt.spans:
            return
        attributes: dict[str, str | float] = {"pd_serve.attempt_id": attempt.attempt_id, "pd_serve.decode": attempt.decode}
        if attempt.prefill is not None:
            attributes["pd_serve.prefill"] = attempt.prefill
        if attempt.left_because:
            attributes["pd_serve.left_because"] = attempt.left_because
        for leg in attempt.legs:
            if leg.uncertainty_s is not None:
                attributes[f"pd_serve.clock_uncertainty_s.{leg.worker}"] = leg.uncertainty_s
        with self._around(request, "attempt", attempt.spans, parent, attributes) as made:
            inside = set_span_in_context(made, Context())
            self._place(request, "router", attempt.spans, inside)
            for span, within in self._place(request, "prefill", attempt.spans, inside, ("prefill", "transfer")):
                if span.place == "transfer":
                    self._push(request, attempt, span, within)
            self._place(request, "decode", attempt.spans, inside)

    def _place(
        self, request: EndedRequest, name: str, spans: Sequence[Span], parent: Context, places: tuple[Place, ...] = ()
    ) -> list[tuple[Span, OtelSpan]]:
        """A span around those of one place, and each of them."""
        here = [span for span in spans if span.place in (places or (name,))]
        made: list[tuple[Span, OtelSpan]] = []
        if here:
            with self._around(request, name, here, parent) as around:
                inside = set_span_in_context(around, Context())
                for span in here:
                    one = self._tracer.start_span(f"{name} {span.name}", inside, start_time=self._at(request, span.begin_s))
                    made.append((span, one))
                    if span.place != "transfer":
                        one.end(self._at(request, span.end_s))
        return made

    def _push(self, request: EndedRequest, attempt: AttemptWaterfall, span: Span, made: OtelSpan) -> None:
        made.set_attributes({"pd_serve.lane": attempt.lane, "pd_serve.kv_bytes": attempt.kv_nbytes})
        if attempt.overlap_ratio is not None:
            made.set_attribute("pd_serve.overlap_ratio", attempt.overlap_ratio)
        for layer in attempt.layers:
            told = {"layer": layer.layer, "chunk": layer.chunk, "bytes": layer.nbytes, "seconds": layer.push_end_s - layer.push_begin_s}
            made.add_event("layer pushed", told, self._at(request, layer.push_end_s))
        made.end(self._at(request, span.end_s))

    @contextmanager
    def _around(
        self, request: EndedRequest, name: str, within: Sequence[Span], parent: Context, attributes: Mapping[str, str | float] | None = None
    ) -> Iterator[OtelSpan]:
        """A span from the first begin to the last end of those within."""
        begin = self._at(request, min(span.begin_s for span in within))
        made = self._tracer.start_span(name, parent, attributes=attributes, start_time=begin)
        yield made
        made.end(self._at(request, max(span.end_s for span in within)))

    @staticmethod
    def _at(request: EndedRequest, seconds: float) -> int:
        return request.arrived_at_ns + round(seconds * 1e9)


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"observe.otlp_endpoint must be an http(s) address, not {endpoint!r}")


def otlp_processor(endpoint: str) -> SpanProcessor:
    """To a collector's OTLP over HTTP: `endpoint` is its address, or the whole URL of its traces. Raises ConfigError."""
    check_endpoint(endpoint)
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
