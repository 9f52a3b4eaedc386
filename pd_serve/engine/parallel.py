"""One model over several ranks (tensor parallelism): who the ranks are, how their partial results add up, which degrees a model allows.

Every rank computes all layers for its share of the heads and of the MLP; two sums per layer make the ranks' hidden states equal again
(Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3). What a rank holds of each tensor: parallel_shares.py.

A group belongs to one engine thread per rank; all ranks must make the same calls in the same order, so they run the same batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

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

    `rendezvous`: `file:///path`, on a path that no group has used before and that all ranks of this host see, or `tcp://127.0.0.1:port`,
    where rank 0 listens. GPUs talk by NCCL; processors by Unix sockets where they met by a file, else by gloo.

    `timeout_s` holds for the meeting, and later for each sum, from its call until the last rank has made it too.
    Raises ConfigError for a rendezvous of another kind, EngineError where not all ranks came in time.
    """
    if num_ranks == 1:
        return SingleRank()
    path = file_path(rendezvous)
    try:
        if device.type == "cpu" and path:
            from pd_serve.engine.parallel_sockets import open_socket_group

            return open_socket_group(rank, num_ranks, path, timeout_s)
        from pd_serve.engine.parallel_torch import open_torch_group

        return open_torch_group(rank, num_ranks, rendezvous, device, timeout_s)
    except (OSError, RuntimeError) as error:
        raise EngineError(f"rank {rank} of {num_ranks} did not meet the others: {error}") from error


def file_path(rendezvous: str) -> str:
    """Of `file:///path`; empty for a rendezvous of another kind."""
    url = urlsplit(rendezvous)
    return url.path if url.scheme == "file" and not url.netloc and Path(url.path).is_absolute() else ""
