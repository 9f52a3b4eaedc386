"""Observations of this rank between two reports. Owned by the control thread."""

from __future__ import annotations

from collections.abc import Iterable

from pd_serve.protocol.link import Sample

_COUNTER_SUFFIX = "_total"


class SampleBuffer:
    """Increments of one counter are summed; every observation of a histogram is kept."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], float] = {}
        self._observations: list[Sample] = []

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.metric.endswith(_COUNTER_SUFFIX):
                key = (sample.metric, sample.label)
                self._counters[key] = self._counters.get(key, 0.0) + sample.value
            else:
                self._observations.append(sample)

    def take(self) -> tuple[Sample, ...]:
        """Everything since the last take."""
        counters = [Sample(metric, value, label) for (metric, label), value in self._counters.items()]
        taken = (*counters, *self._observations)
        self._counters.clear()
        self._observations.clear()
        return taken
