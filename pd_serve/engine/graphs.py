"""Decode steps as captured graphs: a step of few rows costs more in launching its thousand small kernels than in running them.

    warm_up()                 for every bucket: run the step, then capture it (on CUDA a CUDA graph; all share one memory pool)
    forward(inputs)           copy the step's inputs to where the bucket's graph reads them, replay, hand out the sampled rows' logits

A bucket is a number of rows; a step takes the smallest that holds it, and the rows that it does not need are idle: they write to a block
that no sequence owns, and see nothing but its first slot. What is captured reads and writes only memory that keeps its place, and calls
nobody: a step that calls on_layer, and every step with a chunk of a prompt, is not for a graph. CAPTURE ITSELF HAS NOT YET RUN ON A GPU;
all else is tested with a recorder of operations in its place. Owned by the engine thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol

import torch
from torch import Tensor

from pd_serve.engine.attention.base import CapturableAttention, PlanT
from pd_serve.engine.families.fallback import FallbackInfo
from pd_serve.engine.host_mirror import HostMirror
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.registry import DecoderModel
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.errors import EngineError

_SMALL = (2, 4, 8, 16)
"""Buckets below _STEP. A step of one token is computed as two rows anyway (step_inputs.py)."""
_STEP = 32
_TOKEN_IDS, _POSITIONS, _SLOTS = range(3)


class Graph(Protocol):
    def replay(self) -> None:
        """Do again what was captured, with what now lies in the memory that it read."""
        ...


class Capturer(Protocol):
    def capture(self, step: Callable[[], None]) -> Graph:
        """Run `step` until nothing of it is lazy any more, and capture it."""
        ...


@dataclass(frozen=True, slots=True)
class GraphSettings:
    max_rows: int
    idle_block: int
    """Of the pool, and no sequence's: idle rows write here."""
    max_len: int
    """Longest context, tokens."""
    device: torch.device


class GraphedDecode(Generic[PlanT]):
    def __init__(
        self,
        model: DecoderModel[PlanT],
        attention: CapturableAttention[PlanT],
        cache: PagedCache,
        capturer: Capturer,
        settings: GraphSettings,
    ) -> None:
        self.buckets = buckets_up_to(settings.max_rows)
        self._model = model
        self._cache = cache
        self._capturer = capturer
        self._idle_block = settings.idle_block
        num_rows = self.buckets[-1]
        self._inputs = HostMirror(3 * num_rows, torch.int64, settings.device)
        """Of a bucket: [3, bucket], from the front, so that a step's are one copy."""
        self._row_numbers = torch.arange(num_rows, device=settings.device)
        self._attention = attention.decode_buffers(num_rows, settings.max_len)
        self._logits: Tensor | None = None
        """[num_rows, vocab_size], what every bucket's graph writes."""
        self._graphs: dict[int, Graph] = {}

    def warm_up(self) -> None:
        """Capture every bucket, the largest first: its memory then serves the others. Raises EngineError where capture fails."""
        with torch.inference_mode():
            for bucket in reversed(self.buckets):
                self._fill(None, bucket)
                try:
                    self._graphs[bucket] = self._capturer.capture(self._step(bucket))
                except RuntimeError as error:
                    raise EngineError(f"a decode step of {bucket} rows cannot be captured (engine.cuda_graphs = false): {error}") from error

    def bucket_for(self, num_rows: int) -> int | None:
        """The smallest that holds them; None: there is none."""
        index = bisect_left(self.buckets, num_rows)
        return self.buckets[index] if index < len(self.buckets) else None

    def forward(self, inputs: StepInputs) -> Tensor | None:
        """Logits of the sampled rows, [num_sampled, vocab_size], valid until the next call; None: not a step for a graph.

        Precondition: warm_up() has been called, and nobody waits for the step's layers one by one.
        """
        is_decode = inputs.num_decode_rows >= inputs.num_tokens
        bucket = self.bucket_for(inputs.num_tokens) if is_decode else None
        if bucket is None:
            return None
        self._fill(inputs, bucket)
        self._graphs[bucket].replay()
        assert self._logits is not None, "set by warm_up()"
        if inputs.sampled_entries == tuple(range(inputs.num_tokens)):
            return self._logits[: inputs.num_tokens]
        return self._logits.index_select(0, inputs.sampled_rows.to(self._logits.device))

    def _fill(self, inputs: StepInputs | None, bucket: int) -> None:
        """Put the step's inputs where the bucket's graph reads them; None: every row is idle."""
        num_rows = 0 if inputs is None else inputs.num_tokens
        host = self._inputs.open()[: 3 * bucket].view(3, bucket)
        if inputs is not None:
            for index, values in enumerate((inputs.token_ids, inputs.positions, inputs.slots)):
                host[index, :num_rows] = values[:num_rows]
        host[_TOKEN_IDS : _POSITIONS + 1, num_rows:] = 0
        host[_SLOTS, num_rows:] = self._idle_block * self._cache.layout.block_size
        self._inputs.send(3 * bucket)
        self._attention.fill(() if inputs is None else inputs.spans, bucket, self._idle_block)

    def _step(self, bucket: int) -> Callable[[], None]:
        """What is captured. Its inputs are the first `bucket` rows of the buffers, all of them sampled."""
        rows = self._inputs.device[: 3 * bucket].view(3, bucket)
        inputs = StepInputs(
            num_tokens=bucket,
            num_decode_rows=bucket,
            token_ids=rows[_TOKEN_IDS],
            positions=rows[_POSITIONS],
            slots=rows[_SLOTS],
            sampled_rows=self._row_numbers[:bucket],
            spans=(),
            sampled_entries=tuple(range(bucket)),
        )
        plan = self._attention.plan(bucket)

        def step() -> None:
            logits = self._model.forward(inputs, self._cache, plan, None)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits[:bucket].copy_(logits)

        return step


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """Ascending; the last holds `max_rows`."""
    buckets = [size for size in _SMALL if size < max_rows]
    buckets += range(_STEP, max_rows, _STEP)
    return (*buckets, max(max_rows, _SMALL[0]))


def can_be_captured(info: ModelInfo, num_ranks: int) -> bool:
    """Experts ask the host how many rows each has, latents are gathered by length, ranks meet between layers, and of transformers' own
    classes nothing is known."""
    return num_ranks == 1 and info.experts is None and info.latent is None and not isinstance(info, FallbackInfo)
