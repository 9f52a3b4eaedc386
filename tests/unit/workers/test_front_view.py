"""Health and readiness from the reports of a rank, in virtual time."""

from __future__ import annotations

from pd_serve.clock import VirtualClock
from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import BlockCounts, Load, PeerInfo, Report, Role, Welcome
from workers.front_view import MISSED_REPORTS, FrontView, Identity

INTERVAL_S = 0.5
IDENTITY = Identity(WorkerId("d"), Incarnation(1), Role.DECODE, "http://h:1", 10)


def welcome() -> Welcome:
    layout = KVLayout(1, 1, 8, 16, 4, KVDtype.FLOAT32)
    info = PeerInfo(PeerId(WorkerId("d"), Incarnation(1)), Role.DECODE, 1, "m", layout, "loopback", (b"",))
    return Welcome(info, "m", 64, 100, (0,), 10, (11,))


def report(role: Role = Role.DECODE, draining: bool = False, idle: bool = True) -> Report:
    load = Load(1, role, draining, BlockCounts(4, 4, 0, 0, 0), 0, 0, 0, 0, 0)
    return Report(load, (), (), (), idle)


def test_loading_is_healthy_however_long_it_takes_and_not_ready() -> None:
    clock = VirtualClock()
    view = FrontView(IDENTITY, INTERVAL_S, clock)
    clock.advance(3600)
    assert view.unhealthy == ""
    assert "loading" in view.not_ready
    assert view.registration().ready is False


def test_missed_reports_are_a_frozen_engine_and_one_more_mends_it() -> None:
    clock = VirtualClock()
    view = FrontView(IDENTITY, INTERVAL_S, clock)
    view.take_welcome(welcome())
    assert view.not_ready == ""
    clock.advance(MISSED_REPORTS * INTERVAL_S)
    assert view.unhealthy == ""
    clock.advance(0.01)
    assert view.unhealthy
    assert view.status().ready is False
    view.take_report(report())
    assert view.unhealthy == ""
    assert view.registration().ready is True


def test_drained_means_that_the_rank_has_heard_and_holds_nothing() -> None:
    view = FrontView(IDENTITY, INTERVAL_S, VirtualClock())
    view.take_welcome(welcome())
    view.draining = True
    view.take_report(report(idle=True))
    assert not view.drained, "a report from before the drain says nothing"
    view.take_report(report(draining=True, idle=False))
    assert not view.drained
    view.take_report(report(draining=True, idle=True))
    assert view.drained
    assert view.not_ready == "draining"


def test_routers_are_told_at_once_of_a_new_role_or_a_drain_only() -> None:
    view = FrontView(IDENTITY, INTERVAL_S, VirtualClock())
    assert view.take_report(report()) is False
    assert view.take_report(report(Role.BOTH)) is True
    assert view.registration().role is Role.BOTH
    assert view.take_report(report(Role.BOTH)) is False
    assert view.take_report(report(Role.BOTH, draining=True)) is True
