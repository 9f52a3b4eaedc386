"""The join of two peers as a pure state machine: no UCX, no clock, no randomness of its own. Driven by joining.py.

    A: add_peer(B)                                 B: add_peer(A)
    A --- Hello(nonce a) ------------------------> B      repeated until the join ends; ignored by whoever has not added the sender
    A <-- Answer(nonce b, echo a, keys) ---------- B      B has added A and its digest was right: A knows B is B, now
    A --- Ping, with token(secret, A>B, a, b) ---> B      only who has the secret and both nonces can make it: B knows A is A, now
    and the same from B to A. Complete on a side: it has an Answer to its own nonce, and a session message made with that answer's nonce.

Either side may add the other first, give up and begin again with a new nonce, or be restarted in between: a hello with a new nonce is
answered at any time, and a session message that proves the new nonce ends an older session (`is_superseded_by`). A recorded hello played
again draws an answer and changes nothing.
"""

from __future__ import annotations

from pd_serve.ids import PeerId
from pd_serve.transport.ucx.messages import Answer, Hello, JoinCodec, MemoryOffer

MAX_SESSIONS = 2
"""Nonces of the peer that are remembered: the session in use and the latest one on offer."""


class Handshake:
    """One side of one join. A new join needs a new Handshake (a new nonce)."""

    def __init__(self, codec: JoinCodec, hello: Hello, pool: MemoryOffer, scratch: MemoryOffer) -> None:
        self._codec = codec
        self._hello = hello
        self._pool = pool
        self._scratch = scratch
        self._tokens: dict[bytes, bytes] = {}
        self._proven: bytes | None = None
        self.answer: Answer | None = None
        """The peer's answer to this side's nonce."""

    @property
    def hello(self) -> Hello:
        return self._hello

    @property
    def peer(self) -> PeerId:
        return self._hello.receiver

    @property
    def incoming_tokens(self) -> dict[bytes, bytes]:
        """{the peer's nonce: the token it must put before session messages}."""
        return self._tokens

    @property
    def outgoing_token(self) -> bytes | None:
        """Goes before everything sent to the peer in this session; None before its answer."""
        if self.answer is None:
            return None
        mine = self._hello
        return self._codec.session_token(mine.sender, mine.receiver, mine.nonce, self.answer.nonce)

    @property
    def is_complete(self) -> bool:
        return self.answer is not None and self._proven == self.answer.nonce

    def refusal_of(self, hello: Hello) -> str | None:
        """Why the two cannot work together; None when they can."""
        mine = self._hello
        for name, ours, theirs in (
            ("transport protocol", mine.wire_version, hello.wire_version),
            ("UCX", major_minor(mine.ucx_version), major_minor(hello.ucx_version)),
            ("lane", mine.lane, hello.lane),
        ):
            if ours != theirs:
                return f"{name} differs: {ours} on {mine.sender}, {theirs} on {hello.sender}"
        return None

    def on_hello(self, hello: Hello) -> Answer:
        """The hello's digest was right, it is addressed to this process, and `refusal_of` has nothing against it."""
        self._offer_session(hello.nonce)
        return Answer(hello.receiver, hello.sender, self._hello.nonce, hello.nonce, self._pool, self._scratch)

    def on_answer(self, answer: Answer) -> bool:
        """True when it answers this join and was taken; a complete join takes no other answer."""
        if answer.echo != self._hello.nonce or answer.sender != self.peer or self.is_complete:
            return False
        self._offer_session(answer.nonce)
        self.answer = answer
        return True

    def on_proof(self, their_nonce: bytes) -> None:
        """A session message arrived with the token that belongs to this nonce of the peer."""
        if not self.is_complete:
            self._proven = their_nonce

    def is_superseded_by(self, their_nonce: bytes) -> bool:
        """The peer has proven a later join than the one this side considers complete: it has let go of that one."""
        return self.is_complete and self._proven != their_nonce

    def _offer_session(self, their_nonce: bytes) -> None:
        if their_nonce in self._tokens:
            return
        keep = {self._proven, self.answer.nonce if self.answer is not None else None}
        for nonce in [nonce for nonce in self._tokens if nonce not in keep][: max(0, len(self._tokens) - MAX_SESSIONS + 1)]:
            del self._tokens[nonce]
        mine = self._hello
        self._tokens[their_nonce] = self._codec.session_token(mine.receiver, mine.sender, their_nonce, mine.nonce)


def major_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
