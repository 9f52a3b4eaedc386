"""A rank's reports turned into the worker's Prometheus metrics. Called by the front for every report; names as in pd_serve.observe."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest

from pd_serve.observe import Metrics, Side, UnknownMetricError
from pd_serve.protocol.link import Load, PeerState, Report, Sample

_log = logging.getLogger(__name__)


class FrontMetrics:
    """The registry of one front."""

    def __init__(self) -> None:
        self._metrics = Metrics(CollectorRegistry(), Side.WORKER)
        self._unknown: set[str] = set()
        self._latest: tuple[Report, int] | None = None

    def take(self, report: Report, num_links: int) -> None:
        """Samples count at once; what a report says of the present is kept until somebody asks."""
        self._take_samples(report.samples)
        self._latest = (report, num_links)

    def render(self) -> bytes:
        """Prometheus text format."""
        if self._latest is not None:
            report, num_links = self._latest
            self._take_load(report.load, report.leases_by_state)
            self._take_peers(report.peers)
            self._metrics.record("pd_serve_links", num_links)
        return generate_latest(self._metrics.registry)

    def _take_load(self, load: Load, leases_by_state: Sequence[tuple[str, int]]) -> None:
        record, blocks = self._metrics.record, load.blocks
        used = blocks.total - blocks.free - blocks.cached - blocks.leased - blocks.quarantined
        states = {"free": blocks.free, "cached": blocks.cached, "leased": blocks.leased, "quarantined": blocks.quarantined, "used": used}
        for state, count in states.items():
            record("pd_serve_blocks", count, state)
        for state, count in leases_by_state:
            record("pd_serve_leases", count, state)
        record("pd_serve_running_sequences", load.running)
        record("pd_serve_waiting_sequences", load.waiting)
        record("pd_serve_prefill_queue_tokens", load.prefill_queue_tokens)

    def _take_peers(self, peers: Sequence[PeerState]) -> None:
        self._metrics.clear("pd_serve_joined_peers")
        self._metrics.clear("pd_serve_peer_bandwidth_bytes_per_second")
        for (lane, path), count in Counter((state.lane, _path(state)) for state in peers if state.joined).items():
            self._metrics.record("pd_serve_joined_peers", count, lane, path)
        for state in peers:
            if state.joined:
                self._metrics.record("pd_serve_peer_bandwidth_bytes_per_second", state.bandwidth, str(state.peer.worker_id), state.lane)

    def _take_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            try:
                self._metrics.record(sample.metric, sample.value, sample.label)
            except UnknownMetricError as error:
                if sample.metric not in self._unknown:
                    self._unknown.add(sample.metric)
                    _log.error("dropping samples of the rank: %s", error)


def _path(state: PeerState) -> str:
    return "one_sided" if state.one_sided else "messages"
