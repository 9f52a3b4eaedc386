from __future__ import annotations

from pd_serve.protocol.link import Sample
from workers.samples import SampleBuffer


def test_counters_are_summed_by_label_and_observations_kept() -> None:
    buffer = SampleBuffer()
    buffer.add((Sample("a_total", 1.0, "x"), Sample("b_seconds", 0.5), Sample("a_total", 2.0, "x"), Sample("a_total", 4.0)))
    buffer.add((Sample("b_seconds", 0.5),))
    assert sorted(buffer.take(), key=lambda s: (s.metric, s.label)) == [
        Sample("a_total", 4.0),
        Sample("a_total", 3.0, "x"),
        Sample("b_seconds", 0.5),
        Sample("b_seconds", 0.5),
    ]
    assert buffer.take() == ()
