"""Arms that are clusters: what is asked for, and what is told when it cannot be had."""

from __future__ import annotations

import pytest

from pd_serve.bench.arms import ArmSpec, parse_arm
from pd_serve.bench.cluster import ClusterSpec, LocalCluster
from pd_serve.bench.errors import BenchError

BASE = ClusterSpec(model="m", settings={"engine.threads": "1"})


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a=http://h:1", ArmSpec("a", "http://h:1")),
        ("a=2p3d", ArmSpec("a", cluster=ClusterSpec(2, 3, 0, "m", {"engine.threads": "1"}))),
        ("a=2c", ArmSpec("a", cluster=ClusterSpec(0, 0, 2, "m", {"engine.threads": "1"}))),
    ],
)
def test_an_arm_is_an_address_or_a_cluster(text: str, spec: ArmSpec) -> None:
    assert parse_arm(text, BASE) == spec


@pytest.mark.parametrize("text", ["a", "=1p1d", "a=", "a=1p", "a=ftp://h", "a=1p1d1c"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--arm"):
        parse_arm(text, BASE)


def test_a_cluster_that_does_not_start_is_told_with_its_own_words_and_leaves_nothing() -> None:
    cluster = LocalCluster(ClusterSpec(1, 1, settings={"kv.blocksize": "3"}))
    with pytest.raises(BenchError, match=r"exited with 1: .*did you mean kv\.block_size"):
        cluster.__enter__()
    assert cluster.pid == 0
    cluster.stop()
