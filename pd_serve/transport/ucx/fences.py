"""Who can still write into this process's pool, and when that ends.

A peer that was given a key to the pool can write without asking until one of these is seen: its Bye (it has let go), its next join (it let
go of the earlier one), or the end of its process (pidfd). Nothing else counts: not a timeout, not an endpoint's failure, not unmapping.
Local peers are watched by pidfd whatever their lane, so that a dead one is noticed at once. Owns the pidfds.
"""

from __future__ import annotations

from pd_serve.ids import PeerId
from pd_serve.transport.ucx.process import ProcessIdentity, ProcessWatch, has_ended, kill_process, open_process


class Fences:
    def __init__(self) -> None:
        self._watch = ProcessWatch()
        self._pidfds: dict[PeerId, int] = {}
        self._peers: dict[int, PeerId] = {}
        self._exposed: set[PeerId] = set()
        self._forgotten: set[PeerId] = set()

    def fileno(self) -> int:
        return self._watch.fileno()

    def watch(self, peer: PeerId, process: ProcessIdentity) -> bool:
        """Begin to watch a local peer's process. False when it has ended already."""
        self._forgotten.discard(peer)
        if peer in self._pidfds:
            return True
        pidfd = open_process(process)
        if pidfd is None:
            return False
        self._pidfds[peer] = pidfd
        self._peers[pidfd] = peer
        self._watch.add(pidfd)
        return True

    def expose(self, peer: PeerId) -> None:
        """The peer is about to get a key to the pool."""
        self._exposed.add(peer)

    def can_write(self, peer: PeerId) -> bool:
        """The peer could write into the pool now without being checked."""
        return peer in self._exposed

    def is_alive(self, peer: PeerId) -> bool:
        """False only when its process is known to have ended."""
        pidfd = self._pidfds.get(peer)
        return pidfd is None or not has_ended(pidfd)

    def release(self, peer: PeerId) -> None:
        """The peer has let go of its key, or can do nothing any more."""
        self._exposed.discard(peer)
        if peer in self._forgotten:
            self.forget(peer)

    def forget(self, peer: PeerId) -> None:
        """Stop watching, unless the peer can still write: then it is watched, silently, until it cannot."""
        if peer in self._exposed:
            self._forgotten.add(peer)
            return
        self._forgotten.discard(peer)
        self._exposed.discard(peer)
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            del self._peers[pidfd]
            self._watch.discard(pidfd)

    def take_ended(self) -> list[PeerId]:
        """Watched peers whose process has ended since the last call; they can write no more and are not watched any longer."""
        ended = [self._peers[pidfd] for pidfd in self._watch.ended()]
        told = [peer for peer in ended if peer not in self._forgotten]
        for peer in ended:
            self._exposed.discard(peer)
            self.forget(peer)
        return told

    def kill(self, peer: PeerId) -> bool:
        """End the peer's process. False when it is not known, not local, or gone already."""
        pidfd = self._pidfds.get(peer)
        return pidfd is not None and kill_process(pidfd)

    def close(self) -> None:
        self._watch.close()
        self._pidfds.clear()
        self._peers.clear()
        self._exposed.clear()
        self._forgotten.clear()
