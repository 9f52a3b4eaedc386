from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pd_serve.observe import METRICS, Metrics, Side, UnknownMetricError, setup_logging


def test_design_names_are_exported() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    text = generate_latest(registry).decode()
    for name in (
        "pd_serve_kv_transfer_bytes_total",
        "pd_serve_kv_transfer_seconds",
        "pd_serve_kv_overlap_ratio",
        "pd_serve_handover_seconds",
        "pd_serve_time_to_first_token_seconds",
        "pd_serve_inter_token_latency_seconds",
        "pd_serve_leases",
        "pd_serve_blocks",
        "pd_serve_stale_records_total",
        "pd_serve_moves_total",
        "pd_serve_requests_total",
        "pd_serve_prefix_cache_hit_tokens_total",
        "pd_serve_routing_decisions_total",
        "pd_serve_rejections_total",
    ):
        assert f"# TYPE {name} " in text


def test_names_are_unique_and_counters_end_in_total() -> None:
    names = [spec.name for spec in METRICS]
    assert len(set(names)) == len(names)
    assert all(spec.name.endswith("_total") == (spec.kind.value == "counter") for spec in METRICS)


def recorded_names() -> set[str]:
    """Every metric that the code names outside the table."""
    root = Path(__file__).resolve().parents[2]
    names: set[str] = set()
    for package in ("pd_serve", "router", "workers"):
        for path in (root / package).rglob("*.py"):
            if path.name == "observe.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"pd_serve_[a-z_]+", node.value):
                    names.add(node.value)
    return names


def test_every_metric_of_the_table_is_recorded_somewhere_and_every_recorded_one_is_in_the_table() -> None:
    assert recorded_names() == {spec.name for spec in METRICS}


def test_record_counts_sets_and_observes() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.record("pd_serve_kv_transfer_bytes_total", 100, "tcp")
    metrics.record("pd_serve_kv_transfer_bytes_total", 28, "tcp")
    metrics.record("pd_serve_leases", 3, "granted")
    metrics.record("pd_serve_leases", 1, "granted")
    metrics.record("pd_serve_handover_seconds", 0.02, "")
    assert registry.get_sample_value("pd_serve_kv_transfer_bytes_total", {"lane": "tcp"}) == 128
    assert registry.get_sample_value("pd_serve_leases", {"state": "granted"}) == 1
    assert registry.get_sample_value("pd_serve_handover_seconds_count") == 1


def test_clear_forgets_labelled_children() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.record("pd_serve_joined_peers", 2, "tcp", "messages")
    metrics.clear("pd_serve_joined_peers")
    assert registry.get_sample_value("pd_serve_joined_peers", {"lane": "tcp", "path": "messages"}) is None
    metrics.record("pd_serve_joined_peers", 1, "tcp", "messages")
    assert registry.get_sample_value("pd_serve_joined_peers", {"lane": "tcp", "path": "messages"}) == 1


def test_unknown_metric_and_wrong_labels_are_refused() -> None:
    metrics = Metrics(CollectorRegistry(), Side.ROUTER)
    with pytest.raises(UnknownMetricError):
        metrics.count("pd_serve_nothing_total")
    with pytest.raises(UnknownMetricError):
        metrics.count("pd_serve_hard_fences_total")
    with pytest.raises(UnknownMetricError):
        metrics.count("pd_serve_routing_decisions_total", "local")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines_hold_no_secret(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        setup_logging("info", log_format, "router", secrets=("hush-hush", ""))
        logging.getLogger("x").info("key is %s, 100%%", "hush-hush")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    line = capsys.readouterr().err.strip()
    assert "hush" not in line
    assert "[secret], 100%" in line
    if log_format == "json":
        assert json.loads(line)["process"] == "router"


def test_histogram_counts_cumulatively_with_inclusive_bounds() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for value in (0.0005, 0.001, 0.0011, 1e9):
        metrics.record("pd_serve_inter_token_latency_seconds", value)
    assert registry.get_sample_value("pd_serve_inter_token_latency_seconds_bucket", {"le": "0.001"}) == 2
    assert registry.get_sample_value("pd_serve_inter_token_latency_seconds_bucket", {"le": "120.0"}) == 3
    assert registry.get_sample_value("pd_serve_inter_token_latency_seconds_bucket", {"le": "+Inf"}) == 4
    assert registry.get_sample_value("pd_serve_inter_token_latency_seconds_count") == 4
    assert registry.get_sample_value("pd_serve_inter_token_latency_seconds_sum") == pytest.approx(1e9)
