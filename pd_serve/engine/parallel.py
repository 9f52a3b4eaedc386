"""One model over several ranks (tensor parallelism): who the ranks are, how their partial results add up, which degrees a model allows.

Every rank computes all layers for its share of the heads and of the MLP; two sums per layer make the ranks' hidden states equal again
(Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3). What a rank holds of each tensor: parallel_shares.py.

A group belongs to one engine thread per rank; all ranks must make the same calls in the same order, so they run the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ReduceOp, Store, TCPStore, Work

from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.parallel_shares import degrees, mlp_sizes
from pd_serve.errors import ConfigError, EngineError


class Collective(Protocol):
    """What the ranks of one worker do together."""

    rank: int
    num_ranks: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, contiguous and of one shape on all ranks, by the sum over the ranks; returns it. The bits are the same on every
        rank. On CPU an element's bits do not depend on where in the tensor it is, nor on the tensor's size.

        Raises EngineError where a rank is gone or did not come within the group's time-out: the group is of no use after that. On CUDA the
        sum is only enqueued, and NCCL's watchdog ends the process instead.
        """
        ...

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values. Raises EngineError, as all_reduce."""
        ...

    def close(self) -> None:
        """Idempotent; does not wait for the other ranks."""
        ...


class SingleRank:
    """A model on one rank: nothing to add, no cost."""

    rank = 0
    num_ranks = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def minimum(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


def check_degree(info: ModelInfo, num_ranks: int) -> None:
    """Raises ConfigError, naming the degrees that work, where the model cannot be shared out to `num_ranks`."""
    allowed = degrees(info)
    if num_ranks not in allowed:
        shown = ", ".join(map(str, allowed))
        raise ConfigError(
            f"engine.tp {num_ranks} does not fit {info.architecture} with {info.num_heads} heads, {info.kv_shape.num_heads} KV heads and"
            f" an MLP of {'/'.join(map(str, mlp_sizes(info)))}; degrees that do: {shown}"
        )


def open_group(rank: int, num_ranks: int, rendezvous: str, device: torch.device, timeout_s: float) -> Collective:
    """Meet the other ranks; returns when all are there. The caller closes the group.

    `rendezvous`: `file:///path`, on a path that no group has used before and that all ranks see, or `tcp://127.0.0.1:port`, where rank 0
    listens. `timeout_s` holds for the meeting, and later for each sum, from its call until the last rank has made it too.
    Raises ConfigError for a rendezvous of another kind, EngineError where not all ranks came in time.
    """
    if num_ranks == 1:
        return SingleRank()
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _open_store(rendezvous, rank, num_ranks, timeout)
        return ProcessCollective(rank, num_ranks, _open_backend(store, rank, num_ranks, device, timeout), device)
    except RuntimeError as error:
        raise EngineError(f"rank {rank} of {num_ranks} did not meet the others: {error}") from error


class ProcessCollective:
    """Ranks in processes of their own: gloo over loopback on CPU, NCCL on CUDA. Made by open_group."""

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
            raise EngineError(f"rank {self.rank} lost the other ranks: {error}") from error


def _open_store(rendezvous: str, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    url = urlsplit(rendezvous)
    if url.scheme == "file" and not url.netloc and Path(url.path).is_absolute():
        store: Store = FileStore(url.path, num_ranks)
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
