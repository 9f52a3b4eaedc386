"""Runs transformers' own model over our KV pool and attention: whatever has no module of its own. Owned by the engine thread.

All tokens of a step are one sequence of batch size one, without mask or cache; transformers hands every attention layer's queries, keys and
values to `_attend`, which writes the keys and values, calls `on_layer`, and attends by sequence. Slower than an own module by each layer's
Python and small operations. Every argument that our attention does not honour is refused by name, in the probe at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from pd_serve.engine.attention.base import FULL, AttentionBackend, LayerRule, PlanT
from pd_serve.engine.families.fallback import FallbackInfo
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.models.fallback_linear import RowCounts
from pd_serve.engine.models.llama import LayerHook
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.errors import ModelError

ATTENTION_NAME = "pd-serve-paged"
_HONOURED_ELSEWHERE = frozenset({"position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions", "dropout"})
"""Arguments of attention that say nothing which queries, keys and plan do not say."""


@dataclass(slots=True)
class _Step(Generic[PlanT]):
    """What a step's attention layers need, handed through transformers as an argument; counts the layers that have been here."""

    model: FallbackModel[PlanT]
    cache: PagedCache
    rows: Tensor
    plan: PlanT
    on_layer: LayerHook | None
    num_tokens: int
    next_layer: int = 0


class FallbackModel(Generic[PlanT]):
    """Made by fallback_load.build_fallback, which tries it out."""

    def __init__(self, info: FallbackInfo, model: PreTrainedModel, attention: AttentionBackend[PlanT]) -> None:
        self.info = info
        self.counts = RowCounts()
        self.model = model
        self.attention = attention
        AttentionInterface.register(ATTENTION_NAME, _attend)
        model.set_attn_implementation(ATTENTION_NAME)

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT, on_layer: LayerHook | None) -> Tensor:
        """See DecoderModel. Raises ModelError for what the model asks of attention and does not get."""
        step = _Step(self, cache, cache.rows(inputs.slots), plan, on_layer, inputs.num_tokens)
        kept = inputs.sampled_rows if inputs.sampled_entries else inputs.sampled_rows.new_zeros(1)
        self.counts.num_rows, self.counts.num_decode_rows = inputs.token_ids.shape[0], inputs.num_decode_rows
        out = self.model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=kept,
            pd_serve_step=step,
        )
        if step.next_layer != self.info.num_layers:
            raise ModelError(
                f"{self.info.architecture}: {step.next_layer} of {self.info.num_layers} layers asked for attention: not supported"
            )
        logits: Tensor = out.logits[0]
        return logits[: len(inputs.sampled_entries)]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pd_serve_step: _Step[Any] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `query` [1, num_heads, num_rows, head_dim], `key` and `value` with their own number of heads.

    Returns [1, num_rows, num_heads, head_dim].
    """
    name = type(module).__name__
    if pd_serve_step is None:
        raise ModelError(f"{name} does not hand on what attention needs: not supported")
    step, index = pd_serve_step, pd_serve_step.next_layer
    info = step.model.info
    window = sliding_window or FULL
    expected = (*(info.layer_windows or (FULL,) * info.num_layers), FULL)[min(index, info.num_layers)]
    problems = {
        "an attention mask": attention_mask is not None,
        "attention that is not causal": getattr(module, "is_causal", True) is False or others.pop("is_causal", None) is False,
        f"layer {getattr(module, 'layer_idx', None)} as its {index}-th": getattr(module, "layer_idx", None) != index,
        f"a window of {window} where the config says {expected}": window != expected,
        f"a softcap of {softcap} where the config says {info.softcap}": (softcap or 0.0) != info.softcap,
        f"keys of shape {list(key.shape)}": key.shape[1::2] != (info.num_kv_heads, info.head_dim) or key.shape != value.shape,
        **{f"argument {given}": _says_something(given, what) for given, what in others.items()},
    }
    refused = [problem for problem, is_there in problems.items() if is_there]
    if refused:
        raise ModelError(f"{name} has {', '.join(refused)}: not supported")
    step.next_layer += 1
    step.cache.write(index, step.rows, torch.cat((key[0], value[0])).transpose(0, 1))
    if step.on_layer is not None:
        step.on_layer(index)
    # The scale of the plan's geometry is the usual one; the model's own goes into the queries.
    factor = 1.0 if scaling is None else scaling * info.head_dim**0.5
    queries = query[0].transpose(0, 1)
    queries = queries.contiguous() if factor == 1.0 else queries * factor
    rule = LayerRule(window, None if s_aux is None else s_aux.float())
    attended = step.model.attention.attend(queries[: step.num_tokens], step.cache.layer(index), step.plan, rule)
    if query.shape[2] != step.num_tokens:
        attended = torch.cat((attended, attended))
    return attended.view(1, query.shape[2], -1, info.head_dim), None


def _says_something(name: str, value: object) -> bool:
    return name not in _HONOURED_ELSEWHERE and value is not None and value is not False
