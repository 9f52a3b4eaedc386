"""Ranks of one host without GPUs: every two of them share a Unix socket, and send each other what is to be summed.

A sum is taken about sixty times in a step of a small model, each time by all ranks at once, so that what counts is how many threads must
wake up on the way: here one per rank. Measured for two ranks and 18 KiB on two busy cores, median: 25 us, by gloo 326 us.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from pd_serve.errors import EngineError

_CHUNK_NBYTES = 64 * 1024
"""Sent before the same of the others is read. Of a chunk at most is under way in each direction: it fits a socket's buffer (208 KiB by
default on Linux), so that no two ranks ever wait for each other to read."""


class SocketCollective:
    """See parallel.Collective. Owns its sockets."""

    def __init__(self, rank: int, num_ranks: int, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`peers`: a connected socket to every other rank. `timeout_s`: for a wait for another rank."""
        self.rank = rank
        self.num_ranks = num_ranks
        self._peers = dict(sorted(peers.items()))
        self._buffers = {peer: torch.empty(0, dtype=torch.uint8) for peer in self._peers}
        for connection in self._peers.values():
            connection.settimeout(timeout_s)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous(), "parts of a tensor cannot be summed in place"
        parts = self._exchange(tensor)
        if self.num_ranks == 2:
            return tensor.add_(parts[1 - self.rank])
        # In the order of ranks, of which this one is somewhere in the middle.
        parts[self.rank] = tensor.clone()
        torch.add(parts[0], parts[1], out=tensor)
        for rank in range(2, self.num_ranks):
            tensor += parts[rank]
        return tensor

    def minimum(self, value: int) -> int:
        others = self._exchange(torch.tensor([value], dtype=torch.int64))
        return min(value, *(int(other.item()) for other in others.values()))

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()

    def _exchange(self, tensor: Tensor) -> dict[int, Tensor]:
        """The other ranks' tensors, valid until the next call."""
        nbytes = tensor.nbytes
        for peer, buffer in self._buffers.items():
            if buffer.nbytes < nbytes:
                self._buffers[peer] = torch.empty(nbytes, dtype=torch.uint8)
        own = _bytes_of(tensor)
        others = [(self._peers[peer], _bytes_of(buffer)) for peer, buffer in self._buffers.items()]
        try:
            for first in range(0, nbytes, _CHUNK_NBYTES):
                past = min(first + _CHUNK_NBYTES, nbytes)
                for connection, _ in others:
                    connection.sendall(own[first:past])
                for connection, received in others:
                    _receive(connection, received[first:past])
        except OSError as error:
            # Whatever comes now may be the rest of a sum that this rank has given up.
            self.close()
            raise EngineError(f"rank {self.rank} lost the other ranks: {error}") from error
        return {peer: buffer[:nbytes].view(tensor.dtype).view(tensor.shape) for peer, buffer in self._buffers.items()}


def open_socket_group(rank: int, num_ranks: int, path: str, timeout_s: float) -> SocketCollective:
    """Meet by a new file at `path`: each rank listens in a private folder, tells the others where, and calls those before it.

    Raises RuntimeError or OSError where not all of them came in time.
    """
    store: Store = FileStore(path, num_ranks)
    store.set_timeout(timedelta(seconds=timeout_s))
    peers: dict[int, socket.socket] = {}
    try:
        with _listening(timeout_s) as (listener, address):
            store.set(f"address-{rank}", address)
            for other in range(rank):
                peers[other] = _connect(store.get(f"address-{other}").decode(), rank, timeout_s)
            for _ in range(rank + 1, num_ranks):
                connection, _ = listener.accept()
                connection.settimeout(timeout_s)
                caller = bytearray(4)
                _receive(connection, memoryview(caller))
                peers[int.from_bytes(caller, "little")] = connection
    except BaseException:
        for connection in peers.values():
            connection.close()
        raise
    return SocketCollective(rank, num_ranks, peers, timeout_s)


@contextmanager
def _listening(timeout_s: float) -> Iterator[tuple[socket.socket, str]]:
    """In a folder that other users cannot enter, gone with all that is in it when every rank has called."""
    folder = tempfile.mkdtemp(prefix="pd-serve-")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "rank")
            listener.bind(address)
            listener.listen()
            listener.settimeout(timeout_s)
            yield listener, address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str, rank: int, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
        connection.sendall(rank.to_bytes(4, "little"))
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises OSError."""
    num_received = 0
    while num_received < len(target):
        count = connection.recv_into(target[num_received:])
        if not count:
            raise ConnectionResetError("a rank closed its socket")
        num_received += count


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
