"""What a CUDA graph does, on CPU: the operations of a step are recorded with the very tensors that they read and wrote, and done again.

So whatever a step reads from Python, or makes from numbers of the host, stays as it was when the step was captured, as in a real graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"})
"""Operations that wait for the device, which a graph cannot hold."""


@dataclass
class RecordingCapturer:
    """Counts what it does; `is_recording`: a step is being captured or replayed."""

    is_recording: bool = False
    num_captured: int = 0
    num_replayed: int = 0
    counts: list[int] = field(default_factory=list)
    """Of operations, by graph."""

    def capture(self, step: Callable[[], None]) -> RecordedGraph:
        step()
        recorder = _Recorder()
        self.is_recording = True
        with recorder:
            step()
        self.is_recording = False
        self.num_captured += 1
        self.counts.append(len(recorder.operations))
        return RecordedGraph(self, recorder.operations)


@dataclass
class RecordedGraph:
    owner: RecordingCapturer
    operations: list[_Operation]

    def replay(self) -> None:
        self.owner.num_replayed += 1
        self.owner.is_recording = True
        for operation in self.operations:
            operation.repeat()
        self.owner.is_recording = False


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    """In memory of their own; empty: it gave a view, or wrote into its arguments."""
    is_writing: bool

    def repeat(self) -> None:
        if self.is_writing:
            self.function(*self.args, **self.kwargs)
        elif self.results:
            for old, new in zip(self.results, _tensors(self.function(*self.args, **self.kwargs)), strict=True):
                old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _HOST_READS:
            raise RuntimeError(f"{name} waits for the device inside a captured step")
        out = func(*args, **kwargs)
        is_writing = func._schema.is_mutable
        storages = {_storage(tensor) for tensor in _tensors((args, kwargs)) if _has_storage(tensor)}
        results = [] if is_writing else [tensor for tensor in _tensors(out) if _storage(tensor) not in storages]
        self.operations.append(_Operation(func, args, kwargs, results, is_writing))
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
