"""Runs one step: a batch in, the sampled tokens out. Owned by the engine thread, as is every torch object below it.

The only meeting point with whatever sends KV away is `on_layer`, called on this thread right after a layer's keys and values of the whole
batch are written (on CUDA: enqueued, with an event recorded) and before that layer's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Generic, Protocol

import torch

from pd_serve.clock import Clock
from pd_serve.engine.attention.base import AttentionBackend, PlanT
from pd_serve.engine.batch import Batch, SampledToken, SampleSpec, StepResult
from pd_serve.engine.grammar import Constrained, GrammarMasks, TokenMasks
from pd_serve.engine.graphs import GraphedDecode
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.layer_events import LayerEvents
from pd_serve.engine.models.registry import DecoderModel
from pd_serve.engine.sampler import Choice
from pd_serve.engine.step_inputs import StepInputs, build_step_inputs
from pd_serve.errors import EngineError

MASK_TIMEOUT_S = 60.0
"""For the masks of a step: they take milliseconds once the vocabulary has been read."""


class TokenSampler(Protocol):
    """sampler.Sampler, or on CUDA device_sampler.DeviceSampler: the same tokens."""

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec], masks: TokenMasks | None = None) -> tuple[Choice, ...]:
        """One choice per row of `logits` [num_rows, vocab_size]. Raises EngineError where a row holds no finite maximum."""
        ...


class ModelRunner(Generic[PlanT]):
    """Built by loader.load_runner. `cache` and `layer_events` are public for the pusher."""

    def __init__(
        self,
        model: DecoderModel[PlanT],
        attention: AttentionBackend[PlanT],
        cache: PagedCache,
        sampler: TokenSampler | None,
        device: torch.device,
        clock: Clock,
    ) -> None:
        """`sampler`: None on a rank that computes its share for the first one, which samples."""
        self.cache = cache
        self.layer_events = LayerEvents(cache.layout.num_layers) if device.type == "cuda" else None
        """On CUDA: when each layer's KV of the last step is really in memory. None on CPU, where it is when on_layer is called."""
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._device = device
        self._clock = clock
        self._graphs: GraphedDecode[PlanT] | None = None
        self.grammars: GrammarMasks | None = None
        """What answers with a form to keep are masked by; None: there may be none. Set by the loader."""

    @property
    def graphs(self) -> GraphedDecode[PlanT] | None:
        """That decode steps are replayed from; None: every step is eager."""
        return self._graphs

    def use_graphs(self, graphs: GraphedDecode[PlanT] | None) -> None:
        """From now on decode steps that fit are replayed. Precondition: made of this runner's parts, and warm."""
        self._graphs = graphs

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Compute the batch, write its KV, sample. `on_layer(i)` is called for every layer in order when batch.has_push.

        With several ranks each must execute the same batches in the same order; only the first one's result has tokens.
        Block tables must name blocks of the pool that no other entry writes. Raises EngineError when the logits are not finite or another
        rank is gone.
        """
        started_at = self._clock.now()
        # A graph's inputs travel together: they are built on the host.
        home = self._device if self._graphs is None else torch.device("cpu")
        inputs = build_step_inputs(batch.entries, self.cache.layout.block_size, home)
        if self._sampler is None:
            inputs = replace(inputs, sampled_rows=inputs.sampled_rows[:0], sampled_entries=())
        masking = self._begin_masks(batch, inputs)
        with torch.inference_mode():
            logits = self.forward(inputs, on_layer if batch.has_push else None)
            specs = [batch.entries[index].sample for index in inputs.sampled_entries]
            masks = None if masking is None else masking.result(MASK_TIMEOUT_S)
            choices = self._sampler.sample(logits, [spec for spec in specs if spec is not None], masks) if self._sampler is not None else []
        by_entry = dict(zip(inputs.sampled_entries, choices, strict=True))
        cut = {inputs.sampled_entries[row] for row in masks.broken} if masks is not None else ()
        sampled = tuple(
            SampledToken(batch.entries[index].attempt_id, by_entry[index].token_id, by_entry[index].logprobs, index in cut)
            for index in sorted(by_entry)
        )
        return StepResult(batch.step_id, sampled, started_at, self._clock.now())

    def _begin_masks(self, batch: Batch, inputs: StepInputs) -> Future[TokenMasks] | None:
        """Of the rows whose tokens must keep to a grammar, on another thread; None: there are none."""
        asked: list[Constrained] = []
        for row, index in enumerate(inputs.sampled_entries):
            spec = batch.entries[index].sample
            if spec is not None and spec.params.grammar is not None:
                asked.append(Constrained(row, batch.entries[index].attempt_id, spec.params.grammar, spec))
        if not asked:
            return None
        if self.grammars is None:
            raise EngineError("an answer has a grammar to keep, and there is no tokenizer to do it with")
        return self.grammars.begin(asked)

    def forward(self, inputs: StepInputs, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits of the sampled rows, [num_sampled, vocab_size]; must run under inference mode."""
        if self._graphs is not None:
            # The hook is called between a layer's kernels, which a graph does not give away.
            logits = self._graphs.forward(inputs) if on_layer is None else None
            if logits is not None:
                return logits
            inputs = inputs.on(self._device)
        hook = on_layer
        if on_layer is not None and self.layer_events is not None:
            hook = self.layer_events.recording(on_layer)
        return self._model.forward(inputs, self.cache, self._attention.plan(inputs.spans), hook)
