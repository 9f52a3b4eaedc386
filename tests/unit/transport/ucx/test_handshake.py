"""The join as a state machine: over a network that loses, repeats and delays, with sides that begin again at any time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.transport.ucx.handshake import Handshake
from pd_serve.transport.ucx.messages import NONCE_NBYTES, WIRE_VERSION, Answer, Hello, JoinCodec, MemoryOffer
from pd_serve.transport.ucx.process import ProcessIdentity

A = PeerId(WorkerId("a"), Incarnation(1))
B = PeerId(WorkerId("b"), Incarnation(2))
OFFER = MemoryOffer(4096, 1 << 20, b"key")


def side(me: PeerId, peer: PeerId, nonce: str, secret: bytes = b"secret", **changes: object) -> Handshake:
    hello = Hello(me, peer, nonce.encode().ljust(NONCE_NBYTES), WIRE_VERSION, "1.22.0", 1 << 20, "tcp", ProcessIdentity(1, 1), b"")
    return Handshake(JoinCodec(secret), msgspec.structs.replace(hello, **changes), OFFER, OFFER)


def prove(sender: Handshake, receiver: Handshake) -> bool:
    """Hand over a session message; True when the receiver knows its token."""
    for nonce, token in receiver.incoming_tokens.items():
        if token == sender.outgoing_token:
            receiver.on_proof(nonce)
            return True
    return False


def join(a: Handshake, b: Handshake) -> None:
    assert a.on_answer(b.on_hello(a.hello))
    assert b.on_answer(a.on_hello(b.hello))
    assert prove(a, b)
    assert prove(b, a)


def test_two_sides_complete_and_know_each_others_tokens() -> None:
    a, b = side(A, B, "1"), side(B, A, "2")
    join(a, b)
    assert a.is_complete
    assert b.is_complete
    assert a.outgoing_token in b.incoming_tokens.values()
    assert a.outgoing_token != b.outgoing_token


def test_a_side_is_not_complete_before_it_has_seen_proof() -> None:
    a, b = side(A, B, "1"), side(B, A, "2")
    assert a.on_answer(b.on_hello(a.hello))
    assert not a.is_complete
    assert b.on_answer(a.on_hello(b.hello))
    assert not b.is_complete
    assert prove(a, b)
    assert b.is_complete
    assert not a.is_complete


def test_an_answer_to_another_join_is_not_taken() -> None:
    a, b = side(A, B, "1"), side(B, A, "2")
    old = b.on_hello(side(A, B, "earlier").hello)
    assert not a.on_answer(old)
    assert not a.on_answer(msgspec.structs.replace(b.on_hello(a.hello), sender=A))
    assert a.answer is None
    assert a.outgoing_token is None


def test_different_secrets_share_no_token() -> None:
    a, b = side(A, B, "1"), side(B, A, "2", secret=b"other")
    a.on_answer(b.on_hello(a.hello))  # as if the digest had not been looked at
    b.on_answer(a.on_hello(b.hello))
    assert not prove(a, b)
    assert not prove(b, a)


def test_a_replayed_hello_changes_nothing_and_a_new_join_supersedes_when_proven() -> None:
    a, b = side(A, B, "1"), side(B, A, "2")
    join(a, b)
    token = b.outgoing_token
    b.on_hello(side(A, B, "recorded").hello)
    assert b.is_complete
    assert b.outgoing_token == token
    again = side(A, B, "3")
    assert again.on_answer(b.on_hello(again.hello))
    (nonce,) = [nonce for nonce, known in b.incoming_tokens.items() if known == again.outgoing_token]
    assert b.is_superseded_by(nonce)
    assert not b.is_superseded_by(a.hello.nonce)


def test_a_flood_of_hellos_does_not_push_out_the_session_in_use() -> None:
    a, b = side(A, B, "1"), side(B, A, "2")
    join(a, b)
    for number in range(100):
        b.on_hello(side(A, B, f"flood {number}").hello)
    assert len(b.incoming_tokens) <= 3
    assert a.outgoing_token in b.incoming_tokens.values()


@pytest.mark.parametrize(("change", "named"), [({"wire_version": 99}, "99"), ({"ucx_version": "1.18.1"}, "1.18"), ({"lane": "shm"}, "shm")])
def test_what_does_not_fit_is_named(change: dict[str, object], named: str) -> None:
    a = side(A, B, "1")
    obstacle = a.refusal_of(side(B, A, "2", **change).hello)
    assert obstacle is not None
    assert named in obstacle


def test_a_patch_version_of_ucx_may_differ() -> None:
    assert side(A, B, "1").refusal_of(side(B, A, "2", ucx_version="1.22.1").hello) is None


@dataclass
class World:
    """Two sides that begin again at random and a network that loses, repeats and reorders; then a calm in which both must complete."""

    chance: random.Random
    sides: dict[PeerId, Handshake] = field(default_factory=dict)
    wire: list[tuple[PeerId, Hello | Answer | bytes]] = field(default_factory=list)
    count: int = 0

    def begin(self, me: PeerId) -> None:
        self.count += 1
        self.sides[me] = side(me, B if me == A else A, f"join {self.count}")

    def speak(self, me: PeerId) -> None:
        peer = B if me == A else A
        self.wire.append((peer, self.sides[me].hello))
        token = self.sides[me].outgoing_token
        if token is not None:
            self.wire.append((peer, token))

    def hear(self, me: PeerId, message: Hello | Answer | bytes) -> None:
        mine = self.sides[me]
        if isinstance(message, Hello):
            self.wire.append((B if me == A else A, mine.on_hello(message)))
        elif isinstance(message, Answer):
            mine.on_answer(message)
        else:
            for nonce, token in list(mine.incoming_tokens.items()):
                if token != message:
                    continue
                if mine.is_superseded_by(nonce):
                    self.begin(me)
                else:
                    mine.on_proof(nonce)


@pytest.mark.parametrize("seed", range(60))
def test_both_complete_in_the_same_session_whatever_went_before(seed: int) -> None:
    world = World(random.Random(seed))
    for me in (A, B):
        world.begin(me)
    for _ in range(200):
        me = world.chance.choice((A, B))
        if world.chance.random() < 0.08:
            world.begin(me)
        world.speak(me)
        world.chance.shuffle(world.wire)
        for _ in range(world.chance.randint(0, 4)):
            if world.wire:
                target, message = world.wire[-1] if world.chance.random() < 0.2 else world.wire.pop()
                world.hear(target, message)
        del world.wire[30:]
    world.wire.clear()
    for _ in range(6):
        for me in (A, B):
            world.speak(me)
            while world.wire:
                world.hear(*world.wire.pop(0))
    a, b = world.sides[A], world.sides[B]
    assert a.is_complete, seed
    assert b.is_complete, seed
    assert a.outgoing_token in b.incoming_tokens.values()
    assert b.outgoing_token in a.incoming_tokens.values()
    assert a.answer is not None
    assert b.answer is not None
    assert a.answer.nonce == b.hello.nonce
    assert b.answer.nonce == a.hello.nonce
