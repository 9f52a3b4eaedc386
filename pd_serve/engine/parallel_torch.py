"""Ranks joined by torch's process groups: NCCL on GPUs, gloo over loopback on processors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ReduceOp, Store, TCPStore, Work

from pd_serve.engine.parallel import file_path
from pd_serve.errors import ConfigError, EngineError


def open_torch_group(rank: int, num_ranks: int, rendezvous: str, device: torch.device, timeout_s: float) -> TorchCollective:
    """As parallel.open_group; raises RuntimeError where not all ranks came in time."""
    timeout = timedelta(seconds=timeout_s)
    store = _open_store(rendezvous, rank, num_ranks, timeout)
    return TorchCollective(rank, num_ranks, _open_backend(store, rank, num_ranks, device, timeout), device)


class TorchCollective:
    """See parallel.Collective."""

    def __init__(self, rank: int, num_ranks: int, backend: _Backend, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._backend: _Backend | None = backend
        self._device = device
        # A library's sum over three ranks or more adds in an order that depends on an element's place. With two there is but one order.
        self._has_one_order = num_ranks == 2 or device.type == "cuda"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous(), "parts of a tensor cannot be summed in place"
        if self._has_one_order:
            self._run(lambda backend: backend.allreduce([tensor]))
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self._run(lambda backend: backend.allgather([parts], [tensor]))
        torch.add(parts[0], parts[1], out=tensor)
        for part in parts[2:]:
            tensor += part
        return tensor

    def minimum(self, value: int) -> int:
        shared = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._run(lambda backend: backend.allreduce([shared], op=ReduceOp.MIN))
        return int(shared.item())

    def close(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None

    def _run(self, start: Callable[[_Backend], Work]) -> None:
        if self._backend is None:
            raise EngineError("the group of ranks is closed")
        try:
            start(self._backend).wait()
        except RuntimeError as error:
            self.close()
            raise EngineError(f"rank {self.rank} lost the other ranks: {error}") from error


def _open_store(rendezvous: str, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    path, url = file_path(rendezvous), urlsplit(rendezvous)
    if path:
        store: Store = FileStore(path, num_ranks)
        store.set_timeout(timeout)
        return store
    if url.scheme == "tcp" and url.hostname and url.port:
        return TCPStore(url.hostname, url.port, num_ranks, is_master=rank == 0, timeout=timeout)
    raise ConfigError(f"{rendezvous!r} is no place where ranks can meet: file:///path or tcp://host:port are")


class _Backend(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: list[Tensor], op: Any = ReduceOp.SUM) -> Work: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...
    def shutdown(self) -> None: ...


def _open_backend(store: Store, rank: int, num_ranks: int, device: torch.device, timeout: timedelta) -> _Backend:
    """Not torch's default group, which is one per process and listens wherever the host name resolves to."""
    backend: Any
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        settings = ProcessGroupNCCL.Options()
        settings._timeout = timeout
        backend = ProcessGroupNCCL(store, rank, num_ranks, settings)
    else:
        from torch._C._distributed_c10d import ProcessGroupGloo

        options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009 - named otherwise in torch's stub
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backend = ProcessGroupGloo(store, rank, num_ranks, options)
    result: _Backend = backend
    return result
