"""What follows the end of every choice: metrics, a log line and traces, as far as they are asked for. Set up once per router process."""

from __future__ import annotations

from functools import partial

from pd_serve.config import ObserveConfig
from router.request_metrics import RequestMetrics
from router.services import Services
from router.tracing import Tracing
from router.worker_traces import noted_by


def check_observing(observe: ObserveConfig) -> None:
    """Before anything listens. Raises ConfigError where traces are asked for and cannot be had."""
    if observe.otlp_endpoint:
        from router.otel import check_endpoint

        check_endpoint(observe.otlp_endpoint)


def start_observing(services: Services) -> Tracing | None:
    """Within the event loop; close() what is returned. Precondition: check_observing."""
    observe = services.config.observe
    tracing = None
    if observe.otlp_endpoint:
        from router.otel import RequestSpans, otlp_processor

        spans = RequestSpans(otlp_processor(observe.otlp_endpoint), services.router_id, services.model_name, observe.trace_sample_ratio)
        tracing = Tracing(spans, partial(noted_by, services))
    follow = RequestMetrics(services.metrics, observe.log_requests, None if tracing is None else tracing.ended)
    services.dispatcher.timeline.on_end = follow.ended
    return tracing
