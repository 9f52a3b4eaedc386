"""The pool as memory of a model, and the cost of doing nothing."""

from __future__ import annotations

import pytest

from tests.contract.ucx.processes import POOL_NBYTES, Cluster

torch = pytest.importorskip("torch")


def test_the_pool_is_a_tensor_that_peers_write_into(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    writer.call("fill", value=0x3F)  # bfloat16 0x3f3f
    writer.write(target, [(0, 0, 4096)])
    assert writer.flush(target)["ok"]
    seen = target.call("tensor", timeout_s=60.0)
    assert seen["numel"] == POOL_NBYTES // 2
    assert seen["sum"] == pytest.approx(64 * 0.74609375)
    assert seen["one"] == [0x80, 0x3F]


def test_an_idle_joined_transport_uses_under_two_percent_of_a_core(cluster: Cluster) -> None:
    """F42. The least of some windows: others may hold what the machine or the interpreter does of its own."""
    for process in cluster.pair():
        process.call("run", seconds=0.1)
        assert min(process.call("run", seconds=0.6) for _ in range(3)) < 0.02 * 0.6


def test_fifty_joins_and_departures_leave_descriptors_and_memory_flat(cluster: Cluster) -> None:
    first, second = cluster.start("first"), cluster.start("second")
    sizes = []
    for round_number in range(50):
        cluster.join(first, second)
        first.call("remove", peer=second.peer)
        second.wait("PeerLost")
        if round_number % 10 == 9:
            first.call("run", seconds=0.05)
            resources = [process.call("resources") for process in (first, second)]
            sizes.append([(found["fds"], found["rss"]) for found in resources])
    for index in range(2):
        assert sizes[-1][index][0] <= sizes[0][index][0] + 1, sizes
        assert sizes[-1][index][1] <= sizes[0][index][1] + (2 << 20), sizes
