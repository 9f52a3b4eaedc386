"""What the linked routers hear of the prefix cache: changes for all, a snapshot for each that begins or has missed something. Pure.

Owned by WorkerMachine, which asks for frames with the rhythm of Load (protocol/cache_events.py has the rules). While no router is linked,
nothing is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_serve.ids import LinkId
from pd_serve.kv.prefix_chain import SHORT_NBYTES
from pd_serve.kv.prefix_index import PrefixIndex
from pd_serve.protocol.cache_events import MAX_DIGESTS, CacheEvents
from workers.events import SendFrame

PARTS_AT_ONCE = 8
"""Of a snapshot, to one link: some milliseconds of the control thread, and little that could pile up before a slow router."""


@dataclass(slots=True)
class _Follower:
    """One link. `digests` None: nothing is due but changes."""

    digests: tuple[bytes, ...] | None = None
    next_part: int = 0
    has_begun: bool = False
    is_asking: bool = True

    @property
    def is_behind(self) -> bool:
        return self.is_asking or self.digests is not None


class CacheFeed:
    """opened -> frames ... -> closed, for each link."""

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._followers: dict[LinkId, _Follower] = {}
        self._seq = 0

    @property
    def is_behind(self) -> bool:
        """There is more of a snapshot to send."""
        return any(follower.is_behind for follower in self._followers.values())

    def opened(self, link_id: LinkId) -> None:
        if not self._followers:
            self._prefixes.listen(True)
        self._followers[link_id] = _Follower()

    def closed(self, link_id: LinkId) -> None:
        """Idempotent."""
        if self._followers.pop(link_id, None) is not None and not self._followers:
            self._prefixes.listen(False)

    def asked(self, link_id: LinkId) -> None:
        """It wants a snapshot, from the beginning."""
        follower = self._followers.get(link_id)
        if follower is not None:
            follower.is_asking = True

    def frames(self) -> list[SendFrame]:
        """What is due to whom now."""
        if not self._followers:
            return []
        changes = self._prefixes.take_changes()
        sending: list[SendFrame] = []
        for removed in _pieces(changes.removed):
            sending += self._to_all(b"", removed)
        for stored in _pieces(changes.stored):
            sending += self._to_all(stored, b"")
        for link_id, follower in self._followers.items():
            if follower.is_behind:
                sending += [SendFrame(link_id, part) for part in self._snapshot(follower)]
        return sending

    def _to_all(self, stored: bytes, removed: bytes) -> list[SendFrame]:
        self._seq += 1
        frame = CacheEvents(self._seq, stored, removed)
        return [SendFrame(link_id, frame) for link_id, follower in self._followers.items() if follower.has_begun]

    def _snapshot(self, follower: _Follower) -> list[CacheEvents]:
        """The next parts of it."""
        if follower.is_asking:
            follower.digests, follower.next_part = self._prefixes.digests(), 0
            follower.is_asking, follower.has_begun = False, True
        digests = follower.digests
        assert digests is not None
        num_parts = max(1, -(-len(digests) // MAX_DIGESTS))
        end = min(num_parts, follower.next_part + PARTS_AT_ONCE)
        parts: list[CacheEvents] = []
        for part in range(follower.next_part, end):
            listed = self._prefixes.still_published(digests[part * MAX_DIGESTS : (part + 1) * MAX_DIGESTS])
            parts.append(CacheEvents(self._seq, _shortened(listed), part=part, num_parts=num_parts))
        follower.next_part = end
        if end == num_parts:
            follower.digests = None
        return parts


def _pieces(digests: Sequence[bytes]) -> Iterable[bytes]:
    return (_shortened(digests[begin : begin + MAX_DIGESTS]) for begin in range(0, len(digests), MAX_DIGESTS))


def _shortened(digests: Iterable[bytes]) -> bytes:
    return b"".join(digest[:SHORT_NBYTES] for digest in digests)
