"""The Grafana dashboard asks for metrics and labels that exist, and monitoring fits the clusters it is laid over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_serve.observe import METRICS, MetricKind

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SPECS = {spec.name: spec for spec in METRICS}
SCRAPED = frozenset({"instance", "job"})
"""Labels that Prometheus adds."""
_SERIES = re.compile(r"(pd_serve_[a-z_]+)(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCKER / "grafana/pd-serve.json").read_text())
    return loaded


def queries() -> Iterator[tuple[str, str, str]]:
    """(panel, expression, legend)"""
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def trouble(expression: str, legend: str = "") -> str:
    """What in it does not exist; empty: nothing."""
    found = _SERIES.findall(expression)
    if not found:
        return "no metric"
    known: set[str] = set(SCRAPED)
    for name, matchers in found:
        base = name if name in SPECS else re.sub(r"_(bucket|sum|count)$", "", name)
        spec = SPECS.get(base)
        if spec is None or (base != name) != (spec.kind is MetricKind.HISTOGRAM):
            return f"no series {name}"
        labels = {*spec.labels, *(("le",) if name.endswith("_bucket") else ())}
        known |= labels
        if wrong := set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - labels - SCRAPED:
            return f"{name} has no {sorted(wrong)}"
        if spec.kind is not MetricKind.GAUGE and not re.search(rf"rate\({name}(?:\{{[^}}]*\}})?\[", expression):
            return f"{name} without a rate"
    kept = {label.strip() for labels in _BY.findall(expression) for label in labels.split(",")}
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    if wrong := (kept | shown) - known:
        return f"no label {sorted(wrong)}"
    if expression.count("(") != expression.count(")"):
        return "brackets"
    return f"legend shows {sorted(shown - kept)}" if kept and shown - kept else ""


@pytest.mark.parametrize(("panel", "expression", "legend"), list(queries()), ids=lambda value: value if len(value) < 30 else "")
def test_every_expression_names_only_what_exists(panel: str, expression: str, legend: str) -> None:
    assert trouble(expression, legend) == "", panel


@pytest.mark.parametrize(
    ("expression", "legend"),
    [
        ("sum(rate(pd_serve_nothing_total[1m]))", ""),
        ("sum(rate(pd_serve_requests_total_bucket[1m]))", ""),
        ("sum(pd_serve_requests_total)", ""),
        ("sum(rate(pd_serve_request_seconds[1m]))", ""),
        ('sum(pd_serve_blocks{stat="free"})', ""),
        ("sum by (status) (rate(pd_serve_requests_total[1m]))", ""),
        ("sum by (code) (rate(pd_serve_requests_total[1m]))", "{{reason}}"),
        ("sum(up)", ""),
    ],
)
def test_a_wrong_expression_is_noticed(expression: str, legend: str) -> None:
    assert trouble(expression, legend)


def test_what_operators_ask_for_is_on_it() -> None:
    shown = " ".join(expression for _, expression, _ in queries())
    for part in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "queue_seconds", "blocks", "prefix_cache_hit"):
        assert f"pd_serve_{part}" in shown
    for part in ("kv_transfer_bytes", "kv_transfer_seconds", "kv_overlap_ratio", "handover", "leases", "moves", "rejections"):
        assert f"pd_serve_{part}" in shown
    assert 'pd_serve_blocks{state="quarantined"}' in shown


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_prometheus_scrapes_the_services_and_ports_of_the_clusters() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    scraped: set[tuple[str, str]] = set()
    for job in jobs:
        scraped |= {tuple(target.split(":")) for entry in job.get("static_configs", ()) for target in entry["targets"]}
        scraped |= {(name, str(entry["port"])) for entry in job.get("dns_sd_configs", ()) for name in entry["names"]}
    for path in DOCKER.glob("compose.*.yaml"):
        services = yaml.safe_load(path.read_text())["services"]
        ports = {
            (name, str(service["command"][service["command"].index("--port") + 1])) for name, service in services.items() if name != "room"
        }
        assert scraped == ports, path.name


def test_files_that_monitoring_mounts_are_there_and_it_starts_only_when_asked_for() -> None:
    services = yaml.safe_load((DOCKER / "monitoring.yaml").read_text())["services"]
    for service in services.values():
        assert service["profiles"] == ["monitoring"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DOCKER / source).exists(), source
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == board()["templating"]["list"][0]["query"] == "prometheus"
