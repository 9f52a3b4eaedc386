"""Which lane two peers take, and what its context may do."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from pd_serve.errors import ConfigError
from pd_serve.transport.ucx.lanes import Lane, choose_lane, interface_of, lane_options, rdma_devices, wanted_lanes

SUBSETS = [subset for size in range(4) for subset in combinations(Lane, size)]


def test_both_sides_choose_alike() -> None:
    for mine in SUBSETS:
        for theirs in SUBSETS:
            for same_host in (True, False):
                assert choose_lane(mine, theirs, same_host) is choose_lane(theirs, mine, same_host)


def test_shared_memory_is_for_one_host_and_rdma_comes_before_tcp() -> None:
    everything = tuple(Lane)
    assert choose_lane(everything, everything, True) is Lane.SHM
    assert choose_lane(everything, everything, False) is Lane.RDMA
    assert choose_lane(everything, (Lane.SHM, Lane.TCP), False) is Lane.TCP
    assert choose_lane((Lane.SHM,), (Lane.SHM,), False) is None
    assert choose_lane((Lane.SHM,), (Lane.TCP,), True) is None


def test_only_tcp_is_without_puts() -> None:
    assert [lane for lane in Lane if not lane.one_sided] == [Lane.TCP]
    for lane in Lane:
        names = lane_options(lane, "127.0.0.1", "cpu")["TLS"].split(",")
        assert ("tcp" in names) is (lane is Lane.TCP)
        assert "cma" not in names


def test_a_setting_restricts_lanes() -> None:
    assert wanted_lanes("auto") == tuple(Lane)
    assert wanted_lanes("tcp") == (Lane.TCP,)
    with pytest.raises(ConfigError):
        wanted_lanes("carrier pigeon")


def test_tcp_is_bound_to_the_interface_of_the_host() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("0.0.0.0") is None
    assert lane_options(Lane.TCP, "127.0.0.1", "cpu")["NET_DEVICES"] == "lo"


def test_rdma_devices_are_those_of_the_kernel(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "missing") == ()
    (tmp_path / "mlx5_0").mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0",)
