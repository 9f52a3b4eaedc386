"""Peers that die, stall or leave, as real processes."""

from __future__ import annotations

import signal
import time

import pytest

from pd_serve.transport.ucx.sessions import SILENCE_LIMIT_S
from tests.cluster import wait_until
from tests.contract.ucx.processes import POOL_NBYTES, Cluster, Process
from tests.patience import PATIENCE_S

CHUNK = 64 * 1024
AT_ONCE_S = SILENCE_LIMIT_S / 6
"""What only a peer's silence tells takes six times as long."""
ALL = [(start, start, CHUNK) for start in range(0, POOL_NBYTES, CHUNK)]


def test_bytes_are_there_after_the_flush(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    rows = [(start, POOL_NBYTES - CHUNK - start, CHUNK) for start in range(0, POOL_NBYTES, CHUNK)]
    writer.write(target, rows)
    assert writer.flush(target)["ok"]
    for source, destination, nbytes in rows[::7]:
        wrote = writer.call("digest", start=source, end=source + nbytes)
        assert target.call("digest", start=destination, end=destination + nbytes) == wrote


def kill_with_writes_queued(writer: Process, target: Process) -> None:
    """The target does nothing meanwhile; it has to answer afterwards."""
    target.send("stand_still", seconds=0.3)
    for _ in range(8):
        writer.write(target, ALL)
    writer.kill()
    target.receive()
    lost = target.wait("PeerLost")
    assert lost["fenced"]
    assert target.call("run", seconds=0.2) < 0.2


@pytest.mark.parametrize("round_number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))])
def test_a_busy_target_outlives_a_writer_killed_with_writes_queued(cluster: Cluster, round_number: int) -> None:
    """F39: with emulated puts the target aborted when it came back."""
    writer, target = cluster.pair()
    kill_with_writes_queued(writer, target)
    assert target.call("close_window", lease=1)
    other = cluster.start("other")
    cluster.join(other, target)
    target.allow(other, lease=2)
    other.call("fill", value=9)
    other.write(target, ALL, lease=2)
    assert other.flush(target)["ok"]
    assert target.call("count", value=9) == POOL_NBYTES


def test_the_check_catches_puts_over_tcp() -> None:
    """PLANTED: a target whose peers put into its pool over tcp is aborted by UCX when the writer dies."""
    cluster = Cluster("tcp", agent="emulated_puts")
    try:
        writer, target = cluster.pair()
        with pytest.raises(EOFError, match=f"died: -{signal.SIGABRT:d}"):
            kill_with_writes_queued(writer, target)
    finally:
        cluster.end()


def test_nothing_depends_on_the_queue_that_all_senders_over_shared_memory_share(cluster: Cluster) -> None:
    """A sender that is killed between taking a place in it and filling that place ends it for everybody."""
    writer, target = cluster.pair()
    target.call("deafen")
    writer.write(target, ALL)
    assert writer.flush(target)["ok"]
    other = cluster.start("other")
    cluster.join(other, target)
    for process in (writer, other):
        process.call("notify", peer=target.peer, text="here")
        process.call("run", seconds=0.05)
        assert target.wait("NoticeReceived")["peer"] == process.peer


@pytest.mark.parametrize("num_rounds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_senders_that_are_killed_while_they_send_make_nobody_deaf(cluster: Cluster, num_rounds: int) -> None:
    """Over a queue that all share, 10 to 20 rounds were enough."""
    target, bystander = cluster.start("target"), cluster.start("bystander")
    cluster.join(bystander, target)
    for round_number in range(num_rounds):
        sender = cluster.start(f"sender-{round_number}")
        cluster.join(sender, target)
        sender.call("stream", peer=target.peer, nbytes=64, lease=1)
        for _ in range(50):
            sender.send("notify", peer=target.peer, text="x" * 2000)
        sender.send("run", seconds=3)
        target.send("run", seconds=0.1 + round_number % 10 * 0.01)
        time.sleep(round_number % 7 * 0.003)
        sender.kill()
        target.receive()
        target.call("events")
        bystander.call("notify", peer=target.peer, text="here")
        bystander.call("run", seconds=0.02)
        while target.wait("NoticeReceived")["peer"] != bystander.peer:
            continue


def test_a_writer_whose_target_is_killed_hears_of_it_at_once(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    writer.call("stream", peer=target.peer, nbytes=CHUNK, lease=1)
    writer.wait_streaming(target)
    target.kill()
    writer.wait("PeerLost", AT_ONCE_S)
    writer.call("stop_stream")
    writer.write(target, ALL)
    assert not writer.flush(target, token=7)["ok"]


def test_a_flush_behind_writes_to_a_stopped_then_killed_target_is_never_ok(tcp_cluster: Cluster) -> None:
    """F40 on the checked path: nothing that only left this process counts as delivered."""
    writer, target = tcp_cluster.pair()
    target.signal(signal.SIGSTOP)
    writer.write(target, [(0, 0, 4096)])
    writer.call("flush", peer=target.peer, token=3)
    writer.call("run", seconds=0.2)
    target.kill()
    flushed = writer.wait("Flushed")
    assert flushed["token"] == 3
    assert not flushed["ok"]
    writer.wait("PeerLost")


def test_a_stopped_target_delays_its_own_transfers_only(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    other = cluster.start("other")
    cluster.join(writer, other)
    other.allow(writer, lease=2)
    target.signal(signal.SIGSTOP)
    for _ in range(16):
        writer.write(target, ALL)
    writer.call("flush", peer=target.peer, token=1)
    writer.write(other, ALL, lease=2)
    writer.call("flush", peer=other.peer, token=2)
    flushed = [writer.wait("Flushed")]
    if flushed[0]["token"] == 1:
        flushed.append(writer.wait("Flushed"))
    assert flushed[-1]["token"] == 2
    assert flushed[-1]["ok"]
    assert writer.call("run", seconds=1.0) < 0.2, "a transfer that waits for a stopped peer must not burn the processor"
    target.signal(signal.SIGCONT)
    if len(flushed) == 1:
        assert writer.wait("Flushed")["ok"]
    writer_sum = writer.call("digest", start=0, end=POOL_NBYTES)
    assert target.call("digest", start=0, end=POOL_NBYTES) == writer_sum


def test_a_stopped_writer_is_not_taken_for_dead_and_goes_on(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    writer.call("stream", peer=target.peer, nbytes=CHUNK, lease=1)
    writer.signal(signal.SIGSTOP)
    target.call("run", seconds=1.2)
    assert [kind for kind, _ in target.call("events") if kind == "PeerLost"] == []
    if not cluster.one_sided:
        assert target.call("close_window", lease=1)
    writer.signal(signal.SIGCONT)
    writer.wait_streaming(target)
    assert writer.call("stream_state")["failed"] == 0


def test_late_writes_of_a_stopped_writer_do_not_land_after_the_window_closed(tcp_cluster: Cluster) -> None:
    """F20: the fence of the checked path needs nobody's cooperation."""
    writer, target = tcp_cluster.pair()
    writer.call("fill", value=5)
    writer.call("stream", peer=target.peer, nbytes=CHUNK, lease=1)
    writer.call("run", seconds=0.05)
    writer.signal(signal.SIGSTOP)
    assert target.call("close_window", lease=1)
    target.call("fill", value=3)
    writer.signal(signal.SIGCONT)
    writer.call("run", seconds=0.2)
    wait_until(lambda: target.call("resources")["refused_writes"] > 0, PATIENCE_S, "late writes are refused")
    assert target.call("count", value=3) == POOL_NBYTES


def test_a_silent_writer_with_keys_is_only_fenced_by_its_end(shm_cluster: Cluster) -> None:
    writer, target = shm_cluster.pair()
    writer.signal(signal.SIGSTOP)
    assert not target.call("close_window", lease=1)
    assert target.call("fence", peer=writer.peer)
    lost = target.wait("PeerLost")
    assert lost["fenced"]
    assert not writer.is_alive or writer._child.wait(PATIENCE_S) == -signal.SIGKILL


def test_closing_while_the_other_writes_is_told_and_harms_nobody(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    writer.call("stream", peer=target.peer, nbytes=CHUNK, lease=1)
    writer.call("run", seconds=0.05)
    target.call("close")
    lost = writer.wait("PeerLost")
    assert lost["fenced"]
    writer.call("stop_stream")
    writer.call("close")
    assert writer.is_alive
    assert target.is_alive


def test_removing_a_peer_tells_the_other_side(cluster: Cluster) -> None:
    writer, target = cluster.pair()
    target.call("remove", peer=writer.peer)
    assert writer.wait("PeerLost")["fenced"]
    target.call("run", seconds=0.3)
    assert target.call("events") == []
    cluster.join(writer, target)
    target.allow(writer)
    writer.write(target, ALL)
    assert writer.flush(target)["ok"]
