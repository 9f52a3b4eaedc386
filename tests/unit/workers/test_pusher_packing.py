"""KV that is converted on its way: order, bounds, back-pressure, ends. A packer and a transport that only take note."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pd_serve.clock import VirtualClock
from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import AttemptId, Epoch, LeaseId, PeerId
from pd_serve.kv.conversion import HeadSlice, Packing, plan_packings
from pd_serve.kv.digest import TokenSpan, digest_of_pool
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.kv.transfer import plan_ranges, write_ranges
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import WriteBatch
from tests.machine_fakes import peer_id
from workers.events import PushPlan
from workers.prefill.pusher import Pusher
from workers.prefill.staging import StagingRing

SRC = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=32, dtype=KVDtype.FLOAT32)
DST = KVLayout(3, 2, 4, 8, 32, KVDtype.BFLOAT16, 2, KVOrder.HEAD_MAJOR)
PER_TOKEN = DST.bytes_per_token // DST.num_layers
SLOT = 8 * PER_TOKEN
"""As many tokens as a block of the target."""
STAGING = SRC.pool_nbytes
NEAR, FAR = peer_id("near"), peer_id("far")


@dataclass
class NotingTransport:
    """Carries out writes in the memory it is given, at once; flushes are answered by the test."""

    memory: NDArray[np.uint8]
    pools: dict[PeerId, NDArray[np.uint8]] = field(default_factory=dict)
    log: list[tuple[PeerId, str, int]] = field(default_factory=list)
    """In order: (peer, `write`, lease) and (peer, `flush`, token)."""
    unanswered: list[tuple[PeerId, int]] = field(default_factory=list)
    refuses: bool = False

    def write(self, batch: WriteBatch) -> None:
        if self.refuses:
            raise OutOfBoundsError("outside")
        self.log.append((batch.peer, "write", batch.lease_id))
        pool = self.pools.setdefault(batch.peer, np.zeros(DST.pool_nbytes, np.uint8))
        for local, remote, nbytes in batch.ops.tolist():
            pool[remote : remote + nbytes] = self.memory[local : local + nbytes]

    def flush(self, peer: PeerId, token: int) -> None:
        self.log.append((peer, "flush", token))
        self.unanswered.append((peer, token))


@dataclass
class NotingPacker:
    """Packed bytes say whose they are."""

    memory: NDArray[np.uint8]
    packed: list[tuple[int, int, int]] = field(default_factory=list)
    """(layer, start token, offset)."""

    def pack(self, layer: int, packing: Packing, at: int) -> None:
        self.packed.append((layer, packing.start_token, at))
        self.memory[at : at + packing.nbytes] = np.arange(packing.nbytes) % 251 + layer + 1


class Bench:
    def __init__(self, num_slots: int = 8) -> None:
        memory = np.zeros(STAGING + num_slots * SLOT, np.uint8)
        self.transport, self.packer, self.clock = NotingTransport(memory), NotingPacker(memory), VirtualClock(10.0)
        self.ring = StagingRing(STAGING, num_slots * SLOT, SLOT)
        self.num_slots = num_slots
        self.pusher = Pusher(self.transport, itertools.count(1).__next__, self.clock.now)  # type: ignore[arg-type]
        self.pusher.use_packer(self.packer, self.ring)
        self.pusher.digest_writes(memory, SRC)
        self.acts: list[str] = []

    def act(self, name: str) -> Callable[[], None]:
        return lambda: self.acts.append(name)

    def advance(self) -> None:
        """As long as there is something to do without an answer."""
        while self.pusher.advance():
            pass

    def answer(self, peer: PeerId | None = None, ok: bool = True) -> int:
        """Flushes of one peer, or of all, that had been asked for by now."""
        mine = [(whose, token) for whose, token in self.transport.unanswered if peer in (None, whose)]
        self.transport.unanswered = [item for item in self.transport.unanswered if item not in mine]
        for _, token in mine:
            self.pusher.on_flushed(token, ok, "" if ok else "lost on the way")
        return len(mine)

    def settle(self) -> None:
        self.advance()
        while self.answer():
            self.advance()


def lease(lease_id: int, peer: PeerId = NEAR) -> Lease:
    return Lease(LeaseId(lease_id), Epoch(9), peer)


def packed_plan(lease_id: int, peer: PeerId = NEAR, num_tokens: int = 24, limit: int = SLOT, num_layers: int = 3) -> PushPlan:
    packings = tuple(plan_packings(SRC, DST, HeadSlice(0, 0, 2), range(8), range(5, 9), 0, num_tokens, limit))
    nothing = np.empty((0, 3), np.int64)
    return PushPlan(
        AttemptId(lease_id), lease(lease_id, peer), nothing, SRC.layer_nbytes, DST.layer_nbytes, num_layers, 0, packings=packings
    )


def equal_plan(lease_id: int, peer: PeerId = NEAR) -> PushPlan:
    ranges, span = plan_ranges(SRC, range(4), range(4), 0, 12), TokenSpan(tuple(range(4)), 0, 12)
    return PushPlan(AttemptId(lease_id), lease(lease_id, peer), ranges, SRC.layer_nbytes, SRC.layer_nbytes, 3, 0, span=span)


def completed(plan: PushPlan) -> Completed:
    return Completed(plan.lease.lease_id, plan.lease.epoch, plan.attempt_id, 0, 1, 3, None, 24, 3, plan.nbytes, 0, 0.0)


def test_every_byte_goes_where_the_target_keeps_it_and_is_counted_once() -> None:
    bench, plan = Bench(), packed_plan(1)
    bench.pusher.begin_step(1, (plan,))
    for layer in range(3):
        bench.pusher.layer_ready(1, layer, 0.0)
        bench.settle()
    assert plan.nbytes == 24 * DST.bytes_per_token
    assert bench.pusher.problem_of(NEAR, completed(plan)) == ""
    starts, ends = write_ranges(DST, range(5, 9), 0, 24)
    pool = bench.transport.pools[NEAR]
    written = np.zeros(DST.pool_nbytes, bool)
    for start, end in zip(starts, ends, strict=True):
        written[start:end] = True
    assert bool((pool[written] != 0).all())
    assert not pool[~written].any()
    assert bench.pusher.digest_of(NEAR, completed(plan)) == digest_of_pool(pool, DST, TokenSpan(tuple(range(5, 9)), 0, 24))
    finished = bench.pusher.finish(NEAR, completed(plan), 11.0, "lane")
    assert finished is not None
    values = {sample.metric: sample.value for sample in finished.samples}
    assert values["pd_serve_kv_transfer_bytes_total"] == values["pd_serve_kv_packed_bytes_total"] == plan.nbytes
    assert len(finished.trace.layers) == 3 * 3, "a piece for every layer and packing"


def test_equal_layouts_never_call_the_packer_nor_take_a_slot() -> None:
    bench, plan = Bench(), equal_plan(1)
    bench.pusher.push_now(plan)
    assert [kind for _, kind, _ in bench.transport.log] == ["write", "flush"], "at once"
    assert not bench.pusher.advance()
    bench.settle()
    assert (bench.packer.packed, bench.ring.num_free) == ([], bench.num_slots)
    sent = digest_of_pool(bench.transport.memory, SRC, TokenSpan(tuple(range(4)), 0, 12))
    assert bench.pusher.digest_of(NEAR, completed(plan)) == sent
    finished = bench.pusher.finish(NEAR, completed(plan), 11.0, "lane")
    assert finished is not None
    assert {sample.metric for sample in finished.samples}.isdisjoint({"pd_serve_kv_packed_bytes_total", "pd_serve_kv_pack_seconds"})


def test_a_plan_that_packs_needs_a_packer() -> None:
    bench = Bench()
    pusher = Pusher(bench.transport, itertools.count(1).__next__, bench.clock.now)  # type: ignore[arg-type]
    pusher.use_packer(None, bench.ring)  # type: ignore[arg-type]
    pusher.push_now(packed_plan(1))
    with pytest.raises(AssertionError, match="nothing to pack with"):
        pusher.advance()


def test_a_flush_asked_for_later_waits_for_what_is_queued_before_it() -> None:
    bench = Bench(num_slots=2)
    bench.pusher.push_now(packed_plan(1))
    bench.pusher.when_issued(NEAR, bench.act("first"))
    bench.pusher.push_now(packed_plan(2))
    bench.pusher.when_issued(NEAR, bench.act("second"))
    seen = []
    while bench.pusher.num_in_flight:
        bench.advance()
        bench.answer()
        seen.append((sum(kind == "write" for _, kind, _ in bench.transport.log), tuple(bench.acts)))
    assert all(("first" in acts) == (writes >= 9) and ("second" in acts) == (writes >= 18) for writes, acts in seen), seen
    assert bench.acts == ["first", "second"]


def test_a_flush_with_nothing_queued_before_it_is_issued_at_once() -> None:
    bench = Bench(num_slots=2)
    bench.pusher.push_now(packed_plan(1, FAR))
    bench.pusher.when_issued(NEAR, bench.act("near"))
    bench.pusher.when_issued(FAR, bench.act("far"))
    assert bench.acts == ["near"]
    bench.settle()
    assert bench.acts == ["near", "far"]


def test_a_peer_that_does_not_answer_leaves_half_of_the_slots_to_others() -> None:
    bench = Bench(num_slots=8)
    stalled, served = packed_plan(1, FAR, num_tokens=32), packed_plan(2, NEAR, num_tokens=32)
    bench.pusher.push_now(stalled)
    bench.advance()
    assert bench.ring.num_free == 4
    bench.pusher.push_now(served)
    bench.pusher.when_issued(NEAR, bench.act("served"))
    bench.advance()
    while bench.answer(NEAR):
        bench.advance()
    assert bench.acts == ["served"]
    assert bench.pusher.problem_of(NEAR, completed(served)) == ""
    assert bench.ring.num_free == 4
    bench.settle()
    assert bench.pusher.problem_of(FAR, completed(stalled)) == ""
    assert bench.ring.num_free == 8


def test_each_turn_packs_a_little_for_every_peer() -> None:
    bench = Bench(num_slots=64)
    for number, peer in enumerate((NEAR, FAR), 1):
        bench.pusher.push_now(packed_plan(number, peer, num_tokens=32))
    assert bench.packer.packed == [], "nothing is packed where it would hold up what else the turn has to do"
    assert bench.pusher.advance()
    assert [(peer, kind) for peer, kind, _ in bench.transport.log] == [
        *[(NEAR, "write")] * 4,
        (NEAR, "flush"),
        *[(FAR, "write")] * 4,
        (FAR, "flush"),
    ]


def test_no_slot_is_written_while_a_flush_over_it_is_unanswered() -> None:
    bench = Bench(num_slots=4)
    bench.pusher.push_now(packed_plan(1, num_tokens=32))
    bench.advance()
    while bench.pusher.num_in_flight:
        in_use = [at for _, _, at in bench.packer.packed]
        assert len(set(in_use)) == len(in_use) <= 2
        bench.packer.packed.clear()
        bench.answer()
        bench.advance()


def test_stop_takes_back_what_waits_of_that_lease_only() -> None:
    bench = Bench(num_slots=2)
    stopped, other = packed_plan(1), packed_plan(2)
    for plan in (stopped, other):
        bench.pusher.push_now(plan)
    bench.advance()
    bench.pusher.stop(stopped.lease)
    bench.pusher.when_issued(NEAR, bench.act("quiesced"))
    bench.pusher.push_now(stopped)
    bench.settle()
    assert [number for _, kind, number in bench.transport.log if kind == "write"] == [1] + [2] * 9
    assert bench.acts == ["quiesced"]
    assert bench.pusher.problem_of(NEAR, completed(stopped)) == "the push was stopped"
    assert bench.pusher.problem_of(NEAR, completed(other)) == ""
    assert (bench.ring.num_free, bench.pusher.num_in_flight) == (2, 0)


def test_a_flush_behind_a_stopped_lease_is_not_forgotten() -> None:
    bench, plan = Bench(num_slots=1), packed_plan(1)
    bench.pusher.push_now(plan)
    bench.pusher.when_issued(NEAR, bench.act("flush"))
    bench.pusher.stop(plan.lease)
    assert bench.pusher.advance()
    assert bench.acts == ["flush"]
    assert bench.pusher.num_in_flight == 0


def test_a_lost_peer_gives_everything_back_and_its_flushes_go_on() -> None:
    bench = Bench(num_slots=4)
    lost, other = packed_plan(1, FAR), packed_plan(2, NEAR)
    bench.pusher.push_now(lost)
    bench.pusher.when_issued(FAR, bench.act("flush"))
    bench.pusher.push_now(other)
    bench.advance()
    bench.pusher.drop_peer(FAR)
    assert bench.acts == ["flush"], "it will be answered: not ok"
    bench.advance()
    bench.answer(FAR)
    bench.settle()
    assert bench.pusher.problem_of(NEAR, completed(other)) == ""
    assert (bench.ring.num_free, bench.pusher.num_in_flight) == (4, 0)


def test_a_failed_write_spoils_its_attempt_and_gives_its_slots_back() -> None:
    bench, plan = Bench(num_slots=2), packed_plan(1)
    bench.transport.refuses = True
    bench.pusher.push_now(plan)
    bench.settle()
    assert bench.pusher.problem_of(NEAR, completed(plan)) == "outside"
    assert (bench.ring.num_free, bench.pusher.num_in_flight) == (2, 0)


def test_a_failed_flush_spoils_its_attempt_and_gives_its_slots_back() -> None:
    bench, plan = Bench(num_slots=2), packed_plan(1)
    bench.pusher.push_now(plan)
    bench.advance()
    bench.answer(ok=False)
    bench.settle()
    assert bench.pusher.problem_of(NEAR, completed(plan)) == "lost on the way"
    assert bench.ring.num_free == 2


def test_a_packing_larger_than_a_slot_spoils_its_attempt_not_its_neighbour() -> None:
    bench, plan = Bench(), packed_plan(1, limit=SLOT * 2)
    bench.pusher.push_now(plan)
    bench.settle()
    assert [at for layer, start, at in bench.packer.packed if start < 16] == []
    assert f"for a slot of {SLOT}" in bench.pusher.problem_of(NEAR, completed(plan))
    assert bench.ring.num_free == bench.num_slots


def test_packing_is_timed_beside_the_link() -> None:
    """Packing takes 2 s a piece, the link 1 s for the three of a layer."""
    bench, plan = Bench(), packed_plan(1, num_layers=1)
    noted = bench.packer.pack

    def slowly(layer: int, packing: Packing, at: int) -> None:
        noted(layer, packing, at)
        bench.clock.advance(2.0)

    bench.packer.pack = slowly  # type: ignore[method-assign]
    bench.pusher.push_now(plan)
    bench.pusher.advance()
    bench.clock.advance(1.0)
    bench.answer()
    finished = bench.pusher.finish(NEAR, completed(plan), bench.clock.now(), "lane")
    assert finished is not None
    values = {sample.metric: sample.value for sample in finished.samples}
    assert values["pd_serve_kv_pack_seconds"] == pytest.approx(6.0)
    assert values["pd_serve_kv_transfer_seconds"] == pytest.approx(5.0), "from the first write on: two pieces were packed meanwhile"


@settings(max_examples=120, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_slots_come_back_and_flushes_go_on_whatever_happens(rng: random.Random) -> None:
    bench = Bench(num_slots=rng.randint(1, 9))
    plans: list[PushPlan] = []
    asked: dict[PeerId, list[str]] = {NEAR: [], FAR: []}
    for step in range(40):
        peer = rng.choice((NEAR, FAR))
        match rng.randrange(9):
            case 0 | 1:
                plan = rng.choice((packed_plan, equal_plan))(step + 1, peer)
                plans.append(plan)
                bench.pusher.push_now(plan)
            case 2 if plans:
                plan = rng.choice(plans)
                bench.pusher.begin_step(step, (plan,))
                bench.pusher.layer_ready(step, rng.randrange(3), 0.0)
            case 3 if plans:
                bench.pusher.stop(rng.choice(plans).lease)
            case 4:
                asked[peer].append(f"{peer}-{step}")
                bench.pusher.when_issued(peer, bench.act(f"{peer}-{step}"))
            case 5 if rng.random() < 0.3:
                bench.pusher.drop_peer(peer)
            case 6:
                bench.transport.refuses = rng.random() < 0.2
            case 7:
                bench.answer(rng.choice((NEAR, FAR, None)), ok=rng.random() < 0.8)
            case _:
                bench.pusher.advance()
        assert 0 <= bench.ring.num_free <= bench.num_slots
    bench.settle()
    assert (bench.ring.num_free, bench.pusher.num_in_flight) == (bench.num_slots, 0)
    for peer, names in asked.items():
        assert [name for name in bench.acts if name.startswith(str(peer))] == names
