"""Logging and metrics: every metric's name, type, labels, buckets and meaning in one table, and how log lines look.

Each process makes one `Metrics` over its own registry and passes it down. The router observes directly; a rank sends `Sample`s and its
front records them here by name. docs/metrics.md is checked against `METRICS`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pd_serve.errors import PdServeError


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Side(Enum):
    """Which processes export a metric."""

    ROUTER = "router"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    kind: MetricKind
    sides: tuple[Side, ...]
    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds, from one decode step to a long prompt in a queue."""
TRANSFER_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LENGTH_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens."""
RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

_R = (Side.ROUTER,)
_W = (Side.WORKER,)
_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

METRICS: tuple[MetricSpec, ...] = (
    # router
    MetricSpec("pd_serve_requests_total", _C, _R, "Client requests ended, by HTTP status (499: the client went away)", ("code",)),
    MetricSpec("pd_serve_time_to_first_token_seconds", _H, _R, "From a parsed request to its first token", buckets=LATENCY_BUCKETS),
    MetricSpec("pd_serve_inter_token_latency_seconds", _H, _R, "Between two tokens of one choice", buckets=LATENCY_BUCKETS),
    MetricSpec("pd_serve_request_seconds", _H, _R, "From a parsed request to its last token", buckets=LATENCY_BUCKETS),
    MetricSpec(
        "pd_serve_time_per_output_token_seconds",
        _H,
        _R,
        "Mean time between the tokens of one choice, its first left out (TPOT)",
        buckets=LATENCY_BUCKETS,
    ),
    MetricSpec("pd_serve_queue_seconds", _H, _R, "From a parsed request to its first placement on workers", buckets=LATENCY_BUCKETS),
    MetricSpec("pd_serve_request_prompt_tokens", _H, _R, "Prompt lengths of choices that ended", buckets=LENGTH_BUCKETS),
    MetricSpec("pd_serve_request_generated_tokens", _H, _R, "Tokens generated for each choice that ended", buckets=LENGTH_BUCKETS),
    MetricSpec("pd_serve_prompt_tokens_total", _C, _R, "Prompt tokens of accepted requests"),
    MetricSpec("pd_serve_generated_tokens_total", _C, _R, "Tokens generated for clients"),
    MetricSpec("pd_serve_moves_total", _C, _R, "Requests opened again on other workers", ("reason",)),
    MetricSpec("pd_serve_routing_decisions_total", _C, _R, "Workers chosen: kind disaggregated or local, and why", ("kind", "reason")),
    MetricSpec("pd_serve_rejections_total", _C, _R, "Requests turned away before any worker heard of them", ("reason",)),
    MetricSpec("pd_serve_open_requests", _G, _R, "Client requests in progress"),
    MetricSpec("pd_serve_queued_requests", _G, _R, "Choices waiting in the router for workers"),
    MetricSpec("pd_serve_running_requests", _G, _R, "Choices placed on workers"),
    MetricSpec("pd_serve_linked_workers", _G, _R, "Workers with a live link", ("role",)),
    MetricSpec("pd_serve_refused_workers_total", _C, _R, "Workers refused at join as incompatible"),
    MetricSpec(
        "pd_serve_breaker_state",
        _G,
        _R,
        "Circuit breaker of a worker's leg that has failed: 0 closed, 1 half-open, 2 open",
        ("worker", "leg"),
    ),
    MetricSpec(
        "pd_serve_role_switches_total",
        _C,
        _R,
        "Roles changed by this router; reason: admin, or what pressed (queue, ttft, kv, itl)",
        ("from", "to", "reason"),
    ),
    MetricSpec("pd_serve_role_switch_seconds", _H, _R, "From a wanted role to the worker's word that it has it", buckets=LATENCY_BUCKETS),
    MetricSpec("pd_serve_lost_links_total", _C, _R, "Links that ended without the router closing them, or fell silent"),
    MetricSpec("pd_serve_prefix_known_blocks", _G, _R, "Blocks that workers' prefix caches hold, as far as this router knows"),
    MetricSpec("pd_serve_cache_event_gaps_total", _C, _R, "Times that events of a prefix cache were missed, and all of it was asked for"),
    # workers
    MetricSpec("pd_serve_kv_transfer_bytes_total", _C, _W, "KV bytes written to peers and flushed", ("lane",)),
    MetricSpec("pd_serve_kv_transfer_seconds", _H, _W, "From a transfer's first write to its flush", buckets=TRANSFER_BUCKETS),
    MetricSpec("pd_serve_kv_packed_bytes_total", _C, _W, "KV bytes converted for pools of another layout; 0 where all are alike"),
    MetricSpec("pd_serve_kv_pack_seconds", _H, _W, "Time that converting one transfer's KV took", buckets=TRANSFER_BUCKETS),
    MetricSpec(
        "pd_serve_kv_overlap_ratio",
        _H,
        _W,
        "Share of a transfer's bytes whose write had returned before the last layer's compute ended",
        buckets=RATIO_BUCKETS,
    ),
    MetricSpec(
        "pd_serve_handover_seconds",
        _H,
        _W,
        "From the end of prefill compute to the first decode step, the record's flight left out",
        buckets=TRANSFER_BUCKETS,
    ),
    MetricSpec("pd_serve_leases", _G, _W, "Leases by state", ("state",)),
    MetricSpec("pd_serve_blocks", _G, _W, "KV blocks by state", ("state",)),
    MetricSpec("pd_serve_stale_records_total", _C, _W, "Records of dead leases, refused"),
    MetricSpec("pd_serve_refused_writes_total", _C, _W, "Writes that no open window allowed, refused (lanes without one-sided writes)"),
    MetricSpec("pd_serve_malformed_notices_total", _C, _W, "Messages of peers that are no record, dropped"),
    MetricSpec("pd_serve_prefix_cache_hit_tokens_total", _C, _W, "Prompt tokens found in the prefix cache"),
    MetricSpec("pd_serve_computed_tokens_total", _C, _W, "Tokens computed by the engine", ("phase",)),
    MetricSpec(
        "pd_serve_compute_seconds_total",
        _C,
        _W,
        "Time of engine steps and between steps that follow each other at once, by what they computed: prefill, decode, or mixed",
        ("phase",),
    ),
    MetricSpec("pd_serve_preemptions_total", _C, _W, "Sequences given back to their router under memory pressure"),
    MetricSpec("pd_serve_hard_fences_total", _C, _W, "Silent local peers ended to free quarantined blocks"),
    MetricSpec("pd_serve_step_seconds", _H, _W, "Engine steps", buckets=LATENCY_BUCKETS),
    MetricSpec("pd_serve_running_sequences", _G, _W, "Sequences in the batch"),
    MetricSpec("pd_serve_waiting_sequences", _G, _W, "Sequences waiting inside the worker"),
    MetricSpec("pd_serve_prefill_queue_tokens", _G, _W, "Prompt tokens accepted and not yet computed"),
    MetricSpec(
        "pd_serve_joined_peers",
        _G,
        _W,
        "Workers this one can exchange KV with; path of its writes: one_sided or messages",
        ("lane", "path"),
    ),
    MetricSpec("pd_serve_peer_bandwidth_bytes_per_second", _G, _W, "Bandwidth of the probe at join", ("peer", "lane")),
    MetricSpec("pd_serve_links", _G, _W, "Routers linked to this worker"),
)


class UnknownMetricError(PdServeError):
    code = "unknown_metric"


class Histogram(Collector):
    """For what is observed once per token: a bisection and an addition, where prometheus_client's own costs several microseconds."""

    def __init__(self, name: str, doc: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name = name
        self._doc = doc
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def counts_up_to(self, value: float) -> tuple[int, int]:
        """(observed values of at most `value`, rounded up to a bucket's bound; all)."""
        return sum(self._counts[: bisect_left(self._buckets, value) + 1]), sum(self._counts)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        bounds = (*map(floatToGoString, self._buckets), "+Inf")
        yield HistogramMetricFamily(self._name, self._doc, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return self.collect()


class Metrics:
    """Every metric of one process. Owned by the process's main thread, which alone may record.

    side None creates all of `METRICS`. Recording one that is not in the table raises UnknownMetricError.
    """

    def __init__(self, registry: CollectorRegistry, side: Side | None = None) -> None:
        self.registry = registry
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._recorders: dict[tuple[str, ...], Callable[[float], None]] = {}
        for spec in METRICS:
            if side is not None and side not in spec.sides:
                continue
            metric = _create(spec, registry)
            self._metrics[spec.name] = metric
            if not spec.labels:
                self._recorders[(spec.name,)] = _recorder(metric)

    def record(self, name: str, value: float, *labels: str) -> None:
        """Increment a counter by value, set a gauge to it, or observe it in a histogram. An empty label counts as absent."""
        recorder = self._recorders.get((name, *labels))
        if recorder is None:
            recorder = self._new_recorder(name, labels)
        recorder(value)

    def count(self, name: str, *labels: str) -> None:
        self.record(name, 1.0, *labels)

    def histogram(self, name: str) -> Histogram:
        """A histogram itself, for hot paths."""
        metric = self._metrics.get(name)
        if not isinstance(metric, Histogram):
            raise UnknownMetricError(f"no histogram {name!r}")
        return metric

    def clear(self, name: str) -> None:
        """Forget every labelled child of a gauge, before it is set anew."""
        metric = self._metrics.get(name)
        if not isinstance(metric, Gauge):
            raise UnknownMetricError(f"no gauge {name!r}")
        metric.clear()
        self._recorders = {key: recorder for key, recorder in self._recorders.items() if key[0] != name or len(key) == 1}

    def _new_recorder(self, name: str, labels: tuple[str, ...]) -> Callable[[float], None]:
        if labels == ("",) and (name,) in self._recorders:
            return self._recorders[(name,)]
        metric = self._metrics.get(name)
        if metric is None:
            raise UnknownMetricError(f"unknown metric {name!r}")
        if isinstance(metric, Histogram):
            raise UnknownMetricError(f"{name} has no labels")
        try:
            recorder = _recorder(metric.labels(*labels))
        except ValueError as error:
            raise UnknownMetricError(f"{name}: {error}") from error
        self._recorders[(name, *labels)] = recorder
        return recorder


def _recorder(metric: Counter | Gauge | Histogram) -> Callable[[float], None]:
    if isinstance(metric, Histogram):
        return metric.observe
    if isinstance(metric, Gauge):
        return metric.set
    return metric.inc


def _create(spec: MetricSpec, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if spec.kind is MetricKind.HISTOGRAM:
        assert not spec.labels, "histograms have no labels"
        return Histogram(spec.name, spec.doc, spec.buckets, registry)
    if spec.kind is MetricKind.GAUGE:
        return Gauge(spec.name, spec.doc, spec.labels, registry=registry)
    return Counter(spec.name, spec.doc, spec.labels, registry=registry)


def setup_logging(level: str, log_format: str, process: str, secrets: Iterable[str] = ()) -> None:
    """Send all log lines to stderr, in `text` or `json`, with the given secrets blotted out. Call once, at process start."""
    handler = logging.StreamHandler(sys.stderr)
    formatter: logging.Formatter = _JsonFormatter(process) if log_format == "json" else _TextFormatter(process)
    handler.setFormatter(_Redacting(formatter, tuple(secret for secret in secrets if secret)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "websockets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


ID_FIELDS = ("request_id", "response_id", "attempt_id", "choice")
"""What a JSON log line about a request names it by, as far as is known; attempt_id as a string: it exceeds JSON's exact numbers."""


def about(request_id: str = "", response_id: str = "", attempt_id: int = 0, choice: int = 0) -> dict[str, str | int]:
    """For `extra` of a log call: of which request the line tells. What is empty or 0 is not known."""
    given: dict[str, str | int] = {"request_id": request_id, "response_id": response_id, "choice": choice}
    given["attempt_id"] = str(attempt_id) if attempt_id else ""
    return {name: value for name, value in given.items() if value}


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process.replace('%', '%%')} %(name)s: %(message)s", "%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in ID_FIELDS if name in record.__dict__}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Redacting(logging.Formatter):
    """Wraps a formatter; a secret never leaves the process in a log line, whoever logged it."""

    def __init__(self, inner: logging.Formatter, secrets: tuple[str, ...]) -> None:
        super().__init__()
        self._inner = inner
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        line = self._inner.format(record)
        for secret in self._secrets:
            line = line.replace(secret, "[secret]")
        return line
