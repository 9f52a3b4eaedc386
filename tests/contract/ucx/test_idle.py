"""Peers that had nothing to do for long, as real processes. Hours are seconds: the intervals of keep-alives are seconds and less here."""

from __future__ import annotations

import pytest

from pd_serve.transport.ucx.sessions import SILENCE_LIMIT_S
from tests.contract.ucx.processes import Cluster, Process
from tests.patience import PATIENCE_S

KEEPALIVES = {"UCX_TCP_KEEPIDLE": "1s", "UCX_TCP_KEEPINTVL": "1s", "UCX_TCP_KEEPCNT": "1"}
"""Of idle tcp connections: the first probe after a second, and one without an answer ends the connection."""
AT_ONCE_S = SILENCE_LIMIT_S / 6
"""What only a peer's silence tells takes six times as long."""
SHORT_S = 1.3
"""More than one of UCX's own keep-alive intervals (lanes.py)."""
ROWS = [(start, start, 64 * 1024) for start in range(0, 1 << 20, 64 * 1024)]


def idle_pair(cluster: Cluster, host: str = "127.0.0.1/here") -> tuple[Process, Process]:
    """A writer and a target that have joined and written once. `host`: of the writer, address/host id."""
    writer, target = cluster.start("writer", env=KEEPALIVES, host=host), cluster.start("target", env=KEEPALIVES)
    cluster.join(writer, target)
    target.allow(writer)
    writer.call("pattern", seed=1)
    writer.write(target, ROWS)
    assert writer.flush(target)["ok"]
    return writer, target


def idle(seconds: float, *processes: Process) -> None:
    """Every process sleeps on its descriptors, as an idle worker's transport thread does."""
    for process in processes:
        process.send("run", seconds=seconds)
    for process in processes:
        process.receive(seconds + PATIENCE_S)


@pytest.mark.parametrize("idle_s", [3.2, pytest.param(1.1 * SILENCE_LIMIT_S, marks=pytest.mark.slow)], ids=["seconds", "minute"])
def test_the_first_transfer_after_a_long_idle_time_is_like_any_other(cluster: Cluster, idle_s: float) -> None:
    """F22. The minute is longer than a peer that owes something may be silent."""
    writer, target = idle_pair(cluster)
    idle(idle_s, writer, target)
    for process in (writer, target):
        assert process.call("events") == []
    writer.call("pattern", seed=2)
    writer.write(target, ROWS)
    assert writer.flush(target, token=2)["ok"]
    wrote = writer.call("digest", start=0, end=1 << 20)
    assert target.call("digest", start=0, end=1 << 20) == wrote


@pytest.mark.parametrize("is_asleep", [pytest.param(False, marks=pytest.mark.slow), True], ids=["watching", "away"])
@pytest.mark.parametrize("host", ["127.0.0.1/here", "127.0.0.1/elsewhere"], ids=["local", "remote"])
def test_the_first_transfer_to_a_target_that_died_while_idle_fails_at_once(cluster: Cluster, host: str, is_asleep: bool) -> None:
    """F22. Away: the writer's thread takes no step between the death and the transfer, so nothing has told it. Remote: no pidfd tells."""
    if cluster.one_sided and host.endswith("elsewhere"):
        pytest.skip("shared memory has no remote peers")
    writer, target = idle_pair(cluster, host)
    idle(SHORT_S, writer, target)
    if is_asleep:
        writer.send("stand_still_and_write", seconds=SHORT_S, peer=target.peer, rows=ROWS, token=5)
        target.kill()
        writer.receive()
    else:
        target.kill()
        writer.call("run", seconds=SHORT_S)
        assert [kind for kind, _ in writer.call("events")] == ["PeerLost"]
        writer.write(target, ROWS)
        writer.call("flush", peer=target.peer, token=5)
    flushed = writer.wait("Flushed", AT_ONCE_S)
    assert (flushed["token"], flushed["ok"]) == (5, False)
    if is_asleep:
        assert writer.wait("PeerLost", AT_ONCE_S)["peer"] == target.peer
    successor = cluster.start("target", 2)
    writer.call("remove", peer=target.peer)
    cluster.join(writer, successor)
    successor.allow(writer)
    writer.write(successor, ROWS)
    assert writer.flush(successor, token=6)["ok"]
