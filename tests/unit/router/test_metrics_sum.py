"""Metrics of several processes as those of one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pd_serve.observe import Metrics, Side
from router.metrics_sum import summed


def exposition(requests: dict[str, int], gaps: tuple[float, ...] = (), linked: int = 1) -> str:
    metrics = Metrics(CollectorRegistry(), Side.ROUTER)
    for code, count in requests.items():
        metrics.record("pd_serve_requests_total", count, code)
    for gap in gaps:
        metrics.histogram("pd_serve_inter_token_latency_seconds").observe(gap)
    metrics.record("pd_serve_linked_workers", linked, "decode")
    return generate_latest(metrics.registry).decode()


def values(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_and_histograms_add_up_and_series_of_one_process_are_kept() -> None:
    text = summed((exposition({"200": 2}, (0.02,)), exposition({"200": 3, "429": 1}, (0.02, 0.4))))
    found = values(text)
    assert found["pd_serve_requests_total", "200"] == 5
    assert found["pd_serve_requests_total", "429"] == 1
    assert found["pd_serve_inter_token_latency_seconds_count", ""] == 3
    assert found["pd_serve_inter_token_latency_seconds_bucket", "0.02"] == 2
    assert abs(found["pd_serve_inter_token_latency_seconds_sum", ""] - 0.44) < 1e-9
    assert text.count("# TYPE pd_serve_requests_total counter") == 1


def test_what_every_process_sees_alike_is_not_added() -> None:
    assert values(summed((exposition({}, linked=2), exposition({}, linked=3))))["pd_serve_linked_workers", "decode"] == 3


def test_metrics_of_one_process_are_unchanged() -> None:
    text = exposition({"200": 2}, (0.1,))
    assert values(summed((text,))) == values(text)
