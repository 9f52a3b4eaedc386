"""Peers over NIXL that die or leave, as real processes: what is asked of ucx, and the processor's rest."""

from __future__ import annotations

from tests.contract.ucx.processes import Cluster
from tests.contract.ucx.test_death import (
    test_a_writer_whose_target_is_killed_hears_of_it_at_once,
    test_late_writes_of_a_stopped_writer_do_not_land_after_the_window_closed,
    test_removing_a_peer_tells_the_other_side,
    test_senders_that_are_killed_while_they_send_make_nobody_deaf,
)
from tests.patience import idle_share

__all__ = [
    "test_a_writer_whose_target_is_killed_hears_of_it_at_once",
    "test_late_writes_of_a_stopped_writer_do_not_land_after_the_window_closed",
    "test_removing_a_peer_tells_the_other_side",
    "test_senders_that_are_killed_while_they_send_make_nobody_deaf",
]

IDLE_S = 1.0


def test_an_idle_agent_uses_under_two_percent_of_a_core(cluster: Cluster) -> None:
    """All of its threads: NIXL's polls a whole core unless it is told to wait. In one of some windows, as over ucx."""
    first, second = cluster.start("first"), cluster.start("second")
    cluster.join(first, second)
    first.call("run", seconds=0.2)
    allowed = idle_share(0.02)
    for process in (first, second):
        assert any(process.call("run", seconds=IDLE_S) < allowed * IDLE_S for _ in range(8))


def test_a_remote_peer_that_dies_while_idle_is_noticed(tcp_cluster: Cluster) -> None:
    """No pidfd tells of it: signs of life do."""
    writer, target = tcp_cluster.start("writer", host="127.0.0.1/elsewhere"), tcp_cluster.start("target")
    tcp_cluster.join(writer, target)
    target.kill()
    assert writer.wait("PeerLost")["peer"] == target.peer
